"""`streamadv bench pipeline` and its like on a real server: figures come, nothing stays behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamadv import cli
from streamadv.algorithms.chain import build_chain
from streamadv.bench import backlog, latency, memory, stages
from streamadv.bench.lines import KINDS, Line, make_columns, make_groups
from streamadv.bench.others import PEERS
from streamadv.errors import SettingError
from streamadv.store.connection import Connection


@pytest.mark.processes
@pytest.mark.slow
def test_a_line_of_the_pipeline_is_measured(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    words = ["bench", "pipeline", "--redis", redis_url, "--tokens", "64", "--chain", "gae+kl"]
    assert cli.main([*words, "--seconds", "0.2", "--repeat", "1", "--json", str(file)]) == 0
    assert "gae+kl 64" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["aof"] == "no"
    (record,) = written["results"]
    assert (record["chain"], record["tokens"]) == ("gae+kl", 64)
    assert record["per_second"] > 0
    assert record["ratio_to_ceiling"] == record["per_second"] / record["ceiling_per_second"]
    assert set(record["cpu_microseconds"]) == {"server", "producer", "grouper", "advantage", "trainer"}
    with Connection(redis_url) as connection:
        assert connection.scripts.dbsize() == 0


@pytest.mark.parametrize(
    "words",
    [["--chain", "ppo"], ["--tokens", "1"], ["--repeat", "0"], ["--redis", "redis://x", "--aof", "no"]],
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


@pytest.mark.parametrize("form", ["lists", "arrays"])
def test_a_peer_moves_what_it_is_given(form: str) -> None:
    path = PEERS / "pipelinerl.py"
    spec = importlib.util.spec_from_file_location("pipelinerl", path)
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    record = make_groups(Line("grpo", 64))[0]
    found = getattr(peer, f"decode_{form}")(getattr(peer, f"encode_{form}")(record))
    for given, got in zip(record, found, strict=True):
        assert got.keys() == given.keys()
        for name, value in given.items():
            np.testing.assert_array_equal(np.asarray(got[name], np.asarray(value).dtype), value)


@pytest.mark.slow
def test_stages_backlog_and_memory_are_measured(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 8 << 20)
    for module in (stages, backlog):
        monkeypatch.setattr(module, "BATCHES", 1)
    file = tmp_path / "bench.json"

    def results(*words: str) -> list[dict[str, Any]]:
        assert cli.main(["bench", *words, "--redis", redis_url, "--json", str(file)]) == 0
        found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
        return found

    measured = results("stages", "--tokens", "64", "--chain", "gae+kl", "--repeat", "1")
    assert [each["stage"] for each in measured] == ["producer", "grouper", "name", "advantage", "trainer"]
    assert all(each["million_tokens_per_core_second"] > 0 for each in measured)
    queued = results("backlog", "--open", "10", "--queued", "1000", "--repeat", "1")
    names = ["10 open groups", "push, none queued", "push, 1000 queued"]
    assert [each["name"] for each in queued] == names
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
    monkeypatch.setattr(latency, "SHARES", (0.2, 0.5))
    file = tmp_path / "bench.json"
    words = ["--tokens", "64", "--seconds", "0.2", "--repeat", "1", "--json", str(file)]
    assert cli.main(["bench", "latency", "--redis", redis_url, *words]) == 0
    records = json.loads(file.read_text())["results"]
    assert [record["share"] for record in records] == [0.2, 0.5]
    for record in records:
        assert 0 < record["p50_milliseconds"] <= record["p99_milliseconds"] <= record["max_milliseconds"]
