"""Bridges to packages that people use beside streamadv. Nothing else in the package imports them.

To the pipeline: `engines/`, what inference engines return, as the columns of a push; `verifiers.py`, its episodes, the
same. From the pipeline: `transformers.py`, a Trainer on the batches of a trainer queue, and `trl/`, TRL's trainers.
Both ways: `verl/`, verl's trainers and its agent loops.
Beside the pipeline: `ray.py`, its workers as actors of a Ray cluster.
"""

from __future__ import annotations

from typing import Any

from ..errors import SettingError


def refuse(is_wrong: Any, problem: str) -> None:
    """Raise SettingError with the problem, which names the remedy, if a setting of the other package is wrong."""
    if is_wrong:
        raise SettingError(problem)
