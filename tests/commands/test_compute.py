"""`streamadv compute` on files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from streamadv.cli import compute
from streamadv.errors import SettingError, TrajectoryError


def record(group: str, index: int, reward: float | None = 0.0, **fields: Any) -> dict[str, Any]:
    columns = {"input_ids": [5, 6, 7], "response_mask": [0, 1, 1]}
    return {"group_id": group, "group_size": 2, "rollout_index": index, "reward": reward, **columns, **fields}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_writes_advantages_in_the_order_of_the_file(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        record("b", 1, 3.0, pixels=[[1, 2]]),
        record("a", 0, 5.0),
        record("b", 0, 1.0, role="train"),
        record("a", 1, None),
        record("c", 0, status="failed"),
    )
    config = tmp_path / "chain.json"
    config.write_text(json.dumps({"norm_by_std": False}))
    assert compute.run(source, tmp_path / "out.jsonl", config=config) == 0
    out = read(tmp_path / "out.jsonl")
    assert [(line["group_id"], line["rollout_index"]) for line in out] == [
        ("b", 1), ("a", 0), ("b", 0), ("a", 1), ("c", 0)
    ]  # fmt: skip
    assert [line.get("advantages") for line in out] == [[0, 1, 1], [0, 0, 0], [0, -1, -1], None, None]
    assert out[0]["returns"] == [0, 1, 1]
    assert out[0]["pixels"]["data"] == [[1, 2]]


def test_rows_of_a_trajectory_get_their_own_values(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2], "response_mask": [0, 1], "values": [0.5, 0.5]},
        {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1], "values": [1, 0, 0]},
    ]
    item = {"group_id": "a", "group_size": 1, "rollout_index": 0, "reward": 2.0, "rows": rows}
    config = tmp_path / "chain.json"
    config.write_text(json.dumps({"estimator": "gae", "lam": 1.0, "gamma": 1.0}))
    compute.run(write(tmp_path / "in.jsonl", item), tmp_path / "out.jsonl", config=config)
    got = read(tmp_path / "out.jsonl")[0]["rows"]
    assert [row["advantages"] for row in got] == [[0, 1.5], [0, 2, 2]]
    assert got[1]["token_level_rewards"] == [0, 0, 2]


def test_advantages_are_0_on_tokens_that_a_correction_rejects(tmp_path: Path) -> None:
    columns = {"rollout_log_probs": [-0.5] * 3, "old_log_probs": [-0.5, -6, -0.5]}
    source = write(
        tmp_path / "in.jsonl", *(record("a", index, float(index), **columns) for index in range(2))
    )
    config = tmp_path / "chain.json"
    correction = {"rejections": [{"kind": "token_k1", "upper": 2.0}]}
    config.write_text(json.dumps({"norm_by_std": False, "correction": correction}))
    compute.run(source, tmp_path / "out.jsonl", config=config)
    out = read(tmp_path / "out.jsonl")
    assert [line["response_mask"] for line in out] == [[0, 0, 1]] * 2
    assert (
        [line["advantages"] for line in out]
        == [line["returns"] for line in out]
        == [[0, 0, -0.5], [0, 0, 0.5]]
    )


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"group_id": "a"}, r"in\.jsonl:2: "),
        (record("a", 0), r"in\.jsonl: trajectory 2: repeats .* of trajectory 1"),
        (
            {key: value for key, value in record("a", 1).items() if key != "reward"},
            r"in\.jsonl: trajectory 2: reward is missing",
        ),
    ],
)
def test_errors_name_the_file_and_where_in_it(tmp_path: Path, second: dict[str, Any], named: str) -> None:
    source = write(tmp_path / "in.jsonl", record("a", 0), second)
    with pytest.raises(TrajectoryError, match=named) as caught:
        compute.run(source, tmp_path / "out.jsonl")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_no_text_is_one_line_with_its_place(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a", 0))
    source.write_bytes(source.read_bytes() + b'{"group_id":"\xff"}\n')
    with pytest.raises(TrajectoryError, match=r"in\.jsonl:2: ") as caught:
        compute.run(source, tmp_path / "out.jsonl")
    assert "\n" not in str(caught.value)


def test_nan_in_an_extra_column_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a", 0, extra=[float("nan"), 1.0, float("inf")]))
    assert compute.run(source, tmp_path / "out.jsonl") == 0
    assert str(read(tmp_path / "out.jsonl")[0]["extra"]["data"]) == "[nan, 1.0, inf]"


def test_a_file_without_a_reward_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a", 0, None), record("a", 1, status="failed"))
    with pytest.raises(TrajectoryError, match=r"in\.jsonl: holds no trajectory with a reward$"):
        compute.run(source, tmp_path / "out.jsonl")
    with pytest.raises(TrajectoryError, match="holds no trajectory with a reward"):
        compute.run(write(source), tmp_path / "out.jsonl")


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a", 0, 1.0))
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    for output in (source, tmp_path / "link"):
        with pytest.raises(SettingError, match=f"--output {output} is the input: choose another file"):
            compute.run(source, output)
    assert source.read_bytes() == before


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", record("a", 0, 1.0))
    (tmp_path / "folder").mkdir()
    for output in (tmp_path / "none" / "x", tmp_path / "folder"):
        with pytest.raises(SettingError, match=f"--output {output}: ") as caught:
            compute.run(source, output)
        assert "partial" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl"]


def test_a_column_the_chain_needs_is_named(tmp_path: Path) -> None:
    config = tmp_path / "chain.json"
    config.write_text('{"estimator": "gae"}')
    with pytest.raises(TrajectoryError, match=r"in\.jsonl: trajectory 1: column values"):
        compute.run(write(tmp_path / "in.jsonl", record("a", 0)), tmp_path / "out.jsonl", config=config)
    config.write_text("[]")
    with pytest.raises(SettingError, match="needs an object"):
        compute.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", config=config)
    with pytest.raises(TrajectoryError, match=r"none\.jsonl: cannot be read: No such file"):
        compute.run(tmp_path / "none.jsonl", tmp_path / "out.jsonl")


def test_command_line(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    compute.add_parser(parser.add_subparsers())
    source = write(tmp_path / "in.jsonl", record("a", 0, 1.0), record("a", 1, 0.0))
    given = parser.parse_args(["compute", str(source), "-o", str(tmp_path / "o"), "--preset", "dr_grpo"])
    assert given.run(given) == 0
    assert [line["advantages"] for line in read(tmp_path / "o")] == [[0, 0.5, 0.5], [0, -0.5, -0.5]]
