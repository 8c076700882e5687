"""Advantage workers: they compute work items of named batches and publish the results.

Read `worker.py` first, then the way of one work item: `prepare.py` (its entry and columns are read), `compute.py` (the
chain runs), `poison.py` (groups that break it become dead letters), `publish.py` (the results are handed off).
`results.py` is how the trainer reads them.
"""

from .. import extras

extras.require_torch("streamadv.advantage")
