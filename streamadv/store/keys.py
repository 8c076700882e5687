"""Names of all Redis keys of a run. ARCHITECTURE.md has the table of what each holds and who writes it.

Every shard's keys carry one hash tag `{run:shard:salt}`, so all of them share a cluster slot and one script
can change several. The salt spreads shards evenly over the slots.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from redis.crc import key_slot

from ..errors import SettingError
from ..messages import brief

RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
CLUSTER_SLOTS: Final = 16384

#: Hash of all runs of this server: name -> time of creation in ms.
RUNS: Final = "streamadv:runs"
RUNS_VOID: Final = "{streamadv:runs}:void"  # never exists, see `ShardKeys.void`


def check_run_name(run: str) -> str:
    """`run` if it may name a run. Raises SettingError."""
    if not RUN_NAME.fullmatch(run):
        raise SettingError(f"run is {brief(run)}: use letters, digits, '.', '_', '-' and '/', at most 100")
    return run


def manifest_key(run: str) -> str:
    """The run's manifest, found before shards and salts are known."""
    return f"{{{run}}}:manifest"


def void_key(run: str) -> str:
    """Never exists, in the manifest's slot: see `ShardKeys.void`."""
    return f"{{{run}}}:void"


@dataclass(frozen=True, slots=True)
class EntryKeys:
    """Keys by which processes find a run, before they know its shards and salts."""

    run: str

    @property
    def manifest(self) -> str:
        return manifest_key(self.run)

    @property
    def manifest_void(self) -> str:
        return void_key(self.run)

    @property
    def runs(self) -> str:
        return RUNS

    @property
    def runs_void(self) -> str:
        return RUNS_VOID


def find_salt(run: str, shard: int, shards: int) -> int:
    """The smallest salt that puts `shard` into its own share of the slot space."""
    salt = 0
    while key_slot(f"{run}:{shard}:{salt}".encode()) * shards // CLUSTER_SLOTS != shard:
        salt += 1
    return salt


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """Keys of one shard. Attributes are keys, methods take the id of what they name."""

    tag: str

    def _key(self, name: str) -> str:
        return f"{{{self.tag}}}:{name}"

    @property
    def void(self) -> str:
        """Never exists: deleting it is a write that needs no memory (see `lua/`)."""
        return self._key("void")

    @property
    def rollouts(self) -> str:
        return self._key("rollouts")

    @property
    def open(self) -> str:
        return self._key("open")

    @property
    def groups(self) -> str:
        return self._key("groups")

    @property
    def work(self) -> str:
        return self._key("work")

    @property
    def results(self) -> str:
        return self._key("results")

    @property
    def applied(self) -> str:
        return self._key("applied")

    @property
    def owners(self) -> str:
        return self._key("owners")

    @property
    def ledger(self) -> str:
        return self._key("ledger")

    @property
    def sizes(self) -> str:
        return self._key("sizes")

    @property
    def trainer(self) -> str:
        return self._key("trainer")

    @property
    def ended(self) -> str:
        return self._key("ended")

    @property
    def ended_before(self) -> str:
        return self._key("ended_before")

    @property
    def garbage(self) -> str:
        return self._key("garbage")

    @property
    def dead(self) -> str:
        return self._key("dead")

    @property
    def malformed(self) -> str:
        return self._key("malformed")

    @property
    def scored(self) -> str:
        return self._key("scored")

    @property
    def attempts(self) -> str:
        return self._key("attempts")

    def dead_group(self, group_id: str) -> str:
        return self._key(f"dead:{group_id}")

    def group(self, group_id: str) -> str:
        return self._key(f"group:{group_id}")

    def scoring(self, scorer: str) -> str:
        return self._key(f"scoring:{scorer}")

    def payload(self, nonce: str) -> str:
        return self._key(f"payload:{nonce}")

    def output(self, nonce: str) -> str:
        return self._key(f"output:{nonce}")

    # Of the home shard (shard 0) only:

    @property
    def lineage(self) -> str:
        return self._key("lineage")

    @property
    def batches(self) -> str:
        return self._key("batches")

    @property
    def producers(self) -> str:
        return self._key("producers")


#: Kinds of keys of a shard that exist once, and those of which there are many.
SINGLE_KINDS: Final = (
    *(
        "void",
        "rollouts",
        "open",
        "groups",
        "work",
        "results",
        "applied",
        "owners",
        "ledger",
        "sizes",
        "trainer",
    ),
    *("ended", "ended_before", "garbage", "scored", "dead", "malformed", "attempts", "lineage", "batches"),
    "producers",
)
MANY_KINDS: Final = ("dead_group", "group", "scoring", "payload", "output")


def key_patterns(run: str) -> dict[str, str]:
    """Kind of key -> glob pattern of a server's access rules: of all shards of the run, however many it has."""
    shard = ShardKeys(f"{check_run_name(run)}:*")  # a run name holds no character that is special in a glob
    return {
        **{kind: getattr(shard, kind) for kind in SINGLE_KINDS},
        **{kind: getattr(shard, kind)("*") for kind in MANY_KINDS},
        "manifest": manifest_key(run),
        "manifest_void": void_key(run),
        "runs": RUNS,
        "runs_void": RUNS_VOID,
    }


@dataclass(frozen=True, slots=True)
class RunKeys:
    """All keys of a run, given the salts of its shards."""

    run: str
    salts: tuple[int, ...]

    @property
    def shards(self) -> list[ShardKeys]:
        return [self.shard(index) for index in range(len(self.salts))]

    @property
    def home(self) -> ShardKeys:
        """The shard that also holds what concerns the whole run: lineage, batches, producers."""
        return self.shard(0)

    def shard(self, index: int) -> ShardKeys:
        return ShardKeys(f"{self.run}:{index}:{self.salts[index]}")

    def shard_of(self, group_id: str) -> int:
        """The shard a group lives in: a stable hash, the same in every process and release."""
        if len(self.salts) == 1:
            return 0
        digest = hashlib.blake2b(group_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.salts)
