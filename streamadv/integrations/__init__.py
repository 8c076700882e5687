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

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import SettingError

if TYPE_CHECKING:
    from ..trainer.microbatch import MicroBatch

#: Of each token, the experts of each layer: an extra column.
ROUTED_EXPERTS: Final = "routed_experts"


def refuse(is_wrong: Any, problem: str) -> None:
    """Raise SettingError with the problem, which names the remedy, if a setting of the other package is wrong."""
    if is_wrong:
        raise SettingError(problem)


def columns_of(ids: Sequence[int], prompt: int, mask: Any, log_probs: Any, experts: Any) -> dict[str, Any]:
    """Columns of a push for so many tokens of a prompt and the response behind them.

    mask, log_probs: of the response's tokens, the latter or None. experts: None, or an array of the first tokens, since
    engines record none of the last ones.
    """
    made: dict[str, Any] = {
        "input_ids": np.asarray(ids, np.int32),
        "response_mask": np.r_[np.zeros(prompt, np.uint8), np.asarray(mask, np.uint8)],
    }
    if log_probs is not None:
        made["rollout_log_probs"] = np.r_[np.zeros(prompt, np.float32), np.asarray(log_probs, np.float32)]
    if experts is not None:
        made[ROUTED_EXPERTS] = np.zeros((len(ids), *experts.shape[1:]), experts.dtype)
        made[ROUTED_EXPERTS][: len(experts)] = experts
    return made


def trained_rows(micro_batch: MicroBatch) -> Iterator[tuple[int, int, int, int]]:
    """Each row with a trainable token: its number, and where it begins, where its response does, and where it ends.

    A first token is none, since nothing comes before it: it belongs to no response.
    """
    mask = micro_batch.columns["response_mask"]
    for number, (start, stop) in enumerate(pairwise(micro_batch.cu_seqlens.tolist())):
        trainable = mask[start:stop].nonzero()
        if len(trainable) and int(trainable[-1]) > 0:
            yield number, start, start + max(1, int(trainable[0])), stop
