"""The shared part of blocking and asyncio producers: how a caller asks for a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from ..errors import SettingError
from ..messages import brief
from ..prompts.prompts import Prompts
from .admission import Ahead
from .logic import ProducerLogic
from .membership import Weights
from .prompted import PromptedGroups
from .tickets import GroupRequest

GroupT = TypeVar("GroupT")
GroupsT = TypeVar("GroupsT")
PromptedT = TypeVar("PromptedT")


class BaseProducer(Generic[GroupT, GroupsT, PromptedT]):
    """What the two kinds of producer share. GroupT, GroupsT, PromptedT: what its ways to begin groups return."""

    _logic: ProducerLogic

    def __repr__(self) -> str:
        member = self._logic.membership
        state = "closed" if member.closed else "finished" if member.finished else "open"
        if not member.is_joined and state == "open":
            state = "not connected"
        return f"{type(self).__name__}(run={member.run!r}, name={member.name!r}, version={member.version}, {state})"

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._logic.membership.run

    def begin_group(
        self,
        size: int,
        *,
        group_id: str | None = None,
        data_source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,
        role: str = "train",
        round: str | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> GroupT:
        """Admit a group of `size` rollouts of one prompt, and get its tickets.

        Waits while the run is at its byte budget or as far ahead as max_staleness allows. An open `group_id` gives its
        tickets again.

        Args:
            size: usable rollouts that make the group complete, 1 to 4096.
            group_id: unique in the run, at most 200 characters without spaces; default a UUIDv7.
            data_source: name of the data set, for metrics; at most 200 characters.
            metadata: a small JSON object that all rollouts of the group carry; at most 64 KiB.
            deadline_s: seconds from now after which the group ends with what it has; default the run's
                group_deadline_s.
            redundancy: rollouts beyond `size`; the first `size` usable ones count. Default the run's.
            timeout: seconds to wait for admission; None = for ever, 0 = ask once.
            role: train, or eval: its rollouts measure a policy version and are never trained on. Evaluation groups
                count in the byte budget and not in pacing; `streamadv evals` has what they show.
            round: of role eval: the name of the round that the group is part of, such as "step-100", at most 200
                characters without spaces. What a round shows stays together, whatever versions its groups were played
                with; without a name it is split by version.
            columns: extra columns that all rollouts of the group share, such as the images of its prompt: name -> array
                of any shape. They are stored once, and delivered as `mb.extras[name]` for each row of the group that
                was pushed without a column of this name. At most max_trajectory_bytes together.

        Raises:
            Busy: not admitted within `timeout`.
            GroupEndedError: `group_id` names a group that has ended.
            RunEndedError: the trainer has ended the run. Evaluation groups are admitted nevertheless.
            TrajectoryError, SettingError: a wrong argument, or a group larger than the run's whole byte budget.
        """
        return self._begin(
            GroupRequest(
                size, group_id, data_source, metadata, deadline_s, redundancy, timeout, role, round, columns
            )
        )

    #: `begin_group` for use in a with block: on leaving it, rollouts not pushed are failed.
    group = begin_group

    def groups(
        self,
        size: int,
        *,
        data_source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,
        role: str = "train",
        round: str | None = None,
        ahead: int = 0,
    ) -> GroupsT:
        """Groups until the trainer ends the run, each begun as by `begin_group` when the iterator is asked for it.

        A group that was begun ahead and not asked for is withdrawn with the next heartbeat at the latest, once the
        iterator is closed or forgotten.

        Args:
            ahead: groups begun before they are asked for, at most 63: one call begins 1 + `ahead`, as many as are
                admitted, and the next one follows when all are taken. For loops that play several groups at once, or
                very short ones: a group has its deadline, and counts in pacing, from its beginning on.

        The other arguments, and what a step raises, are those of `begin_group`.
        """
        request = GroupRequest(
            size, None, data_source, metadata, deadline_s, redundancy, timeout, role, round
        )
        return self._groups(Ahead(self._logic.admission, request, ahead))

    def prompts(
        self,
        prompts: Prompts,
        size: int = 8,
        *,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,
    ) -> PromptedT:
        """Pairs of a prompt and its group, until each prompt has ended in each epoch, and with them the run.

        A prompt ends once the trainer has committed its group, a filter (zero variance, difficulty) has dropped it, or
        it is given up: its group ended otherwise, and `retries` more did too. Until then it is played again, by any
        producer of the run that iterates; what a producer leased that dies is there for the others after 30 s. So the
        iterator waits at the end until the trainer has saved its last checkpoint. All producers give the same prompts.

        The group has the id `prompt:<name>:<source>:<epoch>:<index>:<try>`, the source as `data_source`, and `prompt`
        (its index) and `epoch` in its metadata. Arguments and errors are those of `begin_group`; SettingError is also
        raised for prompts that are not those of the run, and for metadata with `prompt` or `epoch`.
        """
        if not isinstance(prompts, Prompts):
            raise SettingError(f"prompts is {brief(prompts)}, needs streamadv.Prompts(...)")
        if isinstance(metadata, Mapping) and (taken := {"prompt", "epoch"} & metadata.keys()):
            raise SettingError(
                f"metadata has {brief(min(taken))}: the prompt's own stands there, use another name"
            )
        request = GroupRequest(size, None, None, metadata, deadline_s, redundancy, timeout)
        return self._prompts(PromptedGroups(self._logic, prompts, request))

    @property
    def weights(self) -> Weights | None:
        """Where the newest weights lie, if the trainer says so: `queue.trained(batch, weights=URI)`; else None.

        Asks nobody: it is as new as the group begun last, or else as the last heartbeat (10 s at most).
        """
        return self._logic.membership.weights

    @abstractmethod
    def _begin(self, request: GroupRequest) -> GroupT: ...

    @abstractmethod
    def _prompts(self, prompted: PromptedGroups) -> PromptedT: ...

    @abstractmethod
    def _groups(self, ahead: Ahead) -> GroupsT: ...
