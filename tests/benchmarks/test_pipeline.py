"""`streamadv bench pipeline` and its like on a real server: figures come, nothing stays behind."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import crew, latency, load, memory, stages
from benchmarks.lines import GROUP_SIZE, KINDS, WAYS, Line, make_columns, make_groups
from benchmarks.others import PIPELINERL_FORMS
from benchmarks.pace import Pace
from benchmarks.peers import pipelinerl
from streamadv import cli
from streamadv.algorithms.chain import build_chain
from streamadv.errors import SettingError
from streamadv.run import find_run
from streamadv.status import read_status
from streamadv.store.connection import Connection


@pytest.mark.processes
@pytest.mark.slow
def test_a_line_of_the_pipeline_is_measured(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "QUIET_S", 0.2)
    monkeypatch.setattr(crew, "LEAST_REPORTS", 2)
    file = tmp_path / "bench.json"
    words = ["bench", "pipeline", "--redis", redis_url, "--tokens", "64", "--chain", "gae+kl"]
    assert cli.main([*words, "--seconds", "0.2", "--repeat", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["aof"] == "no"
    (record,) = written["results"]
    assert record["name"] in printed
    assert (record["chain"], record["tokens"], record["way"]) == ("gae+kl", 64, "push")
    assert record["per_second"] > 0
    for name in ("ceiling", "packet_ceiling"):
        assert record[f"ratio_to_{name}"] == record["per_second"] / record[f"{name}_per_second"]
        spent = record[f"{name}_cpu_microseconds_of_all"]
        assert record[f"cpu_ratio_to_{name}"] == spent / record["cpu_microseconds_of_all"]
    assert set(record["cpu_microseconds"]) == {"server", "producer", "grouper", "advantage", "trainer"}
    assert record["slowest_script_milliseconds"] > 0
    assert record["commands"]["evalsha"]["calls"] > 0
    with Connection(redis_url) as connection:
        assert connection.scripts.dbsize() == 0


class Turns(Pace):
    """So many turns, then an interruption."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    def wait_for_turn(self) -> float:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return 0.0

    @property
    def going(self) -> bool:
        return self.wait_for_turn() == 0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_pushing_pushes_whole_groups(
    way: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "IN_FLIGHT", GROUP_SIZE)
    line = Line("grpo", 16, f"run-{way}")
    with pytest.raises(KeyboardInterrupt):
        load.produce(line, redis_url, way, Turns(4))
    with Connection(redis_url) as connection:
        assert read_status(find_run(connection, line.run)).ledger.pushed == 4 * GROUP_SIZE


@pytest.mark.parametrize(
    "words",
    [
        ["--chain", "ppo"],
        ["--way", "fax"],
        ["--tokens", "1"],
        ["--repeat", "0"],
        ["--redis", "redis://x", "--aof", "no"],
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    arguments = cli.make_parser(["bench"]).parse_args(["bench", "pipeline", *words])
    with pytest.raises(SettingError, match=words[-2]):
        arguments.run(arguments)


@pytest.mark.parametrize("name", KINDS)
def test_the_columns_of_a_kind_are_those_its_chain_reads(name: str) -> None:
    kind = KINDS[name]
    assert list(kind.read) == list(build_chain(kind.chain).needs)
    columns = make_columns(Line(name, 64), np.random.default_rng(0))
    assert list(columns) == list(kind.columns)
    assert sum(array.nbytes for array in columns.values()) == Line(name, 64).size(kind.columns) == 17 * 64


@pytest.mark.parametrize("form", PIPELINERL_FORMS)
def test_a_peer_moves_what_it_is_given(form: str) -> None:
    record = make_groups(Line("grpo", 64))[0]
    sent = pipelinerl.as_lists(record) if form == "pickle" else record  # its own records are lists
    encode, decode = pipelinerl.FORMS[form]
    found = decode(encode(sent))
    for given, got in zip(record, found, strict=True):
        assert got.keys() == given.keys()
        for name, value in given.items():
            np.testing.assert_array_equal(np.asarray(got[name], np.asarray(value).dtype), value)


@pytest.mark.slow
def test_stages_and_memory_are_measured(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 8 << 20)
    monkeypatch.setattr(stages, "BATCHES", 1)
    file = tmp_path / "bench.json"

    def results(*words: str) -> list[dict[str, Any]]:
        assert cli.main(["bench", *words, "--redis", redis_url, "--json", str(file)]) == 0
        found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
        return found

    measured = results("stages", "--tokens", "64", "--chain", "gae+kl", "--repeat", "1")
    assert [each["stage"] for each in measured] == ["producer", "grouper", "name", "advantage", "trainer"]
    assert all(each["million_tokens_per_core_second"] > 0 for each in measured)
    (held,) = results("memory", "--tokens", "4096")
    assert 1 < held["ratio_to_payload"] < 1.5
    with Connection(redis_url) as connection:
        assert connection.scripts.dbsize() == 0


@pytest.mark.processes
@pytest.mark.slow
def test_latency_is_measured_at_each_share(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "LEAST_GROUPS", 5)
    monkeypatch.setattr(crew, "QUIET_S", 0.2)
    monkeypatch.setattr(latency, "SHARES", (0.5,))
    file = tmp_path / "bench.json"
    words = ["--tokens", "64", "--seconds", "0.2", "--repeat", "1", "--json", str(file)]
    assert cli.main(["bench", "latency", "--redis", redis_url, *words]) == 0
    records = json.loads(file.read_text())["results"]
    assert [record["share"] for record in records] == [0.5]
    for record in records:
        assert 0 < record["p50_milliseconds"] <= record["p99_milliseconds"] <= record["max_milliseconds"]


def test_the_peers_pickles_hold_plain_data_alone() -> None:
    """The server of `--redis` may hold what others have written."""
    record = [{"input_ids": [1, 2], "reward": 0.5, "group_id": "g"}]
    assert pipelinerl.decode_pickle(pipelinerl.encode_pickle(record)) == record
    with pytest.raises(pickle.UnpicklingError, match="no plain data"):
        pipelinerl.decode_pickle(pickle.dumps(Path("x")))
