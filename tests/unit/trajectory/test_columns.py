"""Arrays at the boundary: what is accepted, what it becomes, and how the rest is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamadv.trajectory.columns import (
    EXTRA_DTYPES,
    KNOWN_COLUMNS,
    cast_array,
    check_values,
    extra_array,
    known_array,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(INT32, min_size=1))
def test_integers_keep_their_values(values):
    array = known_array("versions", values)
    assert array.dtype == np.int32
    assert array.tolist() == values


@given(st.lists(FLOAT32, min_size=1))
def test_float32_values_survive_lists_exactly(values):
    array = known_array("values", values)
    assert array.dtype == np.float32
    assert known_array("values", array.tolist()).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.float32, np.float64, ">i4"])
def test_other_number_types_are_converted(dtype):
    array = known_array("input_ids", np.array([3, 1, 2], dtype))
    assert array.dtype == KNOWN_COLUMNS["input_ids"]
    assert array.tolist() == [3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_are_accepted(dtype):
    tensor = torch.tensor([-0.5, -1.25], dtype=dtype, requires_grad=True)
    assert known_array("rollout_log_probs", tensor).tolist() == [-0.5, -1.25]
    assert extra_array(tensor).tolist() == [-0.5, -1.25]


def test_booleans_are_a_mask_and_nothing_else():
    assert known_array("response_mask", [True, False]).tolist() == [1, 0]
    with pytest.raises(ValueError, match="booleans"):
        known_array("input_ids", [True, False])
    with pytest.raises(ValueError, match="mixes booleans"):
        known_array("input_ids", [True, 7])


def test_strided_arrays_become_contiguous():
    assert known_array("values", np.arange(10, dtype=np.float32)[::2]).flags.c_contiguous
    assert extra_array(np.arange(12).reshape(3, 4).T).flags.c_contiguous


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("input_ids", [], "empty"),
        ("input_ids", [[1, 2]], "2 dimensions"),
        ("input_ids", [1, [2]], "ragged"),
        ("input_ids", [[1], [2, 3]], "ragged"),
        ("input_ids", [1.5, 2.0], "fractions"),
        ("input_ids", [float("nan")], "fractions"),
        ("input_ids", [float("inf")], "outside"),
        ("input_ids", [2**31], "outside"),
        ("versions", np.array([2**31], np.float32), "outside"),
        ("input_ids", [1, -100], "is -100 at token 1, needs an id from 0 on"),
        ("input_ids", np.array([3, -1], np.int32), "is -1 at token 1"),
        ("input_ids", [10**5000], "needs numbers"),
        ("input_ids", [1, None], "needs numbers"),
        ("input_ids", ["1", "2"], "text"),
        ("input_ids", "12", "needs numbers"),
        ("input_ids", None, "needs numbers"),
        ("input_ids", {"a": 1}, "needs numbers"),
        ("input_ids", np.zeros(2, complex), "needs numbers"),
        ("response_mask", [0, 2], "is 2 at token 1"),
        ("response_mask", [0, -1], "outside"),
        ("response_mask", [0, 256], "outside"),
        ("rollout_log_probs", [0.0, float("nan")], "is nan at token 1"),
        ("rollout_log_probs", [float("-inf")], "is -inf at token 0"),
        ("rollout_log_probs", [0.0, 1e300], "is inf at token 1"),
        ("rollout_log_probs", [float("inf"), float("-inf")], "is inf at token 0"),
    ],
)
def test_bad_values_are_refused(name, value, problem):
    with pytest.raises(ValueError, match=problem):
        known_array(name, value)


def test_one_long_text_among_many_allocates_nothing():
    # numpy would reserve the longest text's size for each: 4 TB here.
    with pytest.raises(ValueError, match="text"):
        known_array("input_ids", ["x" * 10**7] + [""] * 10**5)
    with pytest.raises(ValueError, match="text"):
        extra_array([["x" * 10**7, ""], ["", ""]])


def test_deep_nesting_is_refused():
    value = [1]
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match="dimensions"):
        extra_array(value)


@given(st.sampled_from(sorted(EXTRA_DTYPES)), st.data())
def test_extra_arrays_survive_lists_with_their_dtype(dtype, data):
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        values = st.floats(width=8 * dtype.itemsize)
    else:
        values = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    array = np.array(data.draw(st.lists(values, min_size=1)), dtype)
    back = cast_array(extra_array(array.tolist()), dtype)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == dtype


def test_integers_beyond_int64_keep_their_values():
    values = [0, 2**63 + 257]
    assert extra_array(values).tolist() == values
    with pytest.raises(ValueError, match="64-bit"):
        extra_array([-1, 2**63])


def test_big_endian_extras_are_turned_round():
    array = extra_array(np.array([1, 2], ">i8"))
    assert array.dtype.str == "<i8"
    assert array.tolist() == [1, 2]


@pytest.mark.parametrize(
    "value", [5, "x", None, ["a"], np.array(["2020-01-01"], "M8[D]"), np.zeros((1,) * 7), [1, None]]
)
def test_extras_that_are_no_arrays_of_numbers_are_refused(value):
    with pytest.raises(ValueError, match=r"needs|dimensions"):
        extra_array(value)


@pytest.mark.parametrize("size", [1 << 10, (1 << 17) + 1])
@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_wrong_number_is_found_in_a_column_of_any_length(size, is_read_only, value):
    for name, wrong in (("values", value), ("rollout_log_probs", value), ("response_mask", 2)):
        array = np.zeros(size, KNOWN_COLUMNS[name])
        check_values(name, array)
        array[size - 2] = wrong
        array.flags.writeable = not is_read_only
        with pytest.raises(ValueError, match=f"is {wrong} at token {size - 2}, needs"):
            check_values(name, array)
