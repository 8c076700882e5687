"""From single trajectories to groups: scorers, the grouper, the groups log.

To read in this order: `unscored.py` (what the user's function gets), `scorer.py` (the worker loop) over `scores.py`
(calling that function), `tries.py`, `given_up.py` (what the log says) and `scoring_streams.py` (what goes on to whom);
`grouper.py` and its `housekeeping.py` with `lost_producers.py` and `short_groups.py`; `groups_log.py`, which later
stages read, and `layout.py`, the members of many groups end to end; `group_traces.py`, their traces. How a group ends
is in `lua/lib/complete.lua`.
"""
