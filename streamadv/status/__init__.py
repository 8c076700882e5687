"""What a run looks like from outside: where every trajectory is, whether the ledger balances, who waits for what.

In reading order: `model` (the status as objects), `read` (reads it, over `shard`, `sizes` and `activity`), `causes`
(why nothing moves), `watchdog` (what the trainer does about it), `exported` (the status as metrics), `audit` (a walk
over everything stored, and deleting it).
"""

from .exported import export_run
from .model import Status
from .read import read_status
from .shard import problems_of, read_shards

__all__ = ["Status", "export_run", "problems_of", "read_shards", "read_status"]
