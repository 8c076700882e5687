"""The queue's state beside a trainer's checkpoint, as a file of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError

STATE_FILE: Final = "streamadv.json"


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Write a queue's state, whole or not at all, into the folder of a checkpoint, which is made if need be."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    unfinished = checkpoint / f".{STATE_FILE}.{os.getpid()}"
    with unfinished.open("w") as file:
        file.write(json.dumps(state))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(checkpoint / STATE_FILE)


def read_state(checkpoint: Path, remedy: str = "in a folder that all ranks see") -> dict[str, Any]:
    """The queue's state in a checkpoint. Raises SettingError, which ends with the `remedy`, if there is none."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise SettingError(
            f"checkpoint {checkpoint}: its {STATE_FILE} cannot be read ({error}): resume from one that this "
            f"trainer has saved, {remedy}"
        ) from None
    return state
