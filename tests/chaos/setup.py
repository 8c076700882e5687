"""What all processes of one chaos run are told: a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from streamadv.run.manifest import RunSettings


@dataclass(frozen=True)
class Setup:
    """One chaos run."""

    url: str
    run: str
    folder: str
    seed: int
    settings: dict[str, Any]
    chain: dict[str, Any]
    lease_s: float = 1.0
    batch_groups: int = 4
    max_staleness: int = 3
    scale: int = 1
    #: A producer that starts again repeats what its last life has finished so recently. Where a server loses its last
    #: moments that is everything: the dead one's resend window may have waited for room over several losses.
    overlap_s: float = 15.0
    heartbeat_s: float = 1.0
    producer_timeout_s: float = 3.0

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def run_settings(self) -> RunSettings:
        return RunSettings(**self.settings)

    @property
    def stop_file(self) -> Path:
        """When it is there, producers begin nothing more."""
        return self.path / "stop"

    def save(self) -> Path:
        file = self.path / "setup.json"
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def load(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text()))
