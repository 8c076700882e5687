"""What blocking and asyncio producers share: how a group is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from .checks import GroupRequest

GroupT = TypeVar("GroupT")


class BaseProducer(Generic[GroupT]):
    """What the two kinds of producer share. GroupT: what beginning a group returns."""

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

        Raises:
            Busy: not admitted within `timeout`.
            GroupEndedError: `group_id` names a group that has ended.
            TrajectoryError, SettingError: a wrong argument, or a group larger than the run's whole byte budget.
        """
        return self._begin(
            GroupRequest(
                size=size,
                group_id=group_id,
                data_source=data_source,
                metadata=metadata,
                deadline_s=deadline_s,
                redundancy=redundancy,
                timeout=timeout,
            )
        )

    #: `begin_group` for use in a with block: on leaving it, rollouts not pushed are failed.
    group = begin_group

    @abstractmethod
    def _begin(self, request: GroupRequest) -> GroupT: ...
