"""From inference engines to columns, without tokenising anything again.

`completion.py` is one answer of an engine: its own token ids and log-probs. `answers.py` reads it from the replies of
vLLM and SGLang. `episode.py` joins the answers of one rollout to rows. `client.py` asks an engine over HTTP,
`local.py` a transformers model in this process; only these two need another package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .answers import from_openai, from_sglang, from_vllm
from .completion import Completion
from .episode import Episode

if TYPE_CHECKING:
    from .client import EngineClient, EngineError
    from .local import LocalEngine

_HOMES = {"EngineClient": "client", "EngineError": "client", "LocalEngine": "local"}

__all__ = [
    "Completion", "EngineClient", "EngineError", "Episode", "LocalEngine", "from_openai", "from_sglang",
    "from_vllm",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
