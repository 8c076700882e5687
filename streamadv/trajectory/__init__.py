"""What travels: the trajectory, its stored form, and the files it is read from. No Redis, no torch.

`columns` names and checks arrays, `fields` and `schema` are the pydantic model over them. `packet_encoding` makes
packets of trajectories whose fields are `checked`, by the model or by a producer. What a packet stores is read in two
parts: the numbers of its members, which pass through streams (`members`, `member_table`), and the columns beside them
(`packet`); `listing` has the numbers in words, `versions` maps other programs' counters. `reference` and `payload` are
a single trajectory's, for users. `interchange` reads and writes JSON lines; `adapters` reads recordings of other tools.
"""
