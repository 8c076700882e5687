"""Text of tokens, by a `tokenizer.json` on this machine; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import MissingDependencyError, SettingError
from ..extras import require
from ..logs import announce
from ..messages import one_line, printable

#: Text of some token ids.
Decode = Callable[[Sequence[int]], str]
_TAB = 4


def open_tokenizer(flag: str | None, of_run: str | None) -> Decode:
    """What makes text of token ids; the ids themselves without a tokenizer.

    flag: its path, for this command; of_run: by the run's settings, which may name a file of another machine: then ids
    are shown, with a message. Raises SettingError and MissingDependencyError for one that was asked for by the flag.
    """
    path = flag or of_run
    if path is None:
        return _as_ids
    try:
        return _opened(path)
    except (SettingError, MissingDependencyError) as error:
        if flag is not None:
            raise
        announce(f"token ids are shown: {error}", "no_tokenizer")
        return _as_ids


def _opened(path: str) -> Decode:
    require("text of tokens", "tokenizers")
    from tokenizers import Tokenizer

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise SettingError(
            f"tokenizer {path}: there is no such file: give a tokenizer.json or its folder, nothing is downloaded"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing else
        raise SettingError(f"tokenizer {path} cannot be read: {one_line(str(error))}") from error

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return "\n".join(printable(line.expandtabs(_TAB)) for line in text.split("\n"))

    return decode


def _as_ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
