"""What all processes of a run share: the manifest, the consumer loop, heartbeats, payload reads, dead letters."""

from .manifest import RunSettings
from .run import Run, Shard, find_run, open_run

__all__ = ["Run", "RunSettings", "Shard", "find_run", "open_run"]
