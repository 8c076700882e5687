"""Interchange files and recorded chats: a trajectory or a TrajectoryError that says where, and no half output."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from streamadv.cli.compute import run as compute
from streamadv.errors import StreamadvError, TrajectoryError
from streamadv.trajectory.adapters.chat import read_chat, tokenize_chat
from streamadv.trajectory.adapters.tau_bench import read_tau_bench
from streamadv.trajectory.interchange import parse_json, read_trajectories, recover
from streamadv.trajectory.schema import Trajectory, parse_trajectory
from tests.support import packets_of

from .examples import chats, lines
from .mutations import (
    HOSTILE,
    SEED,
    as_json,
    cases,
    chance_of,
    damaged_bytes,
    damaged_value,
    one_line_error,
    pick,
)

READERS: tuple[Callable[[Path], Iterator[Trajectory]], ...] = (read_trajectories, read_chat, read_tau_bench)


def damaged_line(corpus: list[dict[str, Any]], chance: random.Random) -> bytes:
    value = pick(corpus, chance)
    if chance.random() < 0.6:
        return as_json(damaged_value(value, chance))
    return damaged_bytes(as_json(value), chance)


def test_lines() -> None:
    """What is accepted can be pushed, and is the same after being written and read again."""
    for number in cases("JSON lines"):
        line = damaged_line(lines(), chance_of("JSON lines", number))

        def call(line: bytes = line) -> Trajectory:
            return parse_trajectory(parse_json(line, "f:1"), "f:1")

        trajectory = one_line_error(call, TrajectoryError, line)
        if trajectory is not None:
            one_line_error(lambda item=trajectory: packets_of([item], 1 << 22), TrajectoryError, line)  # type: ignore[misc]
            assert parse_trajectory(trajectory.to_json()).to_json() == trajectory.to_json(), line


@pytest.mark.release
@seed(SEED)
@settings(
    max_examples=len(cases("files")), deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(
    value=st.recursive(
        st.sampled_from([value for value in HOSTILE if not isinstance(value, list | dict)])
        | st.floats()
        | st.integers()
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    ),
    field=st.sampled_from(
        sorted({*Trajectory.model_fields, "input_ids", "response_mask", "extra", "values"})
    ),
)
def test_any_value_in_any_field(value: Any, field: str) -> None:
    """Python values too: what comes from a producer's code is no JSON yet."""
    record = {**lines()[0], field: value}
    one_line_error(lambda: parse_trajectory(record), TrajectoryError, (field, value))
    one_line_error(
        lambda: parse_trajectory({**record, field: np.array([value], dtype=object)}), TrajectoryError, field
    )


def test_whole_files(tmp_path: Path) -> None:
    """A file that is refused is left as it is, and nothing is written beside it."""
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for number in cases("files"):
        chance = chance_of("files", number)
        corpus = lines() if chance.random() < 0.5 else chats()
        genuine = [as_json(pick(corpus, chance)) for _ in range(2)]
        content = b"\n".join([genuine[0], damaged_line(corpus, chance), genuine[1], b""])
        if chance.random() < 0.3:
            content = damaged_bytes(content, chance)
        path.write_bytes(content)
        for reader in READERS:
            one_line_error(lambda reader=reader: list(reader(path)), TrajectoryError, content)  # type: ignore[misc]
        done = one_line_error(lambda: compute(path, output), StreamadvError, content)
        assert path.read_bytes() == content
        assert output.exists() == (done == 0)
        if one_line_error(lambda: recover(path), TrajectoryError, content) is None:
            assert path.read_bytes() == content
        assert set(tmp_path.iterdir()) <= {path, output}
        output.unlink(missing_ok=True)


def test_chats(tmp_path: Path) -> None:
    """Messages as they come from a service, and files of them."""
    path = tmp_path / "chats.json"
    for number in cases("chats"):
        chance = chance_of("chats", number)
        record = pick(chats(), chance)
        messages = damaged_value(record.get("messages", record.get("traj")), chance)
        one_line_error(lambda messages=messages: tokenize_chat(messages), TrajectoryError, messages)  # type: ignore[misc]
        if number % 10 == 0:
            records = [as_json(pick(chats(), chance)), damaged_line(chats(), chance)]
            path.write_bytes(chance.choice([b"[" + b",".join(records) + b"]", b"\n".join(records)]))
            for reader in (read_chat, read_tau_bench):
                one_line_error(
                    lambda reader=reader: list(reader(path)),  # type: ignore[misc]
                    TrajectoryError,
                    records,
                )
