"""What travels: the trajectory, its stored form, and the files it is read from. No Redis, no torch.

- `columns` names and checks arrays. `fields`, which also finds misspelt names, and `schema` are the pydantic model on
  top.
- `members.Checked` is a trajectory with checked fields, from the model or from a producer. `packet_encoding` makes
  packets of such trajectories.
- Readers see a packet in two parts: the numbers of its members, which pass through streams (`members`,
  `member_table`), and its columns (`packet`). `versions` maps counters of other programs.
- `members` also shows users a single trajectory without its columns, `packet` with them.
- `interchange` reads and writes JSON lines; `adapters` reads recordings of other tools.
"""
