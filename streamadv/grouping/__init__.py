"""From single trajectories to groups: scorers, the grouper, the groups log."""
