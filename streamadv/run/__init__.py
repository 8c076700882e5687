"""What all processes of a run share.

To read in this order: `manifest.py` (what they agree on), `run.py` (a run and its shards), `consumer.py` over
`leases.py` (the loop of all stages), `packets.py` and `payloads.py` (what stages read), `heartbeats.py` (who is alive),
`budget.py`, `hangs.py`; `dead_letters.py` and `malformed.py` (what cannot go on).
"""

from .manifest import RunSettings
from .run import Run, Shard, find_run, open_run

__all__ = ["Run", "RunSettings", "Shard", "find_run", "open_run"]
