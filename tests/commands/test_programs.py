"""`run_program`: a user's program ends on Ctrl-C and SIGTERM with one line, and takes leave of its run."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from streamadv.status import read_status
from tests.support import group_all, join, ledger

pytestmark = [pytest.mark.processes, pytest.mark.server]

START = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
ASYNCIO = """
    import asyncio, sys, streamadv as sa

    async def play(rollout):
        sys.stdout.write("playing\\n"); sys.stdout.flush()
        await asyncio.Event().wait()

    async def main(url, run):
        async with sa.Producer(url, run=run) as producer, producer.group(size=4) as group:
            await group.run(play)

    sa.run_program(main, *sys.argv[1:])
"""
BLOCKING = """
    import sys, threading, streamadv as sa

    def play(rollout):
        sys.stdout.write("playing\\n"); sys.stdout.flush()
        threading.Event().wait()

    def main(url, run):
        with sa.Producer(url, run=run) as producer, producer.group(size=4) as group:
            group.run(play)

    sa.run_program(main, *sys.argv[1:])
"""
WAITING = """
    import sys, streamadv as sa

    def main(url, run):
        settings = sa.RunSettings(max_bytes=1_200_000, max_trajectory_bytes=300_000)
        with sa.Producer(url, run=run, settings=settings) as producer:
            producer.begin_group(4)
            sys.stdout.write("playing\\n"); sys.stdout.flush()
            producer.begin_group(4)

    sa.run_program(main, *sys.argv[1:])
"""


def program(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START + textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (signal.SIGINT, 130, ASYNCIO),
        pytest.param(signal.SIGTERM, 143, ASYNCIO, marks=pytest.mark.release),
        pytest.param(signal.SIGINT, 130, BLOCKING, marks=pytest.mark.release),
        (signal.SIGTERM, 143, BLOCKING),
        pytest.param(signal.SIGINT, 130, WAITING, marks=pytest.mark.release),
        (signal.SIGTERM, 143, WAITING),
    ],
    ids=[f"{code}-{name}" for code in ("asyncio", "blocking", "waiting") for name in ("SIGINT", "SIGTERM")],
)
def test_a_signal_ends_it_with_one_line(
    redis_url: str, run: str, number: signal.Signals, status: int, code: str
) -> None:
    process = program(code, redis_url, run)
    assert process.stdout is not None
    assert process.stdout.readline() == "playing\n"
    process.send_signal(number)
    _, log = process.communicate(timeout=240)
    assert process.returncode == status, log
    lines = [line for line in log.splitlines() if "has no trainer yet" not in line]
    assert lines == [f"ended by {number.name}"]
    joined = join(redis_url, run)
    assert read_status(joined).producers == []
    if code != WAITING:
        group_all(joined)
        assert ledger(joined)["dropped"] == {"cancelled": 4}


def test_an_interrupt_shows_no_frames_of_the_client(redis_url: str, run: str) -> None:
    process = program(WAITING.replace("sa.run_program(main,", "main("), redis_url, run)
    assert process.stdout is not None
    assert process.stdout.readline() == "playing\n"
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=240)
    lines = [line for line in log.splitlines() if "has no trainer yet" not in line]
    assert lines[-1] == "KeyboardInterrupt"
    assert len(lines) < 20, log
    assert "redis/" not in log


def test_an_error_of_streamadv_is_one_line_and_others_are_raised(run: str) -> None:
    code = "import sys, streamadv as sa\ndef main(u, r): {}\nsa.run_program(main, *sys.argv[1:])"
    for body, end in (
        ("sa.Producer('http://x', run=r)", "error: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ):
        process = program(code.format(body), "", run)
        _, log = process.communicate(timeout=240)
        assert process.returncode == 1
        assert log.splitlines()[-1].startswith(end)
        assert ("Traceback" in log) == (body == "1 / 0")
    process = program(code.format("print(7)"), "", run)
    out, log = process.communicate(timeout=240)
    assert (process.returncode, out, log) == (0, "7\n", "")
