"""How far a set of prompts is: by source, how long it takes still, and what fails in every epoch."""

from __future__ import annotations

from streamadv.cli.prompts import line_of
from streamadv.prompts.spec import PromptSet
from streamadv.prompts.stored import Stored
from streamadv.status.prompts import progress_of

SET = PromptSet("train", {"code": 10, "math": 20}, 3, None, {"code": 1, "math": 2}, 1, "")
COUNTERS = {
    "trained 1 0": 8,
    "trained 1 1": 4,
    "filtered:zero_variance 1 0": 1,
    "given_up:incomplete 2 0": 2,
    "trained 2 0": 15,
    "again:incomplete 2 0": 6,
}
SHARES = {"code": 1.0, "math": 2.0}
ENTRIES = {"1 13": "0 0 nonce engine 1", "2 19": "1 1 -"}
STORED = Stored(SET, "born", [14, 20], ENTRIES, [], COUNTERS, 0, SHARES)


def test_sources_and_the_time_to_the_end() -> None:
    code, math = progress_of(STORED, pace=0.5)
    assert (code.trained, code.filtered, code.in_play, code.left, code.epoch) == (
        *(12, {"zero_variance": 1}),
        *(1, 16, 1),
    )
    assert (math.trained, math.given_up, math.in_play, math.left) == (15, {"incomplete": 2}, 1, 42)
    # 30 of 90 have ended by 36 groups: 60 more take 72 groups, at one in two seconds.
    assert code.seconds_left == math.seconds_left == 144
    assert "ends in about 2 min" in line_of(math)


def test_what_is_left_out_as_solved_takes_no_group() -> None:
    counters = COUNTERS | {"skipped 2 0": 3, "trained 2 0": 12}
    skipping = Stored(SET, "born", [14, 20], ENTRIES, [], counters, 0, SHARES)
    # 30 of 90 have ended by 33 groups: 60 more take 66 groups.
    assert [line.seconds_left for line in progress_of(skipping, pace=0.5)] == [132, 132]


def test_no_prompt_was_played_again_less_than_never() -> None:
    """A dead group that is put back takes back a count, which a checkpoint may have taken back before."""
    requeued = Stored(SET, "born", [14, 20], ENTRIES, [], {"again:dead 1 0": -1}, 0, SHARES)
    assert progress_of(requeued)[0].failures == {}


def test_without_a_pace_there_is_no_time_to_the_end() -> None:
    assert [line.seconds_left for line in progress_of(STORED)] == [None, None]
    assert "ends in" not in line_of(progress_of(STORED)[0])


def test_a_prompt_that_fails_everywhere_is_named() -> None:
    given_up = [
        "2 3 1 incomplete",
        "2 5 1 expired",
        "2 23 1 incomplete",
        "2 43 3 dead",
        "1 4 1 stale",
        "9 9 9 x",
    ]
    code, math = progress_of(STORED, 0.0, given_up)
    assert math.failing == {"3": 3, "5": 1}
    assert code.failing == {"4": 1}
    assert "given up again and again: 3 in 3 epochs" in line_of(math)
    assert "again and again" not in line_of(code)


def test_a_set_is_over_when_what_follows_has_ended_before() -> None:
    """A server that has lost its last writes hears how prompts ended that it has not begun."""
    late = ["2 58", "2 59"]
    assert Stored(SET, "born", [30, 58], {}, late, {}, 0, SHARES).is_over
    assert not Stored(SET, "born", [30, 58], {}, late[1:], {}, 0, SHARES).is_over
