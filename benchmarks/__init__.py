"""`streamadv bench`, in a checkout: this project, the peers' ways and what plain redis-py moves, in one run.

`commands` has the options of each benchmark.

The maths: `workload` (batches in two layouts), `cases` (an estimator or step beside the peers' ways), `measure` (runs
that take turns).

The pipeline: `lines` (chains and trajectories), `crew` (its processes) with `load` and `pace`, `pipeline` (all stages),
`ceiling` (plain redis-py), `others` (the peers) and `slowest` (what scripts took); `stages` and `memory` over
`alone`, `latency`, and `scaling` on a `cluster`. `machine` says where it was measured, `report` prints the tables.
"""
