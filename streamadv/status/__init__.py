"""A run from outside: where every trajectory is, whether the ledger balances, which process waits for what.

In reading order: `model` (the status as objects), `read` (reads it, over `shard` and `evaluations`), `causes` (why
nothing moves), `watchdog` (what the trainer does about it), `exported` (the status as metrics), `audit` (walks over
everything stored).

Groups as people look at them: `seen` (wherever they are), `kept` (why they are there, what the chain has made of them,
the turns of a rollout), `prompts` (how far a run is with its prompts).
"""

from .exported import export_run
from .model import Status
from .read import read_status
from .shard import problems_of, read_shards

__all__ = ["Status", "export_run", "problems_of", "read_shards", "read_status"]
