"""Dead groups of prompts that an operator puts back."""

from __future__ import annotations

import json
from typing import Any

import pytest

import streamadv as sa
from streamadv import cli
from streamadv.errors import StreamadvError
from streamadv.prompts.spec import identity
from streamadv.prompts.stored import carry_ends, check_requeue
from streamadv.run.dead_letters import list_dead, requeue
from streamadv.trainer.queue import TrainerQueue
from tests.support import group_all, join, problems

from .test_back import CHAIN, play, queue_of, train
from .test_once import SIZE, prompts, record, stored

NEEDS: dict[str, Any] = {"chain": CHAIN | {"kl": {"coefficient": 0.1}}, "pushed": ("ref_log_probs",)}


def kill_logged(url: str, run: str, joined: Any) -> None:
    group_all(joined)
    with (
        TrainerQueue(url, run, batch_groups=2, min_groups=1, **NEEDS) as queue,
        pytest.raises(sa.errors.NoBatchError),
    ):
        queue.next_batch(timeout=0)


def test_a_dead_group_is_requeued_unless_its_prompt_is_played_again(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1, retries=1), SIZE)
        ids = play(groups, 2)
        group_all(joined)
        with (
            TrainerQueue(
                redis_url,
                run,
                batch_groups=2,
                min_groups=1,
                chain=CHAIN | {"kl": {"coefficient": 0.1}},
                pushed=("ref_log_probs",),
            ) as queue,
            pytest.raises(sa.errors.NoBatchError),
        ):
            queue.next_batch(timeout=0)
        assert sorted(dead.group_id for dead in list_dead(joined)) == sorted(ids)
        check_requeue(joined, ids[0])
        requeue(joined, ids[0])
        carry_ends(joined)
        again = play(groups, 1)
        assert [identity(group) for group in again] == [identity(ids[1])]
        with pytest.raises(
            StreamadvError, match="cannot be requeued: its prompt is played again, or has ended"
        ):
            check_requeue(joined, ids[1])
        with queue_of(redis_url, run) as queue:
            trained = train(queue, joined, 1)
            assert sorted(trained) == sorted([ids[0], again[0]])
            queue.commit(queue.state_dict())
        assert stored(joined).counters == {"trained 1 0": 2, "again:dead 1 0": 1}


def test_all_dead_groups_are_requeued_but_those_whose_prompts_are_played_again(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1, retries=1), SIZE)
        ids = play(groups, 2)
        group_all(joined)
        needs = {"chain": CHAIN | {"kl": {"coefficient": 0.1}}, "pushed": ("ref_log_probs",)}
        with (
            TrainerQueue(redis_url, run, batch_groups=2, min_groups=1, **needs) as queue,
            pytest.raises(sa.errors.NoBatchError),
        ):
            queue.next_batch(timeout=0)
        carry_ends(joined)
        (again,) = play(groups, 1)
        assert cli.main(["dead", "requeue", "--all", "--redis", redis_url, "--run", run]) == 0
        (left,) = (dead.group_id for dead in list_dead(joined))
    assert identity(left) == identity(again)
    assert left in ids
    said = capsys.readouterr().out
    assert f"group {left!r} cannot be requeued" in said
    assert said.endswith(f"requeued 1 group, {SIZE} trajectories\n")


def test_a_prompt_whose_dead_group_waits_again_is_not_ended_by_the_commit(redis_url: str, run: str) -> None:
    """Its group was in the batch, and in no weights. The trainer dies between its checkpoint and the commit."""
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        scripts = joined.connection.scripts
        ids = play(producer.prompts(prompts(epochs=1), SIZE), 2)
        group_all(joined)
        [*_, (_, logged)] = scripts.xrange(joined.home.keys.groups)
        payload = logged[b"payloads"].split()[0]
        scripts.rename(payload, "elsewhere")
        with queue_of(redis_url, run) as queue:
            assert train(queue, joined, 1) == ids[:1]
            state = queue.state_dict()
        scripts.rename("elsewhere", payload)
        check_requeue(joined, ids[1])
        requeue(joined, ids[1])
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(state)
            carry_ends(joined)
            assert stored(joined).counters["trained 1 0"] == 1
            assert train(queue, joined, 1) == ids[1:]
            queue.commit(queue.state_dict())
        carry_ends(joined)
        assert stored(joined).counters["trained 1 0"] == 2
        assert not problems(joined)


def test_a_dead_group_put_back_while_its_prompt_is_leased_ends_it(redis_url: str, run: str) -> None:
    """check_requeue passes, a producer leases the next try, the group is requeued and trained: it ends as trained."""
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1, retries=1), SIZE)
        (first,) = play(groups, 1)
        kill_logged(redis_url, run, joined)
        carry_ends(joined)
        check_requeue(joined, first)  # the operator's first request
        _, again = next(groups)  # a producer leases the next try
        assert again.group_id == first[:-1] + "1"
        requeue(joined, first)  # the operator's second request
        carry_ends(joined)
        with queue_of(redis_url, run) as queue:
            assert train(queue, joined, 1) == [first]
            queue.commit(queue.state_dict())
            with again:
                pass  # its rollouts fail
            group_all(joined)
            carry_ends(joined)
        assert "given_up:incomplete 1 0" not in stored(joined).counters
        assert stored(joined).counters["trained 1 0"] == 1


def test_a_prompt_that_a_checkpoint_took_back_is_played_whatever_was_put_back(
    redis_url: str, run: str
) -> None:
    """A requeued group that was trained in a past that an older checkpoint has taken back: it is to be played again,
    also after the trainer was restarted once more."""
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1, retries=0), SIZE)
        play(groups, 1)
        _, group = next(groups)  # begun before the checkpoint
        second = group.group_id
        with queue_of(redis_url, run) as queue:
            train(queue, joined, 1)
            older = json.loads(json.dumps(queue.state_dict()))
            queue.commit(older)
        group.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
        kill_logged(redis_url, run, joined)
        carry_ends(joined)
        assert stored(joined).counters == {"trained 1 0": 1, "given_up:dead 1 0": 1}
        check_requeue(joined, second)
        requeue(joined, second)
        carry_ends(joined)
        with queue_of(redis_url, run) as queue:
            assert train(queue, joined, 1) == [second]
            queue.commit(queue.state_dict())
        assert stored(joined).counters["trained 1 0"] == 2
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            newer = json.loads(json.dumps(queue.state_dict()))
            queue.commit(newer)
        before = stored(joined)
        assert before.counters["trained 1 0"] == 1
        assert before.entries == {"1 1": "1 0 -"}  # to be played again
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(newer)
            after = stored(joined)
        assert after.counters["trained 1 0"] == 1
        again = play(groups, 1)
        assert again == [second[:-1] + "1"]
