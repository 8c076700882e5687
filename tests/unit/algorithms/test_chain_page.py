"""The page of estimators lists every field of a chain, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from streamadv.algorithms.chain import config
from streamadv.algorithms.registry import get_estimator
from streamadv.errors import SettingError

PAGE = Path(__file__).parents[3] / "docs/reference/estimators.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "the chain": config.ChainConfig,
    "`reward`": config.RewardConfig,
    "`reward.overlong`": config.OverlongConfig,
    "`masks`": config.MaskConfig,
    "`sample_weights`": config.SampleWeightConfig,
    "`kl`": config.KLConfig,
    "`distill`": config.DistillConfig,
    "`correction`": config.CorrectionConfig,
    "`correction.rejections` (a list)": config.RejectionConfig,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_a_chain_is_listed(section: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {section} | `"))
    listed = dict(re.findall(r"`(\w+)`(?: ([\w.-]+))?", row.partition(" | ")[2]))
    fields = SECTIONS[section].model_fields
    assert list(listed) == list(fields)
    for name, default in listed.items():
        if default:
            shown = str(fields[name].default)
            assert default == shown.lower() or float(default) == float(shown)
        else:
            assert not isinstance(fields[name].default, bool | int | float | str)


def test_every_section_is_listed() -> None:
    known = {each for each in vars(config).values() if isinstance(each, type) and issubclass(each, BaseModel)}
    known -= {BaseModel, config._Section}
    assert known == set(SECTIONS.values())


def test_a_misspelt_estimator_names_the_nearest() -> None:
    with pytest.raises(
        SettingError, match=r"estimator 'grop' is unknown: did you mean grpo\? If it is one of yours"
    ):
        get_estimator("grop")
