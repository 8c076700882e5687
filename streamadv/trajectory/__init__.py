"""What travels: the trajectory, its columns, how both are encoded, and the files they are read from."""
