"""How a gateway is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import SettingError
from ..messages import brief

#: Parameters of sampling that belong to the run, with the values that change nothing.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "best_of": (None, 1),
    "ignore_eos": (None, False),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "stop_token_ids": (None, []),
    "length_penalty": (None, 1, 1.0),
}
MODES: Final = ("auto", "tokens", "chat")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one gateway process; `cli/gateway.py` explains each."""

    engines: tuple[str, ...]
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    allow_sampling: bool = False
    allow_history: bool = False
    rerender: bool = False
    load_weights: bool = False
    live_streams: bool = False
    mode: str = "auto"
    idle_s: float = 600.0
    answer_s: float = 1800.0
    grace_s: float = 30.0
    max_open: int = 4096
    max_turns: int = 32
    max_body: int = 64 << 20
    public_url: str | None = None

    def __post_init__(self) -> None:
        if not self.engines:
            raise SettingError(
                "--engine is missing: give the URL of an engine, such as http://localhost:8000"
            )
        for url in self.engines:
            if not url.startswith(("http://", "https://")):
                raise SettingError(f"--engine is {brief(url)}, needs http:// or https://")
        if self.mode not in MODES:
            raise SettingError(f"--mode is {brief(self.mode)}, needs one of {', '.join(MODES)}")
        if not isinstance(self.sampling, Mapping):
            raise SettingError(f"--sampling is {brief(self.sampling)}, needs an object in JSON")
