"""Running a user's program: it ends on a signal as it should, with one line instead of a traceback."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final, NoReturn

from .errors import StreamadvError
from .logs import announce

FAILED: Final = 1


def run_program(main: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Run `main(*args, **kwargs)` as the whole program, in asyncio if it is a coroutine function; then exit.

    Ctrl-C and SIGTERM unwind `main`: a coroutine function is cancelled, another one gets KeyboardInterrupt. Blocks like
    `with sa.Producer(...)` are left, which cancels their open rollouts and takes the producer off the run's list. Then
    the process ends with one line on stderr and status 130 (SIGTERM: 143). A second Ctrl-C does not wait for the
    blocks. An error of streamadv ends it with one line and status 1; any other exception is raised.

    Call it from the main thread.
    """
    received: list[int] = []

    def terminate(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        if inspect.iscoroutinefunction(main):
            asyncio.run(_until_terminated(main(*args, **kwargs), received))
        else:
            main(*args, **kwargs)
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and not received:
            raise
        number = signal.Signals(received[0] if received else signal.SIGINT)
        announce(f"ended by {number.name}", "ended")
        sys.exit(128 + number)
    except StreamadvError as error:
        announce(" ".join(str(error).split()), "program_failed", who="error", level=logging.ERROR)
        sys.exit(FAILED)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(0)


async def _until_terminated(work: Coroutine[Any, Any, Any], received: list[int]) -> None:
    """Await `work`; SIGTERM cancels it, as asyncio does on SIGINT."""
    task = asyncio.current_task()
    assert task is not None

    def terminate() -> None:
        received.append(signal.SIGTERM)
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    await work
