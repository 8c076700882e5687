"""The data model at the public boundary: round trips, errors on one line, and the generated JSON schema."""

import contextlib
import json
import math
import string

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError
from streamadv.trajectory.columns import EXTRA_DTYPES
from streamadv.trajectory.schema import (
    Column,
    Row,
    Step,
    Trajectory,
    parse_trajectory,
    trajectory_json_schema,
)
from tests.shares import examples

FLAT = {"group_id": "g", "group_size": 2, "rollout_index": 0, "reward": 1.0}
FLAT |= {"input_ids": [5, 6, 7], "response_mask": [0, 1, 1]}
ROW = {"input_ids": [5, 6, 7], "response_mask": [0, 1, 1]}
HEAD = {"group_id": "g", "group_size": 2, "rollout_index": 0, "reward": 1.0}
VALIDATOR = jsonschema.Draft202012Validator(trajectory_json_schema())

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=8).map("x_".__add__)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.printable), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def extras(draw, length):
    dtype = np.dtype(draw(st.sampled_from(sorted(EXTRA_DTYPES))))
    shape = (length, *draw(st.lists(st.integers(1, 3), max_size=2)))
    raw = draw(
        st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize)
    )
    return Column(data=np.frombuffer(raw, dtype).reshape(shape), per_token=True)


@st.composite
def trajectories(draw):
    num_rows = draw(st.integers(1, 3))
    floats = draw(st.sets(st.sampled_from(["rollout_log_probs", "values", "advantages"])))
    names = draw(st.sets(NAMES, max_size=2))
    rows = []
    for _ in range(num_rows):
        length = draw(st.integers(1, 6))
        columns = {"input_ids": st.integers(0, 2**31 - 1), "response_mask": st.integers(0, 1)}
        columns |= dict.fromkeys(sorted(floats), FLOAT32)
        if "rollout_log_probs" in floats:
            columns["rollout_log_probs"] = st.floats(max_value=0, width=32, allow_infinity=False)
        row = {k: draw(st.lists(v, min_size=length, max_size=length)) for k, v in columns.items()}
        row |= {name: draw(extras(length)) for name in sorted(names)}
        row |= draw(st.fixed_dictionaries({}, optional={"agent": st.just("judge"), "reward": FINITE}))
        rows.append(row)
    spans = st.tuples(st.integers(0, num_rows - 1), FINITE, st.none() | st.text(max_size=5))
    steps = []
    for number, reward, key in draw(st.lists(spans, max_size=3)):
        end = draw(st.integers(1, len(rows[number]["input_ids"])))
        start = draw(st.integers(0, end - 1))
        steps.append({"row": number, "start": start, "end": end, "reward": reward, "state_key": key})
    optional = {
        "reward": st.none() | FINITE,
        "rewards": st.dictionaries(st.text(max_size=5), FINITE, max_size=2),
        "status": st.sampled_from(["completed", "truncated", "aborted", "failed"]),
        "model_version": st.none() | st.integers(0, 9) | st.tuples(st.integers(0, 5), st.integers(5, 9)),
        "data_source": st.none() | st.text(max_size=5),
        "role": st.sampled_from(["train", "baseline"]),
        "metadata": st.dictionaries(st.text(string.printable, max_size=5), JSON, max_size=2),
        "batch": st.integers(0, 9),
        "staleness": st.integers(0, 9),
    }
    fields = draw(st.fixed_dictionaries({}, optional=optional))
    return parse_trajectory(
        {"group_id": "g", "group_size": 2, "rollout_index": 1, **fields, "rows": rows, "steps": steps}
    )


def same(left, right):
    """Equality of two trajectories, columns by their bytes."""
    assert left.model_dump(exclude={"rows"}) == right.model_dump(exclude={"rows"})
    assert left.scored == right.scored
    for a, b in zip(left.rows, right.rows, strict=True):
        assert (a.agent, a.reward) == (b.agent, b.reward)
        assert a.columns.keys() == b.columns.keys()
        assert a.extras.keys() == b.extras.keys()
        arrays = [(a.columns[name], b.columns[name]) for name in a.columns]
        arrays += [(a.extras[name].data, b.extras[name].data) for name in a.extras]
        for x, y in arrays:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        assert all(a.extras[name].per_token == b.extras[name].per_token for name in a.extras)


@settings(max_examples=examples(60), deadline=None)
@given(trajectories())
def test_round_trip(trajectory):
    record = json.loads(json.dumps(trajectory.to_json()))
    same(parse_trajectory(record), trajectory)
    VALIDATOR.validate(record)


def test_a_round_of_evaluation_stands_in_files():
    record = {**FLAT, "role": "eval", "round": "step-100"}
    trajectory = parse_trajectory(record)
    assert (trajectory.round, trajectory.to_json()) == ("step-100", record)
    VALIDATOR.validate(record)


def test_a_single_row_stands_at_top_level_and_several_in_rows():
    flat = parse_trajectory(FLAT)
    assert flat.to_json() == FLAT
    row = {"input_ids": [1], "response_mask": [1]}
    assert parse_trajectory({**HEAD, "rows": [row, row]}).to_json() == {**HEAD, "rows": [row, row]}
    tagged = {**HEAD, "rows": [{**row, "agent": "judge"}]}
    assert parse_trajectory(tagged).to_json() == tagged


def test_reward_null_and_reward_absent_stay_apart():
    absent = parse_trajectory({name: value for name, value in FLAT.items() if name != "reward"})
    null = parse_trajectory({**FLAT, "reward": None})
    assert (absent.scored, null.scored) == (False, True)
    assert "reward" not in absent.to_json()
    assert null.to_json()["reward"] is None


def test_numpy_values_are_accepted():
    record = {**FLAT, "group_size": np.int64(2), "reward": np.float32(1.0), "input_ids": np.array([5, 6, 7])}
    assert parse_trajectory(record).to_json() == FLAT


def test_extra_columns_keep_dtype_shape_and_non_finite_values():
    data = np.array([[1.5, -np.inf], [np.nan, 2.0], [0.0, 0.0]], np.float16)
    trajectory = parse_trajectory({**FLAT, "top_logits": data})
    record = json.loads(json.dumps(trajectory.to_json()))
    same(parse_trajectory(record), trajectory)


def test_an_extra_column_of_the_rows_length_is_per_token_unless_it_says_otherwise():
    extras = parse_trajectory(
        {**FLAT, "a": [1, 2, 3], "b": {"data": [1, 2, 3], "per_token": False}, "c": [1]}
    )
    assert {name: column.per_token for name, column in extras.rows[0].extras.items()} == {
        "a": True,
        "b": False,
        "c": False,
    }


def test_version_span_counts_trainable_tokens_only():
    span = parse_trajectory({**FLAT, "versions": [1, 4, 3]}).version_span
    assert span == (3, 4)
    assert parse_trajectory({**FLAT, "model_version": [2, 5]}).version_span == (2, 5)
    assert parse_trajectory({**FLAT, "model_version": 2}).version_span == (2, 2)
    assert parse_trajectory(FLAT).version_span is None


DEEP = []
for _ in range(5000):
    DEEP = [DEEP]

BAD_FIELDS = [
    ("group_id", ""),
    ("group_id", "a b"),
    ("group_id", "x" * 10**6),
    ("group_id", 7),
    ("group_id", None),
    ("group_size", 0),
    ("group_size", "2"),
    ("group_size", True),
    ("group_size", 2.5),
    ("group_size", 10**5000),
    ("group_size", float("nan")),
    ("rollout_index", -1),
    ("reward", "1"),
    ("reward", float("nan")),
    ("reward", float("inf")),
    ("reward", 10**400),
    ("reward", [1.0]),
    ("rewards", {"a": float("nan")}),
    ("rewards", [1.0]),
    ("status", "done"),
    ("model_version", [3, 1]),
    ("model_version", [1, 2, 3]),
    ("model_version", -1),
    ("model_version", "new"),
    ("data_source", 5),
    ("data_source", "\ud800"),
    ("role", "judge"),
    ("round", "step-1"),
    ("round", "step 1"),
    ("metadata", []),
    ("metadata", {"a": float("nan")}),
    ("metadata", {"a": "\ud800"}),
    ("metadata", {"a": [10**5000]}),
    ("metadata", {"a": DEEP}),
    ("steps", [{"start": 0, "end": 9}]),
    ("steps", [{"start": 1, "end": 1}]),
    ("steps", [{"start": 0, "end": 10**5000}]),
    ("steps", [{"start": 0, "end": 1, "row": 1}]),
    ("steps", [{"start": 0, "end": 1, "turn": 1}]),
    ("steps", [{"start": 0}]),
    ("input_ids", None),
    ("input_ids", [1, 2]),
    ("input_ids", ["a", "b", "c"]),
    ("input_ids", DEEP),
    ("response_mask", None),
    ("response_mask", [0, 1, 2]),
    ("rollout_log_probs", [0.0, 0.0]),
    ("rollout_log_probs", [0.0, float("nan"), 0.0]),
    ("rollout_log_probs", [0.0, 0.25, -1.0]),
    ("attention_mask", [1, 1, 1]),
    ("values", 3),
    ("rewrad", 1.0),
    ("extra", {"data": [1, 2, 3]}),
    ("extra", {"data": [1, 2], "per_token": True}),
    ("extra", {"data": [1], "per_token": False, "dtype": "O"}),
    ("extra", {"data": [1], "per_token": False, "dtype": ["O"]}),
    ("extra", {"data": [300], "per_token": False, "dtype": "|u1"}),
    ("two words", [1, 2, 3]),
    ("header", [1, 2, 3]),
    ("line\nbreak", [1, 2, 3]),
    ("batch", -1),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=[name for name, _ in BAD_FIELDS])
def test_a_bad_field_is_one_line_that_names_it(field, value):
    with pytest.raises(TrajectoryError) as error:
        parse_trajectory({**FLAT, field: value}, "file:3")
    message = str(error.value)
    assert message.startswith("file:3: ")
    assert field.replace("\n", "\\n") in message
    assert message.isprintable()
    assert len(message) < 500


@pytest.mark.parametrize("field", ["group_id", "group_size", "rollout_index", "input_ids", "response_mask"])
def test_a_missing_field_is_named(field):
    with pytest.raises(TrajectoryError, match=field):
        parse_trajectory({name: value for name, value in FLAT.items() if name != field})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0}, "group_size: is 0, needs at least 1"),
        ({"group_size": 4097}, "group_size: is 4097, needs at most 4096"),
        ({"rollout_index": 8192}, "rollout_index: is 8192, needs less than 8192"),
        ({"group_id": "a b"}, r"group_id: is 'a b', needs to match ^[^\s\x00-\x1f}]+$"),
        ({"group_id": "a}b"}, r"group_id: is 'a}b', needs to match ^[^\s\x00-\x1f}]+$"),
        ({"steps": [{"start": 0}]}, "steps.0.end: is missing, needs a value"),
        ({"steps": [{"start": 0, "end": 0}]}, "steps.0.end: is 0, needs more than 0"),
        (
            {"steps": [{"start": 0, "end": 1, "turn": "{x}"}]},
            "steps.0.turn: is '{x}', needs to be left out: there is no such field",
        ),
    ],
)
def test_a_problem_says_what_is_there_and_what_is_needed(fields, message):
    with pytest.raises(TrajectoryError) as error:
        parse_trajectory({**FLAT, **fields}, "here")
    assert str(error.value) == f"here: {message}"


@pytest.mark.parametrize("value", [None, 5, "text", [FLAT], float("nan")])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(TrajectoryError, match="needs an object"):
        parse_trajectory(value)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: Trajectory(**FLAT, lenght=3),
            "Trajectory: extra column lenght is the single value 3, needs a list, "
            "or to stand in metadata={'lenght': ...}",
        ),
        (
            lambda: Trajectory(**{**FLAT, "reward": "1"}),
            "Trajectory: reward: is the text '1', needs a number",
        ),
        (
            lambda: Trajectory(**HEAD, rows=[dict(ROW), {**ROW, "values": [math.nan] * 3}]),
            "Trajectory: rows.1.values: is nan at token 0, needs finite numbers",
        ),
        (lambda: Row(input_ids=[1], response_mask=[2]), "Row: response_mask: is 2 at token 0, needs 0 or 1"),
        (lambda: Step(start=-1, end=1), "Step: start: is -1, needs at least 0"),
        (lambda: Column(data=1, per_token=False), "Column: data: is the single value 1, needs a list"),
    ],
)
def test_constructors_raise_trajectory_error_on_one_line(make, problem):
    with pytest.raises(TrajectoryError) as caught:
        make()
    assert str(caught.value) == problem
    assert caught.value.__suppress_context__


def test_a_tensor_of_a_dtype_that_numpy_has_not_is_an_error_that_says_so():
    torch = pytest.importorskip("torch")
    column = torch.zeros(3).to(torch.float8_e4m3fn)
    with pytest.raises(
        TrajectoryError, match=r"extra column scale has dtype torch\.float8_e4m3fn, .* cast it"
    ):
        parse_trajectory({**FLAT, "scale": column})


def test_what_cannot_be_read_as_numbers_is_one_line_that_names_it():
    torch = pytest.importorskip("torch")

    class Broken:
        def __array__(self, *_, **__):
            raise RuntimeError("no\ndata")

    needs_grad = list(torch.full((3,), -1.0, requires_grad=True))
    masked = np.ma.array([-1.0, -1.0, -1.0], mask=[0, 0, 1])
    for value in (
        needs_grad,
        [torch.ones(()).bfloat16()] * 3,
        torch.zeros(3, device="meta"),
        Broken(),
        masked,
    ):
        with pytest.raises(TrajectoryError, match=r"^trajectory: values: .*needs .*$"):
            parse_trajectory({**FLAT, "values": value})
        with pytest.raises(TrajectoryError, match=r"^trajectory: extra column x .*needs .*$"):
            parse_trajectory({**FLAT, "x": value})


def test_rows_agree_in_their_columns():
    one = {"input_ids": [1], "response_mask": [1]}
    with pytest.raises(TrajectoryError, match="rows differ"):
        parse_trajectory({**HEAD, "rows": [one, {**one, "values": [0.5]}]})
    with pytest.raises(TrajectoryError, match="beside rows"):
        parse_trajectory({**FLAT, "rows": [one]})
    with pytest.raises(TrajectoryError, match=r"rows\.1\.input_ids"):
        parse_trajectory({**HEAD, "rows": [one, {"response_mask": [1]}]})
    pushed = [{**one, "a": [1], "b": [2]}, {**one, "b": [3], "a": [4]}]
    assert parse_trajectory({**HEAD, "rows": pushed}).rows[1].extras["a"].data == [4], "in any order"


def test_usable_trajectories_have_a_row_others_need_none():
    with pytest.raises(TrajectoryError, match="at least one row"):
        parse_trajectory(HEAD)
    failed = parse_trajectory({**HEAD, "status": "failed"})
    assert failed.rows == []
    assert failed.to_json() == {**HEAD, "status": "failed"}


def test_the_schema_accepts_whatever_parses():
    accepted = 0

    @settings(max_examples=examples(150), deadline=None)
    @given(st.sampled_from([*FLAT, "steps", "rows", "metadata", "model_version", "extra", "values"]), JSON)
    def try_one(field, value):
        nonlocal accepted
        record = {**FLAT, field: value}
        with contextlib.suppress(TrajectoryError):  # and no other error
            parse_trajectory(record)
            VALIDATOR.validate(record)
            accepted += 1

    try_one()
    assert accepted > 0
