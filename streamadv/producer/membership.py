"""A producer's place in its run: the manifest, the list of producers, its keys and its byte budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from .. import doors, metrics
from ..errors import ManifestMismatchError, ProducerClosedError, SettingError, TrajectoryError
from ..messages import brief, log_fields
from ..run.heartbeats import LOOPS_OVER
from ..run.manifest import Manifest, RunSettings, given_settings, manifest_call, parse_manifest
from ..run.packets import GROUP_ID
from ..run.run import byte_budget
from ..store.keys import EntryKeys, ShardKeys
from ..store.replies import as_count, as_int
from ..store.scripts import script_call
from ..trajectory.schema import Role
from .requests import STAGE, Memory, Steps
from .tickets import GroupSpec, Ticket

logger = logging.getLogger(__name__)

#: Instance of a forked copy of a producer: earlier than all, it hears what they hear, and writes nothing.
COPY: Final = -1
#: How many of a script's arguments say what the group is; the rest are producer and limits. See lua/lib/enter.lua.
SPEC_ARGS: Final = 2


class Weights(NamedTuple):
    """The newest policy version of which the trainer has said where its weights lie, and where that is."""

    version: int
    uri: str


class Membership:
    """One producer as a member of its run."""

    def __init__(self, run: str, name: str | None, settings: RunSettings | None) -> None:
        self.run = run
        self.name = name or f"{os.uname().nodename}-{os.getpid()}-{doors.random_bytes(4).hex()}"
        self.who = f"{STAGE} {self.name}"
        metrics.begin_stage(STAGE, "producer")
        self.settings = given_settings(settings)
        self.max_bytes = 0  # of one shard
        self.version: int | None = None  # of the model, the newest published one as of the last heartbeat
        self.weights: Weights | None = None
        self.has_run_ended = False  # by its trainer, as of the last heartbeat
        self.finished = False  # as its user says; the list of producers may not have it yet
        # What it then says. Of a gateway that has begun no group "serves": the run neither waits for it nor ends with
        # it.
        self.last_word = "finished"
        self.plays: Callable[[], str] | None = None  # of a gateway: what heartbeats add, `PRODUCER_STATE`
        self.loops: list[str] = []  # sets of prompts over which somebody loops, once for each loop
        self.closed = False
        self.left = False  # nothing more is sent, not even a goodbye
        self._manifest: Manifest | None = None
        self._mismatch: ManifestMismatchError | None = None  # the run is another one now
        self._drop_after: int | None = None
        self._process = os.getpid()
        self._instance: int | None = None  # of several producers of one name the latest has the name
        self.owner = f"{self.name} 0"
        """Whom a group notes that this producer plays: name and instance."""

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of a producer in a child of its process: it is not on the list of producers."""
        return os.getpid() != self._process

    def check_open(self, leaves: bool = False) -> None:
        """Raises ProducerClosedError once it is closed. leaves: for what a closed producer still has to say."""
        if leaves and self.left:
            raise ProducerClosedError(f"producer {self.name} has left run {self.run}")
        if self.closed and not leaves:
            raise ProducerClosedError(f"producer {self.name} is closed: make another one")

    @property
    def manifest(self) -> Manifest:
        """The manifest of the run this producer has joined.

        Raises SettingError before it has joined, ManifestMismatchError once the run has become another one.
        """
        if self._mismatch is not None:
            raise self._mismatch
        if self._manifest is None:
            raise SettingError("producer is not connected: use it in a with block, or call open() first")
        return self._manifest

    @property
    def is_joined(self) -> bool:
        """Whether it has joined its run, and the run is still the same."""
        return self._manifest is not None and self._mismatch is None

    @property
    def shards(self) -> int:
        return len(self.manifest.keys.salts)

    def shard_of(self, group_id: str) -> int:
        """Number of the group's shard. Raises TrajectoryError for what is no id of a group."""
        if not (isinstance(group_id, str) and GROUP_ID.fullmatch(group_id)):
            needs = "1 to 200 characters without '}', blanks and control characters"
            raise TrajectoryError(f"group_id is {brief(group_id)}, needs {needs}")
        return self.manifest.keys.shard_of(group_id)

    def keys_of(self, group_id: str) -> ShardKeys:
        """The keys of the group's shard. Raises TrajectoryError for what is no id of a group."""
        return self.manifest.keys.shards[self.shard_of(group_id)]

    def join(self) -> Steps[None]:
        """Read or write the manifest, and find the byte budget. Raises SettingError, ManifestMismatchError."""
        self._process = os.getpid()  # of a producer that was made before a fork and is opened after it
        memory = yield Memory()
        byte_budget(self.settings.max_bytes, memory)  # before other processes read it
        yield from self.agree()
        yield script_call("register", EntryKeys(self.run), [self.run])
        self._set_budget(memory)

    def agree(self, columns: Mapping[str, str] | None = None) -> Steps[Manifest]:
        """Read the manifest, writing what this process knows of it and the server does not.

        columns: kinds of extra columns to add. Raises ManifestMismatchError when the run is another one; every later
        call does then as well.
        """
        before = self._manifest
        reply = yield manifest_call(self.run, self.settings, columns, before)
        try:
            self._manifest = parse_manifest(self.run, self.settings, reply, before)
        except ManifestMismatchError as error:
            self._mismatch = None if before is None else error
            raise
        if reply[0] and before is not None:
            yield script_call("register", EntryKeys(self.run), [self.run])
        return self._manifest

    def confirm_layout(self) -> Steps[None]:
        """Tell every shard, once the manifest is read again, how many shards the run has."""
        manifest = yield from self.agree()
        for keys in manifest.keys.shards:
            yield script_call("lay_out", keys, [len(manifest.keys.salts)])

    def group_arguments(self, spec: GroupSpec, budget: int | None, groups_elsewhere: int | None) -> list[Any]:
        """The first arguments of the scripts that may open a group, see `lua/lib/enter.lua` and `admit.lua`.

        budget: as of `Pushes.call_group_script`. A group admitted before reserves at most the budget, because a server
        that has lost it may have lost the sizes of trajectories as well. groups_elsewhere: groups that count in the
        other shards.
        """
        manifest = self.manifest
        slot_bytes, is_new = manifest.max_trajectory_bytes, budget is not None
        if budget is None:
            budget = self.max_bytes
            slot_bytes = max(1, min(slot_bytes, (budget - spec.columns) // spec.slots))
        deadline_ms = round((spec.deadline_s or manifest.group_deadline_s) * 1000)
        role = spec.role if spec.round is None else f"{spec.role}/{spec.round}"
        columns = f"+{spec.columns}" if spec.columns else ""
        group = f"{role} {spec.size} {spec.slots}{columns} {deadline_ms} {spec.data_source or ''}"
        pacing = (groups_elsewhere, manifest.max_staleness, manifest.batch_groups)
        limits = (slot_bytes, budget, len(manifest.keys.salts), *pacing, int(is_new))
        words = ["-" if limit is None else str(limit) for limit in limits]
        return [spec.group_id, group, self.owner, " ".join(words)]

    def groups_ahead(self) -> Steps[list[int]]:
        """How many groups count in pacing, of each shard."""
        counts = []
        for keys in self.manifest.keys.shards:
            counts.append((yield script_call("ahead", keys)))
        return counts

    def update_budget(self) -> Steps[None]:
        """Compute the byte budget from the manifest and the server's memory as they are now."""
        try:
            self._set_budget((yield Memory()))
        except SettingError as error:  # written by a process that does not look at the server's memory
            fields = log_fields("byte_budget_kept", run=self.run, role="producer")
            logger.warning("%s; until then %d bytes a shard", error, self.max_bytes, extra=fields)

    def _set_budget(self, memory: Mapping[str, Any]) -> None:
        self.max_bytes = byte_budget(self.manifest.max_bytes, memory) // self.shards

    def serve(self, plays: Callable[[], str]) -> None:
        """Be a gateway: once it has finished, the run neither waits for it nor ends with it until it begins a group."""
        self.last_word, self.plays = "serves", plays

    def reopen(self) -> Steps[None]:
        """A producer that had finished has more to push."""
        if self.finished:
            self.finished = False
            try:
                yield from self.send_heartbeat("open")
            except BaseException:  # no server may have heard it: it is said again before anything else
                self.finished = True
                raise

    def send_heartbeat(self, state: str = "") -> Steps[None]:
        """Write a heartbeat, unless this is a forked copy, and learn the newest model version.

        state: open, serves, finished, or gone: off the list of producers. By default one that serves or has finished
        stays so on a server that has it so, and is open on one that has forgotten: a late copy of a heartbeat takes
        nothing back.
        """
        name, is_forked = self.name, self.is_forked
        instance = COPY if is_forked else "" if self._instance is None else self._instance
        plays = "" if self.plays is None else self.plays()
        loops = [f"{LOOPS_OVER}{prompts}" for prompts in sorted(set(self.loops))]
        args = [name, state, instance, *filter(None, [plays]), *loops]
        reply = yield script_call("heartbeat", self.manifest.keys.home, args)
        version, drop_after, instance, finished, weights = reply
        self.has_run_ended = finished == b"1"
        self.note_weights(weights)
        if version:
            self.version = as_count(version)
        self._drop_after = as_int(drop_after or None)
        if self._instance is None:
            self._instance = as_count(instance)
            self.owner = f"{name} {self._instance}"
        elif as_count(instance) != self._instance and name == self.name and not is_forked:
            self.name = f"{name}-{self._instance}"
            self.owner = f"{self.name} {self._instance}"
            text = "another producer has taken the name %s: this one goes on as %s"
            fields = log_fields("name_taken", run=self.run, role="producer")
            logger.warning(text, name, self.name, extra=fields)
            yield from self.send_heartbeat(state)

    def note_weights(self, text: bytes) -> None:
        """Weights as the scripts tell them: '<version> <URI>'; nothing else is known from an empty text."""
        version, _, uri = text.decode(errors="replace").partition(" ")
        if version.isdecimal() and uri:
            self.weights = Weights(int(version), uri)

    def is_in_vain(self, ticket: Ticket) -> bool:
        """Whether nobody will train on a rollout begun under this ticket, as of the last heartbeat."""
        if ticket.role == Role.EVAL:
            return False
        if self.has_run_ended:
            return True
        if self._drop_after is None or ticket.model_version is None or self.version is None:
            return False
        return self.version - ticket.model_version > self._drop_after
