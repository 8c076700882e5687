"""Asking something that may hang: the answer within so many seconds, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Asked(Generic[T]):
    """A question that is asked in a thread of its own. One that is under way is not asked a second time.

    question: returns the answer or raises. within_s: seconds to wait for it.
    """

    def __init__(self, question: Callable[[], T], within_s: float) -> None:
        self._question = question
        self._within_s = within_s
        self._lock = threading.Lock()
        self._under_way: Future[T] | None = None

    def answer(self) -> T:
        """The answer to a question asked now, or still under way. Raises TimeoutError, and what the question raises."""
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = Future()
                threading.Thread(target=self._ask, args=(self._under_way,), name="asked", daemon=True).start()
            asked = self._under_way
        try:
            return asked.result(self._within_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._within_s:g} s") from None

    def _ask(self, future: Future[T]) -> None:
        try:
            future.set_result(self._question())
        except BaseException as error:
            future.set_exception(error)
