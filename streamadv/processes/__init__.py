"""Child processes: how a supervisor starts, reads, kills and ends them, and their memory.

`machine` is what `streamadv up` and the demo run: commands, workers and programs (`worker`, each run by a `keeper`),
which may send `messages`. `project` reads what a user's folder starts. `memory` is about what they keep.
"""
