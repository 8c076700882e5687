"""Batch k: its groups, its record, and the trainer session that names, trains and commits it.

In reading order:

- A batch: `record.py` (everything decided about it, once, and its work items for the advantage workers).
- Naming: `selection.py`. How groups end, in training or not: `ends.py`.
- A training job: `progress.py` (what a rank knows, whatever the servers lose).
- Which job owns the run, and a rank's trainer session: `session.py`; rank 0's: `leader.py`, made by `recovery.py`.
  `prompts.py` is what rank 0 does for prompts.
"""
