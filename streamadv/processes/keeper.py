"""Runs one command in a process group of its own, and ends that whole group with itself or its parent.

A program, run by its path with `python -I -S` and the arguments PARENT GRACE COMMAND...: the process id of the
parent, and the seconds between asking the group to end and killing it. It passes signals on to the group. The exit
status is the command's, or 128 plus the number of the signal that ended it. To start at once, it imports nothing of
the package.
"""

import contextlib
import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # prctl, on Linux only: elsewhere a command outlives a parent that was killed


def main(parent: int, grace: float, command: list[str]) -> int:
    """Run the command; returns the exit status."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until it is known whom to pass them on to
    _end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        _end_with_parent(signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        for number in (*signals, signal.SIGPIPE):  # this interpreter, or a shell, may have them ignored
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            instead = f": write `python {command[0]}`" if command[0].endswith(".py") else ""
            print(f"{command[0]}: {error.strerror}{instead}", file=sys.stderr, flush=True)
            os._exit(127)

    def kill_group(_number: int, _frame: object) -> None:
        _to_group(child, signal.SIGKILL)

    def pass_on(number: int, _frame: object) -> None:
        _to_group(child, number)
        signal.setitimer(signal.ITIMER_REAL, grace)

    signal.signal(signal.SIGALRM, kill_group)
    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # what it has left behind; its own id is not given away before the next line
    _to_group(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def _end_with_parent(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(number))


def _to_group(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except (ProcessLookupError, PermissionError):  # the group is not made yet, or has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
