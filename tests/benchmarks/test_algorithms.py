"""`streamadv bench algorithms`: what is compared gives the same numbers, and the figures come as promised."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cases import Way, cases, token_cases
from benchmarks.measure import DisagreementError, check, check_all, measure_large
from benchmarks.workload import Workload, make_workload
from streamadv import cli
from streamadv.errors import SettingError


@pytest.fixture(scope="module")
def several_turns() -> Workload:
    return make_workload(24, 200, seed=1)


@pytest.fixture(scope="module")
def one_turn() -> Workload:
    return make_workload(24, 200, turns=1, seed=2)


def test_all_ways_agree_and_a_wrong_one_is_noticed(several_turns: Workload, one_turn: Workload) -> None:
    for case in cases():
        for name, way in case.peers():
            workload = one_turn if name in case.one_turn else several_turns
            check(case, name, way, workload)

            def wrong(workload: Workload, way: Way = way) -> list[torch.Tensor]:
                first, *rest = way(workload)
                return [first * 1.01, *rest]

            with pytest.raises(DisagreementError, match=re.escape(case.name)):
                check(case, name, wrong, workload)


def test_peers_that_agree_on_one_turn_only_differ_on_several(several_turns: Workload) -> None:
    for case in cases():
        for name, way in case.peers():
            if name in case.one_turn:
                with pytest.raises(DisagreementError):
                    check(case, name, way, several_turns)


def test_the_two_layouts_hold_the_same_batch(several_turns: Workload) -> None:
    batch, order = several_turns.batch, several_turns.row_order
    inside = torch.arange(200) < batch.row_lengths[:, None]
    for name, column in batch.columns.items():
        padded = several_turns.padded[name][order]
        assert torch.equal(padded[inside], column.to(torch.float32)), name
        assert not padded[~inside].any(), name
    assert torch.equal(several_turns.rewards[order].double(), batch.rewards)
    groups = several_turns.groups[order.numpy()]
    assert [len(set(groups[i : i + 8])) for i in range(0, 24, 8)] == [1, 1, 1]
    assert len(set(several_turns.groups[:3])) == 3  # interleaved


def test_the_command_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    words = ["bench", "algorithms", "--sequences", "8", "--tokens", "64", "--repeat", "1"]
    threads = torch.get_num_threads()
    assert cli.main([*words, "--json", str(target)]) == 0
    assert torch.get_num_threads() == threads
    written = json.loads(target.read_text())
    assert {"cpu", "cores", "threads", "torch"} <= set(written["machine"])
    assert [record["name"] for record in written["algorithms"]] == [case.name for case in cases()]
    printed = capsys.readouterr().out
    for case, record in zip(cases(), written["algorithms"], strict=True):
        assert case.name in printed
        assert record["milliseconds"] > 0
        assert record["ratio_to_copy"] == record["milliseconds"] / record["copy_milliseconds"]
        measured = {name for name in ("padded", "verl", "roll") if record[f"{name}_milliseconds"] is not None}
        assert measured == {name for name, _ in case.peers()}


def test_large_batches_are_measured_without_the_peers() -> None:
    found = list(measure_large(2000, 64, repeat=1, device="cpu"))
    assert [one.name for one in found] == [case.name for case in token_cases()]
    assert all(one.verl_milliseconds is None and one.bytes >= 2000 for one in found)
    assert all(one.bandwidth_share == pytest.approx(0.5 / one.ratio_to_copy) for one in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_all_ways_agree_on_the_device() -> None:
    check_all(24, 200, "cuda")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--sequences", "12"], "--sequences is 12"),
        (["--tokens", "8"], "--tokens is 8"),
        (["--repeat", "0"], "--repeat is 0"),
        (["--threads", "0"], "--threads is 0"),
    ],
)
def test_a_wrong_size_is_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "algorithms", "--tokens", "64", "--sequences", "8", *words]) == 1
    assert named in capsys.readouterr().err


def test_ways_that_disagree_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [replace(case, verl=lambda w: (w.padded["values"],)) for case in cases() if case.name == "grpo"]
    monkeypatch.setattr("benchmarks.measure.cases", lambda: wrong)
    assert cli.main(["bench", "algorithms", "--sequences", "8", "--tokens", "64"]) == 1
    assert "grpo: result 0 of verl differs" in capsys.readouterr().err


def test_sizes_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(SettingError, match="multiple of 8"):
        make_workload(7, 64)


def test_without_a_checkout_the_command_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("streamadv.cli.bench.CHECKOUT", tmp_path)
    assert cli.main(["bench", "pipeline", "--tokens", "64"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "benchmarks/ of the source" in line
