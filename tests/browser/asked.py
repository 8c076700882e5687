"""The page of a run, asked without a browser."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import Final, NamedTuple

#: Every screen of the lab's story.
SCREENS: Final = (
    "/",
    "/groups",
    "/groups?where=kept&outcome=stale&low=0&high=0.5&page=7",
    "/group?id=sum-0-0",
    "/group?id=hostile/one",
    "/tokens?id=hostile/one&index=1",
    "/tokens.json?id=hostile/one&index=1",
    "/batch",
    "/batch?k=0",
    "/batch?k=4",
    "/batch?k=2&chain=rloo",
    "/batch?k=77",
    "/groups?outcome=dropped&find=s*-0&least=0&most=1",
    "/groups?text=tens&skip=1",
    "/prompts",
    "/settings",
    "/static/view.js",
)


class Answer(NamedTuple):
    status: int
    headers: Message
    text: str


def ask(address: str, path: str = "/", headers: Mapping[str, str] | None = None) -> Answer:
    """One request."""
    request = urllib.request.Request(address.rstrip("/") + path, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Answer(answer.status, answer.headers, answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read().decode())


def board(address: str, kind: str, headers: Mapping[str, str] | None = None) -> str:
    """Text of the first event of this kind."""
    request = urllib.request.Request(f"{address}events", headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=60) as events:
        while events.readline().decode() != f"event: {kind}\n":
            pass
        text: str = json.loads(events.readline().decode().removeprefix("data: "))
    return text
