"""What travels: the trajectory, its two stored forms, and the files it is read from. No Redis, no torch.

`columns` names and checks arrays, `fields` and `schema` are the pydantic model over them. `reference` and `payload` are
the stored forms: the scalars that pass through streams, and the data beside them. `interchange` reads and writes JSON
lines; `adapters` reads recordings of other tools.
"""
