"""What a world gives instead of threading's events, locks and threads, and of queues: waiting in it hands over."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any

from .strands import Scheduler, Strand


class Bell:
    """Wakes those who wait for something to change; they look again."""

    def __init__(self, world: Scheduler) -> None:
        self.world = world
        self._waiters: list[tuple[Strand, int]] = []  # with the token of the wait

    def _at_fork_reinit(self) -> None:
        """Nobody forks in a world."""

    def ring(self) -> None:
        """Wake everybody who waits."""
        waiters, self._waiters = self._waiters, []
        for strand, token in waiters:
            self.world.wake(strand, token=token)

    def wait_until(self, holds: Callable[[], Any], timeout: float | None = None) -> Any:
        """What `holds` returns once it is true, or when the time is over."""
        world = self.world
        world.check()
        until = math.inf if timeout is None else world.time + timeout
        while not (result := holds()) and world.time < until and world.current is not None:
            waiter = (world.current, world.current.token)
            self._waiters.append(waiter)
            world.park(until)
            if waiter in self._waiters:  # its time is over
                self._waiters.remove(waiter)
        return result


class Event(Bell):
    """As threading.Event."""

    _is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self.ring()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self.wait_until(self.is_set, timeout))


class RLock(Bell):
    """As threading.RLock."""

    _owner: Strand | None = None
    _count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        patience = (None if timeout < 0 else timeout) if blocking else 0.0
        if not self.wait_until(lambda: self._owner in (None, self.world.current), patience):
            return False
        self._owner = self.world.current
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self.ring()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        if self._owner is self.world.current:  # not who was killed while it waited here
            self.release()


class Queue(Bell):
    """As queue.Queue and queue.SimpleQueue."""

    def __init__(self, world: Scheduler, maxsize: int = 0) -> None:
        super().__init__(world)
        self._items: list[Any] = []
        self._maxsize = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        has_room = self.wait_until(
            lambda: not self._maxsize or len(self._items) < self._maxsize, timeout if block else 0.0
        )
        if not has_room:
            raise queue.Full
        self._items.append(item)
        self.ring()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.wait_until(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        item = self._items.pop(0)
        self.ring()
        return item


class Thread:
    """As threading.Thread."""

    def __init__(
        self,
        world: Scheduler,
        *,
        target: Callable[..., object],
        args: Any = (),
        name: str | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._bell = Bell(world)
        self._body = lambda: target(*args)
        self.name = (name or "thread").removeprefix("streamadv-")
        self._strand: Strand | None = None

    def start(self) -> None:
        world = self._bell.world
        world.check()
        self._strand = world.spawn(world.process, self.name, self._body)
        self._strand.at_end = self._bell.ring

    @property
    def ident(self) -> int | None:
        return None if self._strand is None else self._strand.runner.thread.ident

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.ended

    def join(self, timeout: float | None = None) -> None:
        self._bell.wait_until(lambda: not self.is_alive(), timeout)
