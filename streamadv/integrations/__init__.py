"""Bridges to packages that people use beside streamadv. Nothing else in the package imports them.

- Into the pipeline: `engines/` turns answers of inference engines into the columns of a push; `verifiers.py` does the
  same for its episodes.
- Out of the pipeline: `transformers.py` is a Trainer on the batches of a trainer queue; `trl/` has TRL's trainers;
  `slime.py` feeds slime's and miles' trainers, `tinker.py` trains by the Tinker protocol. `peft_weights.py` gives the
  weights of a model with adapters the names that engines load.
- Both ways: `verl/` has verl's trainers and its agent loops.
- Beside the pipeline: `ray.py` runs workers as actors of a Ray cluster; `trackers.py` logs batches to trackers.
"""

from __future__ import annotations

from typing import Any

from ..errors import SettingError


def refuse(is_wrong: Any, problem: str) -> None:
    """Raise SettingError with the problem, which names the remedy, if a setting of the other package is wrong."""
    if is_wrong:
        raise SettingError(problem)
