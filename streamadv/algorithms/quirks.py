"""Whose numbers to reproduce where this library differs from its peers on purpose.

"roll" is ROLL at 8eb27cc, "verl" is verl 0.9.1, and "verl-2026-01" is verl at b178a3c of January 2026.
"""

from __future__ import annotations

from typing import Literal

PeerQuirks = Literal["roll", "verl", "verl-2026-01"]
