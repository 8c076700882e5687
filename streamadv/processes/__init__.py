"""Child processes: how a supervisor starts, hears, kills and ends them, and their memory.

`children` are processes of the package, which send `messages` to the demo or a benchmark. `machine` is what
`streamadv up` runs: commands (`kept` by a `keeper` each), and workers (`worker`). `malloc` and
`garbage` are about memory.
"""
