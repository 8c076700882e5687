"""One answer of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import SettingError

LENGTH: Final = "length"
ABORT: Final = "abort"


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine has sampled for one prompt.

    Raises SettingError unless there is one log-prob for each sampled token, or none at all.
    """

    prompt_ids: Sequence[int]
    """All tokens that the engine has read, as it reports them."""
    token_ids: Sequence[int]
    """The tokens it has sampled, with the one that ended them if the engine reports it."""
    log_probs: Sequence[float] | None
    """Of each sampled token; None = not asked for."""
    finish_reason: str | None = None
    """As the engine says: stop, length, tool_calls, abort."""
    version: int | None = None
    """Of the weights that sampled it; None = not known. The oldest one, if `versions` has several."""
    text: str = ""
    message: Mapping[str, Any] = field(default_factory=dict)
    """Of a chat: the assistant's message, to be put back into the messages as it is."""
    versions: Sequence[int] | None = None
    """Of the weights that sampled each token, if the engine says so; None = all `version`."""

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise SettingError(
                f"the engine has returned {len(self.token_ids)} token ids and {len(self.log_probs)} log-probs: "
                f"ask for log-probs of the sampled tokens only, one choice a request"
            )
        if self.versions is not None and len(self.versions) != len(self.token_ids):
            raise SettingError(
                f"the engine has returned {len(self.token_ids)} token ids and versions of {len(self.versions)}: it "
                f"needs to name one for each"
            )

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """Of a chat: the calls that the engine has found in the answer, {id, function: {name, arguments}}."""
        return self.message.get("tool_calls") or ()
