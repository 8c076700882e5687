"""Interchange files: reading, following, writing and continuing them, with whatever may stand in them."""

import io
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError
from streamadv.trajectory.interchange import read_trajectories, recover, write_trajectory
from streamadv.trajectory.schema import parse_trajectory
from tests.shares import examples


def record(group_id="g", rollout_index=0, **fields):
    head = {"group_id": group_id, "group_size": 4, "rollout_index": rollout_index, "reward": 0.5}
    return {**head, "input_ids": [1, 2, 3], "response_mask": [0, 1, 1], **fields}


def line(*args, **fields):
    return json.dumps(record(*args, **fields), separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trajectories.jsonl"


def read(path, **options):
    return [(t.group_id, t.rollout_index) for t in read_trajectories(path, **options)]


def test_what_is_written_is_read(path):
    trajectories = [parse_trajectory(record(index=[float("nan")], rollout_index=i)) for i in range(3)]
    with path.open("wb") as file:
        for trajectory in trajectories:
            write_trajectory(file, trajectory)
    back = list(read_trajectories(path))
    assert [str(t.to_json()) for t in back] == [str(t.to_json()) for t in trajectories]
    assert path.read_bytes().count(b"\n") == 3


def test_each_trajectory_is_one_write():
    class Once(io.BytesIO):
        writes = 0

        def write(self, data):
            self.writes += 1
            return super().write(data)

    file = Once()
    write_trajectory(file, parse_trajectory(record(metadata={"text": "two\nlines \u2028"})))
    assert file.writes == 1
    assert file.getvalue().count(b"\n") == 1


def test_blank_lines_and_carriage_returns_are_allowed(path):
    path.write_bytes(b"\n" + line("a").replace(b"\n", b"\r\n") + b"  \r\n\n" + line("b") + b"\n\n")
    assert read(path) == [("a", 0), ("b", 0)]


def test_an_empty_file_holds_nothing(path):
    path.write_bytes(b"")
    assert read(path) == []


def test_a_whole_last_line_needs_no_newline(path):
    path.write_bytes(line("a") + line("b").rstrip())
    assert read(path) == [("a", 0), ("b", 0)]


def test_a_torn_last_line_is_an_error_after_what_came_before(path):
    path.write_bytes(line("a") + line("b")[:-5])
    trajectories = read_trajectories(path)
    assert next(trajectories).group_id == "a"
    with pytest.raises(TrajectoryError, match=r"jsonl:2: is cut off"):
        next(trajectories)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b"{", "no valid JSON"),
        (b"{'group_id': 1}", "no valid JSON"),
        (b"\xff\xfe{}", "no valid JSON"),
        (b'{"group_id": "\xff"}', "no valid JSON"),
        (b'{"group_id": "\\ud800"}', "no valid JSON"),
        (b"\x00" * 100, "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "no valid JSON"),
        (b"1" * 10_000, "JSON|needs an object"),
        (b"5", "needs an object"),
        (b"null", "needs an object"),
        (b"NaN", "needs an object"),
        (b"[{}]", "needs an object"),
        (b"{}", "group_id"),
        (line(reward=float("nan")).strip(), "reward"),
        (line(reward=1e999).strip(), "reward"),
        (line(group_size=10**400).strip(), "group_size"),
        (line(input_ids=[1, 2**31, 3]).strip(), "input_ids"),
        (line(rewrad=1.0).strip(), "rewrad"),
    ],
)
def test_a_bad_line_is_one_line_that_names_file_and_line(path, bad, problem):
    path.write_bytes(line("a") + b"\n" + bad + b"\n" + line("b"))
    trajectories = read_trajectories(path)
    next(trajectories)
    with pytest.raises(TrajectoryError, match=problem) as error:
        next(trajectories)
    assert str(error.value).startswith(f"{path}:3: ")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_damaged_files_give_trajectories_or_one_error(tmp_path_factory, data):
    whole = line("a", steps=[{"start": 1, "end": 3, "state_key": "ü"}]) + line("b", model_version=[1, 2])
    damaged = bytearray(whole)
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "file.jsonl"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(whole)))])
    try:
        read(path)
    except TrajectoryError as error:
        assert str(error).isprintable()  # noqa: PT017


def test_a_line_beyond_the_limit_is_refused_before_it_is_parsed(path):
    path.write_bytes(line("a") + b"x" * 1000)
    with pytest.raises(TrajectoryError, match=r"jsonl:2: is longer than 200 bytes"):
        read(path, max_line_bytes=200)
    path.write_bytes(line("a") * 3)
    assert len(read(path, max_line_bytes=len(line("a")))) == 3
    with pytest.raises(TrajectoryError, match=r"jsonl:1: is longer"):
        read(path, max_line_bytes=len(line("a")) - 1)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TrajectoryError, match=r"none\.jsonl: cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(TrajectoryError, match="cannot be read"):
        read(tmp_path)


def follow(path, writes, **options):
    """Reads `path` while each wait brings the next of `writes`; the wait after the last one ends it."""
    pending = list(writes)

    def wait():
        if not pending:
            return True
        with path.open("ab") as file:
            file.write(pending.pop(0))
        return False

    return read(path, wait=wait, **options)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_following_waits_for_torn_lines(tmp_path_factory, cuts):
    whole = line("a", 0) + line("a", 1) + b"\n" + line("b", 2)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    path = tmp_path_factory.mktemp("follow") / "file.jsonl"
    path.write_bytes(b"")
    pieces = [whole[start:end] for start, end in itertools.pairwise(places)]
    assert follow(path, pieces) == [("a", 0), ("a", 1), ("b", 2)]


def test_following_leaves_an_unfinished_line(path):
    path.write_bytes(line("a"))
    assert follow(path, [line("b")[:-1]]) == [("a", 0)]


def test_following_bounds_a_growing_line(path):
    path.write_bytes(b"")
    with pytest.raises(TrajectoryError, match="longer than 100"):
        follow(path, [b"x" * 60, b"x" * 60], max_line_bytes=100)


def test_following_a_file_that_shrinks_is_an_error(path):
    path.write_bytes(line("a"))
    shrunk = []

    def wait():
        path.write_bytes(b"")
        shrunk.append(True)
        return len(shrunk) > 2

    with pytest.raises(TrajectoryError, match="was cut while"):
        read(path, wait=wait)


def test_recover_of_a_new_file(path):
    assert recover(path) == {}
    assert not path.exists()


@pytest.mark.parametrize("kept", range(4))
def test_recover_cuts_a_torn_line_wherever_it_was_torn(path, kept):
    lines = [line("a", 0), line("a", 3), line("b", 1), line("c", 0)]
    expected = [{}, {"a": {0}}, {"a": {0, 3}}, {"a": {0, 3}, "b": {1}}][kept]
    for torn in range(len(lines[kept])):
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:torn])
        assert recover(path) == expected
        assert path.read_bytes() == b"".join(lines[:kept])


def test_recovered_files_are_continued(path):
    path.write_bytes(line("a") + line("b")[:20])
    recover(path)
    with path.open("ab") as file:
        write_trajectory(file, parse_trajectory(record("b")))
    assert read(path) == [("a", 0), ("b", 0)]


@pytest.mark.parametrize(
    "content",
    [
        b"my only notes",
        b'{"key": "value"}',
        b"notes\nmore notes\n",
        b"\x7fELF\x00\x01",
        line("a") + b'{"group_id": 3}\n',
        line("a") + line("b")[:40] + b"\n" + line("c"),
    ],
)
def test_recover_leaves_other_files_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(TrajectoryError) as error:
        recover(path)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == content
