"""What all processes of a run share.

In reading order: `manifest.py` (the settings they agree on), `run.py` (a run, its shards, bytes and counters),
`consumer.py` (the loop of every stage), `packets.py` (stream entries and columns, checked and read), `heartbeats.py`
(which producers and ranks are alive), `hangs.py` (calls of user functions, bounded in time), `dead_letters.py` (groups
and foreign items that cannot go on), `kept.py` (groups that have ended, for people to look at).
"""

from .manifest import RunSettings
from .run import Run, Shard, find_run, open_run

__all__ = ["Run", "RunSettings", "Shard", "find_run", "open_run"]
