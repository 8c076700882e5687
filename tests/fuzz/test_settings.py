"""Settings, run settings, connection URLs and chains: a SettingError on one line, or a value that is used."""

from __future__ import annotations

from typing import Any

import pytest

from streamadv.algorithms import build_chain
from streamadv.algorithms.chain.config import ChainConfig
from streamadv.errors import SettingError
from streamadv.run.manifest import RunSettings
from streamadv.settings import Settings, load_settings
from streamadv.store.connection import Connection

from .mutations import TOKENS, cases, chance_of, damaged_bytes, damaged_value, hostile, nested, one_line_error

URLS = (
    "redis://user:secret@localhost:6379/0?max_connections=5",
    "rediss+cluster://[::1]:7000",
    "unix:///tmp/redis.sock?db=1",
)
PRESETS = ("grpo", "roll/grpo", "verl/grpo", "gae", "reinforce")


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    run_fields, names = sorted(RunSettings.model_fields), sorted(Settings.model_fields)
    for number in cases("settings"):
        chance = chance_of("settings", number)
        flags: dict[str, Any] = {chance.choice(names): hostile(chance)}
        one_line_error(lambda flags=flags: load_settings(flags), SettingError, flags)  # type: ignore[misc]
        variable = f"STREAMADV_{chance.choice(names).upper()}"
        text = damaged_bytes(chance.choice((*TOKENS, b"default", b"6379")), chance)
        with monkeypatch.context() as patch:
            patch.setenv(variable, text.replace(b"\x00", b"").decode(errors="surrogateescape"))
            one_line_error(lambda: load_settings(), SettingError, (variable, text))
        given = {chance.choice([*run_fields, "junk"]): hostile(chance) for _ in range(2)}
        one_line_error(lambda given=given: RunSettings(**given), SettingError, given)  # type: ignore[misc]
        url = damaged_bytes(chance.choice(URLS).encode(), chance).decode(errors="replace")
        one_line_error(lambda url=url: Connection(url), SettingError, url)  # type: ignore[misc]


def test_chains() -> None:
    for number in cases("chains"):
        chance = chance_of("chains", number)
        genuine = build_chain(chance.choice(PRESETS)).config.model_dump(mode="json")
        config = damaged_value(genuine, chance) if number % 20 else nested(50, False)
        if not isinstance(config, dict):
            continue
        chain = one_line_error(lambda config=config: build_chain(config), SettingError, config)  # type: ignore[misc]
        if chain is not None:
            assert build_chain(chain.config.model_dump(mode="json")).config == ChainConfig.model_validate(
                chain.config.model_dump(mode="json")
            )
