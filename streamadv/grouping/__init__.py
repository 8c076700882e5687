"""From single trajectories to groups: scorers, the grouper, the groups log.

In reading order:

- Scorers: `scorer.py` (the worker loop), `scores.py` (calls the function), `away.py` (what has no score yet),
  `scoring_streams.py` (hands packets on; packets wait for their group). `judge.py` is a function that asks over the
  network, with a memory.
- Groups: `grouper.py` and its `housekeeping.py`. `lua/lib/complete.lua` decides how a group ends.
- Later stages: `groups_log.py` (reads groups), `layout.py` (the members of many groups end to end).
"""
