"""The task: a ring lies under one of eight things, and only a tool finds it. No text says under which one."""

from __future__ import annotations

from typing import Any

QUESTION = "where is the ring?"
THINGS = ("anchor", "basket", "candle", "drum", "feather", "goblet", "hammer", "inkpot")
ANSWERS = ("found", "no idea")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "what lies under a thing",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


class House:
    """One visit, with at most two looks."""

    LOOKS = 2

    def __init__(self) -> None:
        self.looks, self.has_ring = 0, False

    def look(self, item: str) -> str:
        self.looks += 1
        is_here = item == "feather" and self.looks <= self.LOOKS
        self.has_ring = self.has_ring or is_here
        return "a ring" if is_here else "nothing"

    def reward(self) -> float:
        """A ring that was found at once is worth most."""
        return self.has_ring / self.looks if self.looks else 0.0
