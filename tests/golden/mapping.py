"""Which of streamadv's functions stands for which recorded function, and what is left out, with reasons."""

from __future__ import annotations

from .compare import Function
from .mapping_verl import VERL

MAPPING: dict[str, Function] = {**VERL}

#: Functions streamadv does not offer, and why.
NOT_IN_CATALOGUE: dict[str, str] = {}

#: (function, variant) of calls that raise in the peer and have a defined result here.
DEFINED_HERE: dict[tuple[str, str], str] = {}
