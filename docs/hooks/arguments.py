"""Docstrings list arguments as `name: meaning`, without a heading; the reference shows such a list as a table."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

ARGUMENT: Final = re.compile(r"(\w+(?:, \w+)*): \S")


class Arguments(griffe.Extension):
    """Puts the heading `Args:` over lists of arguments."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._head(func)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        self._head(cls)

    def _head(self, thing: griffe.Function | griffe.Class) -> None:
        if thing.docstring is None:
            return
        known = {parameter.name.lstrip("*") for parameter in thing.parameters}
        lines: list[str] = []
        inside = False
        for line in thing.docstring.value.split("\n"):
            match = ARGUMENT.match(line)
            begins = match is not None and known.issuperset(match[1].split(", "))
            if begins and not inside:
                lines += ["", "Args:"]
            elif inside and line and not begins and not line.startswith(" "):
                lines.append("")
                inside = False
            inside = begins or (inside and line != "")
            lines.append(f"    {line}" if inside else line)
        thing.docstring.value = "\n".join(lines)
