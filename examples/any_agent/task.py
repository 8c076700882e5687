"""The task: to find out by a tool where a thing lies. A guess is right one time in eight."""

from __future__ import annotations

import random
from typing import Any

ITEMS = ("anchor", "basket", "candle", "drum", "feather", "goblet", "hammer", "inkpot")
PLACES = ("attic", "barn", "cellar", "dock", "engine room", "foyer", "garden", "harbour")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "where a thing lies",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def question(item: str) -> str:
    return f"where is the {item}?"


class House:
    """Where everything lies, today."""

    def __init__(self, chance: random.Random) -> None:
        self.places = dict(zip(ITEMS, chance.sample(PLACES, len(ITEMS)), strict=True))
        self.item = chance.choice(ITEMS)

    def look(self, item: str) -> str:
        return self.places.get(item, "nowhere")

    def reward(self, answer: str) -> float:
        return float(answer == self.places[self.item])
