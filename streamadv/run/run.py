"""A run as a pipeline process sees it: its connection, its keys, its manifest, and the counters of its ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from redis.exceptions import NoScriptError

from .. import clock
from ..errors import EpochFencedError, SettingError
from ..metrics.instruments import KEPT, OUTCOMES
from ..store.connection import Connection
from ..store.keys import RUNS, EntryKeys, RunKeys, ShardKeys, check_run_name
from ..store.replies import as_count, as_int
from ..store.scripts import FENCED, ids_of, run_script, script_call, server_id_calls
from .manifest import (
    DEFAULTS,
    FIXED,
    Manifest,
    RunSettings,
    given_settings,
    manifest_call,
    parse_manifest,
)

#: Share of maxmemory; the rest is for the scripts' own keys, results and buffers.
MAX_BYTES_SHARE: Final = 0.7
#: Default if the server tells neither maxmemory nor the machine's memory.
FALLBACK_MAX_BYTES: Final = 1 << 30
#: Keys of a run that are deleted in one round trip.
DELETED_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a run as a pipeline process sees it: its keys, and the scripts that change them."""

    run: str
    index: int
    keys: ShardKeys
    connection: Connection

    def call(self, script: str, args: Sequence[Any] = (), **caller_keys: Any) -> Any:
        """Run a script, which may run twice when its reply is lost. `caller_keys`: see `scripts.script_call`.

        Raises EpochFencedError when another trainer has taken over: nothing was changed.
        """
        call = script_call(script, self.keys, args, **caller_keys)
        reply = run_script(self.connection.scripts, call)
        if call.script.fence is not None and reply == FENCED:
            raise fenced(self.run)
        return reply


def fenced(run: str) -> EpochFencedError:
    """The error of a trainer whose run another one has."""
    return EpochFencedError(f"run {run}: another trainer has taken over, this one must stop")


class Run:
    """One run on one server. Made by `open_run` and `find_run`."""

    manifest: Manifest
    keys: RunKeys
    shards: list[Shard]
    home: Shard  # the shard that also holds what concerns the whole run: session, batches, producers

    def __init__(self, name: str, connection: Connection, settings: RunSettings | None) -> None:
        self.name = name
        self.connection = connection
        self._settings, self._entry = settings, EntryKeys(name)
        self._known: Manifest | None = None  # what this process writes back
        self._looked = clock.now()
        self.refresh()

    def refresh(self) -> None:
        """Read the manifest again: another process may have written a setting since, or the server lost it.

        What this process knows of it is written back. Raises ManifestMismatchError when another manifest stands there.
        Without settings this only reads; raises SettingError when the run does not exist.
        """
        scripts, settings = self.connection.scripts, self._settings
        reply: Any
        if settings is None:
            stored: Any = scripts.hgetall(self._entry.manifest)
            if not stored:
                raise SettingError(
                    f"run {self.name!r} does not exist on {self.connection.safe_url}: see `streamadv runs list`"
                )
            reply = [0, *(part for pair in stored.items() for part in pair)]
        else:
            reply = run_script(scripts, manifest_call(self.name, settings, before=self._known))
        manifest = parse_manifest(self.name, settings, reply, self._known)
        if settings is not None:
            if reply[0] or self._known is None:
                run_script(scripts, script_call("register", self._entry, [self.name]))
            self._known = manifest
        self.manifest, self.keys = manifest, manifest.keys
        self.shards = [
            Shard(self.name, index, keys, self.connection) for index, keys in enumerate(self.keys.shards)
        ]
        self.home = self.shards[0]

    def refresh_if_changed(self, every_s: float = 0.0) -> None:
        """`refresh`, if there is anything new: one small round trip, unless the last look was within `every_s`."""
        if clock.now() - self._looked >= every_s:
            self.execute(self.connection.scripts.pipeline(transaction=False))

    def execute(self, pipe: Any) -> list[Any]:
        """The replies to a pipeline, which asks with it for the salts and the number of fields of the manifest.

        `refresh`, if they are others than this process knows: settings are only added while anybody uses the run.
        """
        replies: list[Any]
        key = self._entry.manifest
        *replies, salts, count = pipe.hget(key, "salts").hlen(key).execute()
        self._looked = clock.now()
        fields, ignored = self.manifest.fields, self.manifest.ignored
        if salts != fields["salts"].encode() or count != len(fields) + len(ignored):
            self.refresh()
        return replies

    def change(self, settings: RunSettings) -> None:
        """Write other values of settings. Nobody may be using the run: whoever knows the old ones stops.

        The new field `changed.MS` (the server's time) tells those who look only at the number of fields.

        Raises SettingError for a setting that is fixed, or a budget above the server's memory.
        """
        given = settings.model_dump(exclude_none=True)
        if fixed := sorted(given.keys() & FIXED):
            raise SettingError(f"{fixed[0]} cannot be changed: leave it out, or use another run name")
        if not given:
            raise SettingError(
                f"no setting is given: name those to change, `streamadv runs show --run {self.name}` has them"
            )
        # Do they go together?
        RunSettings(**{name: getattr(self.manifest, name) for name in DEFAULTS} | given)
        fields: Any = {name: json.dumps(value) for name, value in settings._manifest_values.items()}
        byte_budget(settings.max_bytes, self.connection.memory())
        fields[f"changed.{self.now_ms()}"] = json.dumps(sorted(fields))
        self.connection.scripts.hset(self._entry.manifest, mapping=fields)
        self.refresh()

    def shard_of(self, group_id: str) -> Shard:
        """The shard that the group lives in."""
        return self.shards[self.keys.shard_of(group_id)]

    def now_ms(self) -> int:
        """The server's clock, in milliseconds since 1970."""
        seconds, microseconds = self.connection.scripts.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def counters(self) -> Counter[str]:
        """The counters of the ledger, of all shards together; one that is no number counts as 0."""
        pipe: Any = self.connection.scripts.pipeline(transaction=False)
        for keys in self.keys.shards:
            pipe.hmget(keys.ledger, NAMES)
        total = Counter[str]()
        for ledger in pipe.execute():
            total.update({name: as_count(value) for name, value in zip(NAMES, ledger, strict=True)})
        return total

    def server_ids(self) -> list[str | None]:
        """Which server has each shard, see `scripts.server_ids`."""
        return self.server_ids_with(self.connection.scripts.pipeline(transaction=False))[0]

    def server_ids_with(self, pipe: Any) -> tuple[list[str | None], list[Any]]:
        """`server_ids`, and the replies to the reads in `pipe`: together where one server has all shards."""
        scripts, shards = self.connection.scripts, self.keys.shards
        calls = server_id_calls(self.connection, shards)
        if self.connection.is_cluster:
            return ids_of([run_script(scripts, call) for call in calls], shards), pipe.execute()
        pipe.execute_command("EVALSHA", calls[0].script.sha, *calls[0].arguments)
        *replies, server_id = pipe.execute(raise_on_error=False)
        if isinstance(server_id, NoScriptError):
            server_id = run_script(scripts, calls[0])
        for reply in (*replies, server_id):
            if isinstance(reply, Exception):
                raise reply
        return ids_of([server_id], shards), replies


def byte_budget(max_bytes: int | None, memory: Mapping[str, Any]) -> int:
    """Bytes that the payloads of a run may take on one server, live and reserved together.

    max_bytes: the run's setting; None = 0.7 x maxmemory, half of the machine's memory without maxmemory, 1 GiB where
    the server tells neither. memory: the server's `INFO memory`. Raises SettingError for a setting above 0.7 x
    maxmemory.
    """
    maxmemory = int(memory.get("maxmemory", 0))
    limit = int(maxmemory * MAX_BYTES_SHARE)
    if max_bytes is None:
        return limit or int(memory.get("total_system_memory", 0)) // 2 or FALLBACK_MAX_BYTES
    if limit and max_bytes > limit:
        raise SettingError(
            f"max_bytes is {max_bytes}, more than {MAX_BYTES_SHARE} of the server's maxmemory ({maxmemory}): "
            f"set it to {limit} or less, or raise maxmemory"
        )
    return max_bytes


def open_run(connection: Connection, name: str, settings: RunSettings | None = None) -> Run:
    """Create the run, or join it. Raises SettingError and ManifestMismatchError."""
    settings = given_settings(settings)
    if settings.max_bytes is not None:
        byte_budget(settings.max_bytes, connection.memory())  # before other processes read it
    return Run(name, connection, settings)


def find_run(connection: Connection, name: str) -> Run:
    """Join a run that exists, without writing. Raises SettingError when there is none of that name."""
    return Run(check_run_name(name), connection, None)


def delete_run(connection: Connection, name: str) -> int:
    """Delete everything stored of a run, whether its manifest can be read or not: it looks at every key of the server.

    Returns the number of keys. Stop its processes first.
    """
    scripts, count = connection.scripts, 0
    keys = scripts.scan_iter(match=f"{{{check_run_name(name)}:*", count=DELETED_AT_ONCE)
    while page := list(islice(keys, DELETED_AT_ONCE)):
        pipe: Any = scripts.pipeline(transaction=False)
        for key in page:
            pipe.unlink(key)
        count += sum(pipe.execute())
    count += scripts.unlink(EntryKeys(name).manifest)
    scripts.hdel(RUNS, name)
    return count


# The counters of a ledger

# The names of the counters in a run's ledger. A producer can write other fields into it; they are not counters. Every
# reader of a ledger reads these names only, so foreign fields cost little and never show under their own name.

#: Counters that add up to `queued`: with a scorer, in the rollouts stream, in an open group, in the groups log.
QUEUED: Final = ("scoring", "rollouts", "open", "grouped")
#: The counters without a reason.
COUNTERS: Final = (
    "pushed", "trained", *QUEUED, "in_flight", "duplicates", "groups_open", "groups_logged", "rollouts_packets",
    "scoring_packets", "live_bytes", "dead_bytes", "kept_bytes", "groups_abandoned", "groups_eval", "malformed",
)  # fmt: skip
#: How a group ends.
ENDINGS: Final = (*(outcome for outcome in OUTCOMES if outcome != "other"), "dead", "malformed", "trained")
#: Why trajectories are dropped: beside the outcomes of their groups.
DROPPED: Final = (
    *("surplus", "late", "baseline", "failed", "aborted", "unscorable", "wrong_role"),
    *(outcome for outcome in OUTCOMES if outcome not in (*KEPT, "other")),
)
#: Why trajectories are dead.
DEAD: Final = ("undecodable", "compute_error", "missing_column", "malformed")

_REASONS: Final = {"outcome": ENDINGS, "dropped": DROPPED, "dead": DEAD}
#: All counters, those with a reason as `kind:reason`.
NAMES: Final = (*COUNTERS, *(f"{kind}:{reason}" for kind, reasons in _REASONS.items() for reason in reasons))
_KNOWN: Final = frozenset(NAMES)


def by_reason(counters: Mapping[str, int], kind: str) -> dict[str, int]:
    """Counters '<kind>:<reason>' by reason, without those at 0."""
    prefix = f"{kind}:"
    return {
        name.removeprefix(prefix): count
        for name, count in sorted(counters.items())
        if name.startswith(prefix) and count
    }


def known_counters(stored: Mapping[str, Any]) -> Counter[str]:
    """Of the fields of a ledger its counters; reasons that are none of the run's are added up as `other`."""
    counters = Counter[str]()
    for name, value in stored.items():
        if name not in _KNOWN:
            kind = name.partition(":")[0]
            if kind == name or kind not in _REASONS:
                continue
            name = f"{kind}:other"
        if (count := as_int(value)) is not None:
            counters[name] += count
    return counters
