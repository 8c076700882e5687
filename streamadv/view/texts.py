"""Text of tokens, by a `tokenizer.json` on this machine; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import MissingDependencyError, SettingError
from ..extras import require
from ..logs import announce
from ..messages import one_line, printable

_TAB: Final = 4
#: Tokens that one character may be made of.
_WIDEST: Final = 6
#: What a piece of a character decodes to.
_BROKEN: Final = "\ufffd"
#: Pieces that are remembered.
_MOST_PIECES: Final = 1 << 18


class Ids:
    """Token ids in place of text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a stretch of tokens."""
        return " ".join(map(str, ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text of each token; of a character of several tokens the first has it, the others are empty."""
        return [f"{token} " for token in ids]


class Texts(Ids):
    """Text by a tokenizer, without what would move a cursor."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._between = "" if tokenizer.decoder is not None else " "
        self._pieces: dict[tuple[int, ...], str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return _shown(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        found = list[str]()
        while len(found) < len(ids):
            start, width = len(found), 1
            text = self._piece(tuple(ids[start : start + 1]))
            while _BROKEN in text and width < min(_WIDEST, len(ids) - start):
                width += 1
                text = self._piece(tuple(ids[start : start + width]))
            if _BROKEN in text:
                width, text = 1, self._piece(tuple(ids[start : start + 1]))
            found += [text, *[""] * (width - 1)]
        return found

    def _piece(self, ids: tuple[int, ...]) -> str:
        if (known := self._pieces.get(ids)) is not None:
            return known
        raw = self._tokenizer.id_to_token(ids[0])
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if raw is None:
            text = f"<{ids[0]}>"
        elif raw.startswith("▁") and not text.startswith(" "):  # a decoder drops the space of the first token
            text = f" {text}"
        if len(self._pieces) >= _MOST_PIECES:
            self._pieces.clear()
        self._pieces[ids] = text = _shown(text) + self._between
        return text


def open_tokenizer(flag: str | None, of_run: str | None) -> Ids:
    """What makes text of token ids; the ids themselves without a tokenizer.

    flag: its path, for this command; of_run: by the run's settings, which may name a file of another machine: then ids
    are shown, with a message. Raises SettingError and MissingDependencyError for one that was asked for by the flag.
    """
    path = flag or of_run
    if path is None:
        return Ids()
    try:
        require("text of tokens", "tokenizers")
        from tokenizers import Tokenizer

        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise SettingError(
                f"tokenizer {path}: there is no such file: give a tokenizer.json or its folder, nothing is downloaded"
            )
        try:
            return Texts(Tokenizer.from_file(str(file)))
        except Exception as error:  # it raises nothing else
            raise SettingError(f"tokenizer {path} cannot be read: {one_line(str(error))}") from error
    except (SettingError, MissingDependencyError) as error:
        if flag is not None:
            raise
        announce(f"token ids are shown: {error}", "no_tokenizer")
        return Ids()


def _shown(text: str) -> str:
    return "\n".join(printable(line.expandtabs(_TAB)) for line in text.split("\n"))
