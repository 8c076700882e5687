"""Child processes: how a supervisor starts, hears, kills and ends them, and their memory.

`machine` is what `streamadv up` and the demo run: commands (`kept` by a `keeper` each), and workers and programs
(`worker`), which may send `messages`. `malloc` and `garbage` are about memory.
"""
