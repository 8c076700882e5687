"""Names of all Redis keys of a run. docs/reference/keys.md says what each holds and which scripts write it.

Every shard's keys carry one hash tag `{run:shard:salt}`, so all of them share a cluster slot and one script
can change several. The salt spreads shards evenly over the slots.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Final, NamedTuple, Self

from redis.crc import key_slot

from ..errors import SettingError
from ..messages import brief

RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
CLUSTER_SLOTS: Final = 16384

ENTRY_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
#: The last id that an entry of a stream can have: after it a stream takes no more.
LAST_ID: Final = f"{2**64 - 1}-{2**64 - 1}"

#: Hash of all runs of this server: name -> time of creation in ms.
RUNS: Final = "streamadv:runs"


class EntryId(NamedTuple):
    """The id of an entry of a stream, which sorts as its stream does."""

    ms: int  # when it was added, by the server's clock
    number: int

    @classmethod
    def of(cls, text: str) -> Self:
        ms, _, number = text.partition("-")
        return cls(int(ms), int(number))

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


def check_run_name(run: str) -> str:
    """`run` if it may name a run. Raises SettingError."""
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
        raise SettingError(f"run is {brief(run)}: use letters, digits, '.', '_', '-' and '/', at most 100")
    return run


@dataclass(frozen=True, slots=True)
class EntryKeys:
    """Keys by which processes find a run, before they know its shards and salts."""

    run: str
    runs: ClassVar[str] = RUNS
    # In the slots of the two others, and never there: see `ShardKeys.void`.
    runs_void: ClassVar[str] = "{streamadv:runs}:void"

    @property
    def manifest(self) -> str:
        return f"{{{self.run}}}:manifest"

    @property
    def manifest_void(self) -> str:
        return f"{{{self.run}}}:void"


def find_salt(run: str, shard: int, shards: int) -> int:
    """The smallest salt that puts `shard` into its own share of the slot space."""
    salt = 0
    while key_slot(f"{run}:{shard}:{salt}".encode()) * shards // CLUSTER_SLOTS != shard:
        salt += 1
    return salt


class _Single:
    """A key that a shard has once, under the attribute's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, shard: ShardKeys, owner: type) -> str:
        """Asked once for each shard, which then has the key itself."""
        key: str = shard.__dict__.setdefault(self._name, f"{{{shard.tag}}}:{self._name}")
        return key


def _many(kind: str) -> Callable[[ShardKeys, str], str]:
    """A method that gives the shard's key of this kind with a name."""

    def key(self: ShardKeys, name: str) -> str:
        return f"{{{self.tag}}}:{kind}:{name}"

    return key


@dataclass(frozen=True)
class ShardKeys:
    """Keys of one shard. Attributes are keys, methods take the id of what they name."""

    tag: str

    void = _Single()  # never exists: deleting it is a write that needs no memory, see `scripts.py`

    # A trajectory's way
    open = _Single()  # open groups by deadline
    rollouts = _Single()  # stream: records for the grouper
    scored = _Single()  # rewards for records that the grouper has taken
    groups = _Single()  # log of groups that have ended, until commit
    work = _Single()  # stream: work items for advantage workers
    results = _Single()  # log of what they publish
    attempts = _Single()  # tries with a suspect group or trajectory

    # Batches in the shard
    applied = _Single()  # batch -> what is excluded from it
    owners = _Single()  # group in flight -> its batch

    # What is left of groups that have ended
    ended = _Single()  # tombstones
    ended_before = _Single()  # older tombstones
    garbage = _Single()  # payloads to delete
    dead = _Single()  # dead letters by time
    malformed = _Single()  # stream: foreign data that was removed
    prompt_ends = _Single()  # stream: how groups of prompts have ended
    kept = _Single()  # stream: ended groups to look at

    # Figures
    ledger = _Single()
    sizes = _Single()  # what trajectories need, for admission
    evals = _Single()  # what evaluation groups have shown
    trainer = _Single()  # the shard's copy of epoch, version and pacing
    admission = _Single()  # stream of one entry: the trainer may have made room

    # Of the home shard only
    session = _Single()  # the trainer session: epoch, version, committed
    batches = _Single()  # k -> record of batch k
    producers = _Single()  # producer -> heartbeat
    prompts = _Single()  # name of a set of prompts -> what it is

    # Those of which there are many
    group = _many("group")  # by id
    payload = _many("payload")  # by nonce, as an output
    scoring = _many("scoring")  # by scorer
    output = _many("output")
    dead_group = _many("dead")  # by id

    # Of a set of prompts, by its name; in the home shard
    prompt_state = _many("prompt_state")
    prompt_entries = _many("prompt_entries")
    prompt_again = _many("prompt_again")
    prompt_given_up = _many("prompt_given_up")
    prompt_solved = _many("prompt_solved")


_shard_keys: Final = lru_cache(1024)(ShardKeys)

#: Kinds of keys of a shard that exist once, and those of which there are many.
SINGLE_KINDS: Final = tuple(name for name, value in vars(ShardKeys).items() if isinstance(value, _Single))
PROMPT_KINDS: Final = ("prompt_state", "prompt_entries", "prompt_again", "prompt_given_up", "prompt_solved")
MANY_KINDS: Final = ("group", "payload", "scoring", "output", "dead_group", *PROMPT_KINDS)


def key_patterns(run: str) -> dict[str, str]:
    """Kind of key -> glob pattern of a server's access rules: of all shards of the run, however many it has."""
    # A run name holds no character that is special in a glob.
    shard, entry = ShardKeys(f"{check_run_name(run)}:*"), EntryKeys(run)
    return {
        **{kind: getattr(shard, kind) for kind in SINGLE_KINDS},
        **{kind: getattr(shard, kind)("*") for kind in MANY_KINDS},
        **{kind: getattr(entry, kind) for kind in ("manifest", "manifest_void", "runs", "runs_void")},
    }


@dataclass(frozen=True)
class RunKeys:
    """All keys of a run, given the salts of its shards."""

    run: str
    salts: tuple[int, ...]

    @cached_property
    def shards(self) -> Sequence[ShardKeys]:
        return [_shard_keys(f"{self.run}:{index}:{salt}") for index, salt in enumerate(self.salts)]

    @property
    def home(self) -> ShardKeys:
        """The shard that also holds what concerns the whole run: session, batches, producers."""
        return self.shards[0]

    def shard_of(self, group_id: str) -> int:
        """The shard a group lives in: a stable hash, the same in every process and release."""
        if len(self.salts) == 1:
            return 0
        digest = hashlib.blake2b(group_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.salts)
