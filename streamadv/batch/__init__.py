"""Batch k: which groups it takes, its record, and the trainer session that names, trains and commits it.

Read `record.py` (what is decided about a batch, once) and `work.py` (work items for the advantage workers) first, then
how a batch is named: `settings.py`, `candidates.py`, `selection.py`, `carryover.py`; how groups stay out of it:
`exclusion.py`, `dropped.py`; and how it ends: `commit.py`.

A training job: `job.py` (its id), `progress.py` and `named.py` (what a rank knows whatever the servers lose), `hold.py`
(who has the run). A rank's session is in `session.py`, rank 0's in `leader.py` and made by `recovery.py`, the other
ranks' in `follower.py`.
"""
