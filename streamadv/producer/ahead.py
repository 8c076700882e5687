"""Groups of `Producer.groups`: several are begun in one call, and handed out one by one."""

from __future__ import annotations

from collections import deque
from typing import Final

from ..errors import SettingError
from ..messages import brief
from .admission import Admission, BeginCall
from .checks import GroupRequest
from .requests import Steps
from .tickets import Ticket

MAX_AHEAD: Final = 63


class Ahead:
    """The groups of one iterator that are begun and not asked for."""

    def __init__(self, admission: Admission, request: GroupRequest, ahead: int) -> None:
        """Raises SettingError for what is no `ahead`."""
        if not isinstance(ahead, int) or not 0 <= ahead <= MAX_AHEAD:
            raise SettingError(f"ahead is {brief(ahead)}, needs 0..{MAX_AHEAD}")
        self._admission, self._request, self._ahead = admission, request, ahead
        self._call = BeginCall()
        self._tickets: deque[Ticket] = deque()
        admission.ahead.add(self)

    def begin(self) -> Steps[Ticket]:
        """The first ticket of the next group: at once if it is begun already, else as `Admission.begin`."""
        if not self._tickets:
            self._call = BeginCall()
            self._tickets += yield from self._admission.begin(self._request, self._call, 1 + self._ahead)
        return self._tickets.popleft()

    def forget(self) -> None:
        """They are those of the process that this one is a copy of."""
        self._tickets.clear()

    def leave(self) -> None:
        """Nobody will ask for them: `withdraw` undoes them."""
        while self._tickets:
            self._admission.leave_unclaimed(self._call, self._tickets.pop().group_id)
