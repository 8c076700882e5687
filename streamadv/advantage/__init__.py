"""Advantage workers: they compute work items of named batches and publish the results.

Read `worker.py` first, then follow one work item: `prepare.py` (reads its entry and columns), `compute.py` (runs the
chain, and makes dead letters of groups that break it). The trainer reads results with `results.py`.
"""

from .. import extras

extras.require("streamadv.advantage", *extras.TO_COMPUTE)
