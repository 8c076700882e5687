"""Chain configurations by name."""

from __future__ import annotations

from typing import Final

from ..errors import SettingError
from .config import ChainConfig, parse_config

PRESETS: Final[dict[str, dict[str, object]]] = {
    "grpo": {},
    "dr_grpo": {"norm_by_std": False},
}


def preset(name: str) -> ChainConfig:
    """The configuration called `name`; SettingError listing all names if there is none."""
    try:
        fields = PRESETS[name]
    except KeyError:
        raise SettingError(f"preset {name!r} is unknown: choose one of {', '.join(preset_names())}") from None
    return parse_config(fields)


def preset_names() -> list[str]:
    """All preset names, sorted."""
    return sorted(PRESETS)
