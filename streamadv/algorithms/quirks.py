"""Whose numbers to reproduce where this library differs from its peers on purpose."""

from __future__ import annotations

from typing import Literal

PeerQuirks = Literal["roll", "verl"]
