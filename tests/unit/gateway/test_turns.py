"""Turns: packed and read again."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError, WireError
from streamadv.gateway.turns import Turn, pack, unpack
from streamadv.integrations.engines import Completion, Episode


def join(episode: Episode, turn: Turn) -> None:
    for completion in turn.choices:
        episode.add(completion, agent=turn.agent)


ids = st.lists(st.integers(0, 3), max_size=6)


@given(
    st.lists(st.tuples(st.integers(0, 10), ids, st.lists(ids, min_size=1, max_size=2)), max_size=8), st.data()
)
def test_turns_give_the_same_rows_again(conversation, data) -> None:  # type: ignore[no-untyped-def]
    """Prompts continue any earlier conversation, or cut it short: what is kept gives the same record."""
    played, restored, heard = Episode(), Episode(), []
    for back, said, answers in conversation:
        rows = played.rows
        before = rows[back % len(rows)] if rows else []
        prompt = [*before[: len(before) - (back % 3 if back % 2 else 0)], *said]
        logs = [[-0.5 * token for token in answer] for answer in answers]
        versions = [data.draw(st.sampled_from([None, [token + 1 for token in answer]])) for answer in answers]
        turn = Turn(
            [
                Completion(prompt, a, log, "stop", 4, versions=v)
                for a, log, v in zip(answers, logs, versions, strict=True)
            ],
            "d",
            ["c"],
            3,
            None,
            answer={"a": "é"},
        )
        heard.append(pack(turn, played))
        join(played, turn)
    for record in heard:
        turn = unpack(record, restored)
        join(restored, turn)
        assert (turn.digest, turn.chains, turn.messages, turn.answer) == ("d", ["c"], 3, {"a": "é"})
    assert restored.rows == played.rows
    with suppress(TrajectoryError):
        np.testing.assert_equal(restored.record(), played.record())


def test_a_turn_that_is_cut_short_is_refused() -> None:
    turn = Turn([Completion([1, 2], [3], [-0.5], "stop", 4)], "d", ["c"], 1, None, answer={"a": 1})
    record = pack(turn, Episode())
    assert unpack(record, Episode()) == turn
    for length in range(len(record)):
        with pytest.raises(WireError, match="a turn of the rollout cannot be read"):
            unpack(record[:length], Episode())
