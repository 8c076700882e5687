"""Rank 0 takes a run on servers that lost recent writes: run and job agree again on every batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import Mock

import pytest

from streamadv import clock
from streamadv.algorithms import build_chain
from streamadv.batch import recovery
from streamadv.batch.ends import read_exclusions
from streamadv.batch.leader import Leader
from streamadv.batch.progress import DURABILITY_WINDOW_S, RETURN_WINDOW_S, Progress
from streamadv.batch.record import BatchRecord, Death, NamingSettings, name_batch, read_records
from streamadv.batch.recovery import applied_ids, missing, take_over, undo_batches
from streamadv.errors import EpochFencedError
from streamadv.run import Run
from streamadv.store.connection import Connection
from tests.support import group_all, ledger, problems, pushed_run

SETTINGS = NamingSettings(
    batch_groups=4,
    min_groups=4,
    prefetch=1,
    max_staleness=None,
    drop_after=None,
    keep_rolled_back=False,
    needs=frozenset(),
    chain=build_chain("grpo").config.model_dump(mode="json"),
    late=(),
    tokens_per_micro_batch=None,
)


@pytest.fixture
def run(fake: Connection) -> Run:
    """Eight groups of two in two shards, in no batch yet."""
    run = pushed_run(fake, "r", 8, settings={"shards": 2})
    group_all(run)
    return run


def begin(run: Run, progress: Progress) -> Leader:
    """A session with batches 0 and 1 named."""
    leader = take_over(run, SETTINGS, progress)
    assert leader.name_ahead(False)
    assert sorted(leader.progress.batches) == [0, 1]
    return leader


def lose_application(run: Run, record: BatchRecord) -> None:
    """As on a shard that goes back to a time before it knew the batch."""
    for shard in run.shards:
        shard.call("unapply_batch", ["99 99-aa", record.id], unlinked=[])


def test_a_batch_that_shards_have_lost_is_applied_again(run: Run) -> None:
    progress = Progress()
    leader = begin(run, progress)
    record = leader.progress.batches[0].record
    lose_application(run, record)
    assert ledger(run)["in_flight"] == 8
    take_over(run, SETTINGS, progress)
    assert all(record.id in applied_ids(run, run.shards[pointer.shard]) for pointer in record.groups)
    assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (16, 0)
    assert problems(run) == []


def test_a_dead_letter_for_a_lost_batch_is_written_when_the_batch_is_applied_again(run: Run) -> None:
    """In between nothing may be changed: the shard would forget that the batch does not miss the group."""
    progress = Progress()
    leader = begin(run, progress)
    record = leader.progress.batches[0].record
    group_id = record.groups[1].group_id
    lose_application(run, record)
    assert leader.dead_letter(record, {group_id: Death("compute_error", "")}).dead == {group_id}
    assert ledger(run)["dead"] == {}
    take_over(run, SETTINGS, progress)
    assert ledger(run)["dead"] == {"compute_error": 2}
    assert read_exclusions(run, record.id, record.groups).dead == {group_id}
    assert missing(run, record) == []
    assert problems(run) == []


def test_a_batch_that_misses_a_group_is_named_again_and_all_after_it(run: Run) -> None:
    progress = Progress()
    leader = begin(run, progress)
    before = {k: batch.record for k, batch in leader.progress.batches.items()}
    lost = before[0].groups[0]
    shard = run.shards[lost.shard]
    run.connection.scripts.xdel(shard.keys.groups, lost.entry)
    again = take_over(run, SETTINGS, progress)
    assert again.progress.batches == {}
    assert read_records(run) == {}
    assert again.name_ahead(False)
    assert list(again.progress.batches) == [0]
    named = [pointer for batch in again.progress.batches.values() for pointer in batch.record.groups]
    assert lost not in named
    assert len(named) == 4


def test_a_naming_that_the_home_shard_lost_is_written_again(run: Run) -> None:
    progress = Progress()
    leader = begin(run, progress)
    records = {k: batch.record for k, batch in leader.progress.batches.items()}
    run.connection.scripts.delete(run.home.keys.batches)
    take_over(run, SETTINGS, progress)
    assert read_records(run) == records
    assert problems(run) == []


def test_batches_that_nobody_knows_are_undone(run: Run) -> None:
    """The job before died, and the home shard lost its namings while the other shards have them."""
    begin(run, Progress())
    run.connection.scripts.delete(run.home.keys.batches)
    leader = take_over(run, SETTINGS, Progress())
    assert leader.progress.batches == {}
    assert [applied_ids(run, shard) for shard in run.shards] == [set(), set()]
    assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (0, 16)
    assert problems(run) == []


def test_a_session_that_was_replaced_changes_nothing(run: Run) -> None:
    old = take_over(run, SETTINGS, Progress())
    take_over(run, SETTINGS, Progress())
    for attempt in (lambda: old.name_ahead(False), lambda: old.commit(1), lambda: old.publish_end(1)):
        with pytest.raises(EpochFencedError, match="another trainer has taken over"):
            attempt()
    assert ledger(run)["in_flight"] == 0


def test_a_group_that_comes_back_before_its_batch_is_trained_is_not_named_again(run: Run) -> None:
    """A server loses a group of a batch that is delivered next, and its producer pushes it again."""
    leader = begin(run, Progress())
    group_id = leader.progress.batches[1].record.groups[0].group_id
    log = run.shard_of(group_id).keys.groups
    (entry,) = [e for e in run.connection.scripts.xrange(log) if e[1][b"group_id"] == group_id.encode()]
    run.connection.scripts.xadd(log, entry[1])
    run.connection.scripts.xdel(log, entry[0])
    leader.note_trained(leader.progress.batches[0].record)
    leader.name_ahead(True)
    assert sorted(leader.progress.batches) == [0, 1]
    assert leader.dropped.figures() == {}
    leader.note_trained(leader.progress.batches[1].record)
    leader.name_ahead(True)
    assert sorted(leader.progress.batches) == [0, 1]
    assert leader.dropped.figures()["dropped/trained/unknown/groups"] == 1


def test_groups_of_batches_named_before_a_server_was_replaced_are_remembered_for_long(run: Run) -> None:
    """That server may lack them, and their producers push them again later than it could lose a commit."""
    progress = Progress()
    leader = begin(run, progress)
    group_ids = [pointer.group_id for pointer in leader.progress.batches[0].record.groups]
    progress.deliver(leader.progress.batches[0].record)
    progress.servers_replaced()
    progress.train(leader.progress.batches[0].record)
    progress.commit(1)
    progress.servers_confirmed(clock.now() + DURABILITY_WINDOW_S + 1, True)
    assert progress.groups == group_ids
    progress.servers_confirmed(clock.now() + RETURN_WINDOW_S + 1, True)
    assert progress.groups == []


def test_a_new_job_is_above_what_any_shard_knows(run: Run) -> None:
    """The home shard has lost the job before, and another shard has not."""
    take_over(run, SETTINGS, Progress())
    home = run.home.keys
    run.connection.scripts.delete(home.session, home.trainer)
    progress = Progress()
    take_over(run, SETTINGS, progress)
    assert progress.epoch == 2


def test_other_groups_that_an_older_job_named_are_not_committed(run: Run) -> None:
    """A server lost this job with the batch that it had committed, and an older job has given others its number."""
    progress = Progress()
    leader = begin(run, progress)
    first, second = (leader.progress.batches[k].record for k in (0, 1))
    progress.deliver(first)
    progress.train(first)
    progress.commit(1)
    undo_batches(run, [first, second], leader.progress.fence)
    other = second.model_copy(update={"k": 0, "id": "0-0123456789ab"})
    assert name_batch(run, other, leader.progress.fence)
    progress.batches.clear()
    assert take_over(run, SETTINGS, progress).progress.batches == {}
    assert (ledger(run)["trained"], missing(run, other)) == (0, [])
    assert problems(run) == []


@pytest.mark.parametrize("committed", [0, 1])
def test_a_lost_job_takes_the_run_only_if_an_older_one_has_committed_nothing_since(
    run: Run, committed: int
) -> None:
    progress = Progress()
    take_over(run, SETTINGS, progress)
    older = {
        "session": "0-0123456789ab",
        "epoch": 1,
        "committed": committed,
        "committed_in": "0-0123456789ab",
    }
    run.connection.scripts.hset(run.home.keys.session, mapping=older)
    if committed:
        with pytest.raises(EpochFencedError):
            take_over(run, SETTINGS, progress)
    else:
        take_over(run, SETTINGS, progress)


def test_a_session_without_a_checkpoint_leaves_prompts_to_be_set_back(run: Run) -> None:
    """Its predecessor died while it set them back, and only who loads the checkpoint knows where to."""
    session = run.home.keys.session
    run.connection.scripts.hset(session, "set_back", "1")
    progress = Progress()
    take_over(run, SETTINGS, progress)
    assert (run.connection.scripts.hget(session, "set_back"), progress.is_set_back) == (b"1", False)
    progress.load(Progress.beginning(run.name))
    take_over(run, SETTINGS, progress)
    assert (run.connection.scripts.hget(session, "set_back"), progress.is_set_back) == (None, True)


def ids(record: BatchRecord) -> list[str]:
    return [pointer.group_id for pointer in record.groups]


def sized(groups: int, **settings: int) -> NamingSettings:
    """As SETTINGS, with batches of so many groups."""
    return replace(SETTINGS, batch_groups=groups, min_groups=groups, **settings)  # type: ignore[arg-type]


def waiting(run: Run) -> tuple[Progress, dict[bytes, bytes]]:
    """An older job that has named nothing, and the session hash as it is then."""
    older = Progress()
    take_over(run, sized(100), older)
    return older, run.connection.scripts.hgetall(run.home.keys.session)


def lose(run: Run, leader: Leader, older: Progress, session: Mapping[bytes, bytes]) -> None:
    """The server goes back to when it knew the older job alone."""
    undo_batches(run, [batch.record for batch in leader.progress.batches.values()], leader.progress.fence)
    scripts = run.connection.scripts
    scripts.delete(run.home.keys.session)
    scripts.hset(run.home.keys.session, mapping=dict(session))
    for shard in run.shards:
        scripts.hset(shard.keys.trainer, mapping={"epoch": older.epoch, "session": older.session})


def train(leader: Leader, k: int) -> BatchRecord:
    record = leader.progress.batches[k].record
    leader.progress.deliver(record)
    leader.note_trained(record)
    return record


def test_a_batch_of_another_line_that_has_groups_of_the_checkpoint_is_undone(run: Run) -> None:
    """A job dies between its checkpoint and the commit, and one without that checkpoint names its groups again."""
    first = Progress()
    train(begin(run, first), 0)
    state = first.state(run.name)
    other = Progress()
    other.load(Progress.beginning(run.name))
    leader = take_over(run, SETTINGS, other)
    undo_batches(run, [batch.record for batch in leader.progress.batches.values()], leader.progress.fence)
    other.batches.clear()
    assert take_over(run, sized(1), other).name_ahead(False)
    third = Progress()
    third.load(state)
    batches = take_over(run, SETTINGS, third).progress.batches
    assert not {group for batch in batches.values() for group in ids(batch.record)} & set(third.groups)


def test_a_batch_that_an_older_job_named_under_the_same_epoch_is_undone_if_it_has_trained_groups(
    run: Run,
) -> None:
    older, session = waiting(run)
    progress = Progress()
    leader = take_over(run, sized(4, prefetch=0), progress)
    leader.name_ahead(False)
    trained = ids(train(leader, 0))
    lose(run, leader, older, session)
    progress.servers_replaced()
    take_over(run, sized(2), older).name_ahead(False)
    leader = take_over(run, sized(4, prefetch=0), progress)
    assert not {
        group for k, batch in leader.progress.batches.items() if k for group in ids(batch.record)
    } & set(trained)


def test_what_is_uncommitted_is_not_committed_with_the_batch_of_an_older_job(run: Run) -> None:
    older, session = waiting(run)
    progress = Progress()
    leader = take_over(run, sized(1), progress)
    leader.name_ahead(False)
    train(leader, 0)
    uncommitted = train(leader, 1)
    progress.commit(1)
    lose(run, leader, older, session)
    del progress.batches[0]
    take_over(run, sized(2), older).name_ahead(False)
    take_over(run, sized(1), progress)
    assert missing(run, uncommitted) == []


def test_a_takeover_that_is_cut_off_goes_on_as_it_began(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {k: batch.record for k, batch in begin(run, Progress()).progress.batches.items()}
    progress = Progress()
    progress.load(Progress.beginning(run.name))
    with monkeypatch.context() as patched:
        patched.setattr(recovery, "read_records", Mock(side_effect=ConnectionError))
        with pytest.raises(ConnectionError):
            take_over(run, SETTINGS, progress)
    assert {
        k: batch.record for k, batch in take_over(run, SETTINGS, progress).progress.batches.items()
    } == before


def test_a_job_is_not_fenced_by_its_own_commit(run: Run) -> None:
    """The server loses the job after its last look, and takes its commit."""
    older, session = waiting(run)
    progress = Progress()
    leader = take_over(run, SETTINGS, progress)
    leader.name_ahead(False)
    leader.publish_version(train(leader, 0))
    lose(run, leader, older, session)
    leader.commit(1)
    progress.servers_replaced()
    take_over(run, SETTINGS, progress)
    assert progress.committed == 1


def test_a_dead_letter_whose_place_another_group_has(run: Run) -> None:
    """A server whose clock was set back has lost the group, and the death, and given its place to another group."""
    progress = Progress()
    leader = begin(run, progress)
    record = leader.progress.batches[0].record
    pointer = record.groups[1]
    leader.dead_letter(record, {pointer.group_id: Death("compute_error", "")})
    # The server goes back to before the group was logged; another one of the shard completes at the same id.
    scripts, keys = run.connection.scripts, run.shards[pointer.shard].keys
    entries = scripts.xrange(keys.groups)
    scripts.delete(keys.groups)
    assert entries
    placed = dict(entries)
    last = entries[-1]
    del placed[last[0]]
    placed[pointer.entry.encode()] = last[1]
    for entry in sorted(placed, key=lambda e: [int(x) for x in e.split(b"-")]):
        scripts.xadd(keys.groups, placed[entry], id=entry)
    take_over(run, SETTINGS, progress)
