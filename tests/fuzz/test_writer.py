"""Whatever a producer's user may write, at random, into a run at work: no stage ends, and nobody reading it does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import pytest
from prometheus_client import generate_latest

from streamadv import metrics
from streamadv.cli.status import lines_of
from streamadv.errors import StreamadvError
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.run.dead_letters import list_dead
from streamadv.status import read_status
from streamadv.status.audit import audit
from streamadv.status.evaluations import read_evaluations
from streamadv.status.exported import samples
from streamadv.store import acl
from streamadv.store.keys import key_patterns
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    batches_read,
    compute_all,
    consumer_of,
    group_all,
    join,
    ledger,
    make_overdue,
    producing,
    trajectory,
    unscored,
)

from .mutations import HOSTILE, TOKENS, cases, chance_of, damaged_bytes

WRITES: Final = (
    "del",
    "hset",
    "hsetnx",
    "hdel",
    "hincrby",
    "zadd",
    "xadd",
    "rpush",
    "persist",
    "pexpire",
    "unlink",
)
RIGHTS: Final = [
    (command, kind)
    for kinds, commands in acl.PRODUCER.rules.items()
    for kind in kinds.split()
    for command in commands.split()
    if command in WRITES
]
#: Groups that honest producers play, and their role.
GROUPS: Final = {"healthy": "train", "spoilt": "train", "asked": "eval", "scored": "train", "late": "train"}
NUMBERS: Final = (0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 10**15)
SCORES: Final = (0, 1, 1e18, float("inf"), float("-inf"), -5)


class Writer:
    """Writes into a run what rights allow: genuine texts that are damaged, and texts that belong nowhere."""

    def __init__(self, run: Run, chance: random.Random) -> None:
        self._run = run
        self._chance = chance
        self._client: Any = run.connection.scripts
        self._patterns = key_patterns(run.name)

    def write(self) -> None:
        """One command; heads of open groups as often as everything else together."""
        if self._chance.random() < 0.5:
            return self._spoil_a_head()
        command, kind = self._chance.choice(RIGHTS)
        key = self._key(kind)
        genuine = self._genuine(key)
        name, value = self._damaged(list(genuine)), self._damaged(list(genuine.values()))
        arguments: Mapping[str, Callable[[], list[Any]]] = {
            "del": list,
            "persist": list,
            "unlink": list,
            "pexpire": lambda: [100_000],
            "hdel": lambda: [name],
            "hset": lambda: [name, value],
            "hsetnx": lambda: [name, value],
            "hincrby": lambda: [name, self._chance.choice(NUMBERS)],
            "zadd": lambda: [self._chance.choice(SCORES), name],
            "rpush": lambda: [self._chance.choice([value, b"0 " + value, b"1 spoilt"])],
            "xadd": lambda: self._entry(genuine),
        }
        with suppress(_refused()):  # a number that is none, or out of range
            self._client.execute_command(command, key, *arguments[command]())
        return None

    def _spoil_a_head(self) -> None:
        key = self._run.keys.home.group(self._chance.choice(list(GROUPS)))
        head: bytes | None = self._client.hget(key, "head")
        if head is None:
            return
        words = head.split(b" ")
        match self._chance.randrange(3):
            case 0:
                forged = head + self._chance.choice([b"\xff", self._text()])
            case 1:
                words[self._chance.randrange(len(words))] = self._text()
                forged = b" ".join(words)
            case _:
                forged = damaged_bytes(head, self._chance)
        self._client.hset(key, "head", forged)

    def _entry(self, genuine: Mapping[bytes, bytes]) -> list[Any]:
        fields = dict(genuine) or {b"junk": b"1"}
        name = self._chance.choice(list(fields))
        fields[name] = self._damaged([fields[name]])
        cut = self._chance.choice([[], [], ["MAXLEN", self._chance.randrange(5)]])
        return [*cut, "*", *(part for pair in fields.items() for part in pair)]

    def _key(self, kind: str) -> str:
        """One of this kind that there is, or else a new one."""
        pattern = self._patterns[kind].replace(
            f"{self._run.name}:*", self._run.keys.home.void[1:].partition("}")[0]
        )
        there = sorted(key.decode(errors="replace") for key in self._client.keys(_escaped(pattern)))
        return self._chance.choice(there or [pattern.replace("*", "new")])

    def _genuine(self, key: str) -> dict[bytes, bytes]:
        """What stands there: fields and values, or an entry of a stream, or items that name themselves."""
        match self._client.type(key):
            case b"hash":
                return dict(self._client.hgetall(key))
            case b"stream":
                return dict(self._chance.choice(self._client.xrange(key, count=20) or [(b"", {})])[1])
            case b"zset":
                return {member: member for member in self._client.zrange(key, 0, 20)}
            case b"list":
                return {item: item for item in self._client.lrange(key, 0, 20)}
        return {}

    def _damaged(self, genuine: list[bytes]) -> bytes:
        if not genuine or self._chance.random() < 0.3:
            return self._text()
        text = self._chance.choice(genuine)
        return text if self._chance.random() < 0.4 else damaged_bytes(text, self._chance)

    def _text(self) -> bytes:
        foreign = str(self._chance.choice(HOSTILE)).encode(errors="surrogatepass")[:10_000]
        kinds = [
            b"dropped:",
            b"dead:",
            b"outcome:",
            b"u",
            b"h",
            b"column.",
            b"score:0",
            b"score_value:1",
            b"",
        ]
        return self._chance.choice(
            [*TOKENS, foreign, self._chance.choice(kinds) + self._chance.choice(TOKENS)]
        )


def _escaped(pattern: str) -> str:
    """A pattern of access rules as one of KEYS, for which a run's name must match itself."""
    return pattern.replace("[", "\\[").replace("?", "\\?")


def _refused() -> type[Exception]:
    from redis.exceptions import ResponseError

    return ResponseError


def play(producer: Producer) -> Iterator[None]:
    """Push each group in two parts."""
    for index in range(2):
        for group_id, role in GROUPS.items():
            make = unscored if group_id == "scored" else trajectory
            with suppress(StreamadvError):
                producer.push([make(group_id, index, 2, role=role, data_source="math")])
            with suppress(StreamadvError):
                producer.score("scored", index, 0.5)
            yield


def work(run: Run, judge: Scorer, queue: TrainerQueue) -> None:
    """A turn of every stage, and of all who look."""
    consumer = consumer_of(run, "judge")
    for entries in batches_read(consumer):
        judge.work(consumer, entries, lambda trajectories: [1.0] * len(trajectories))
    group_all(run)
    with suppress(StreamadvError):
        if (batch := queue.next_batch(timeout=0)) is not None:
            queue.trained(batch)
    compute_all(run)
    status = read_status(run)
    assert max(map(len, lines_of(status, run.manifest))) < 2000
    assert len(list(samples(status))) < 1000
    assert all(len(each.data_source) < 300 for each in read_evaluations(run))
    assert len(generate_latest(metrics.REGISTRY)) < 1_000_000
    list(list_dead(run))
    audit(run)


@pytest.mark.release
@pytest.mark.slow
def test_all_that_a_producer_may_write(redis_url: str, run: str) -> None:
    for number in cases("a producer's rights"):
        chance, name = chance_of("a producer's rights", number), f"{run}-{number}"
        with producing(redis_url, name, {"scorers": ["judge"], "partial_min_usable": 1}) as producer:
            joined = join(redis_url, name)
            writer, judge = Writer(joined, chance), Scorer(redis_url, name, "judge")
            queue = TrainerQueue(
                redis_url, name, batch_groups=2, min_groups=1, chain={"estimator": "reinforce"}
            )
            for _ in play(producer):
                for _ in range(chance.randrange(8)):
                    writer.write()
                if chance.random() < 0.5:
                    work(joined, judge, queue)
            for group_id in GROUPS:
                make_overdue(joined, group_id)
            work(joined, judge, queue)
        work(joined, judge, queue)
        assert ledger(joined)
        assert joined.connection.scripts.zcard(joined.keys.home.open) == 0, number
