"""Child processes: what they say is heard, and they end when they are told to, or with their supervisor."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest

from benchmarks.children import Message
from streamadv.processes import messages
from tests.children import SEND, child

pytestmark = pytest.mark.processes


def test_messages_survive_foreign_lines() -> None:
    for text in ("hello", "3", "[1]", '{"no": "kind"}', ""):
        assert messages.parse(text) is None
    assert messages.parse('{"kind": "ready"}') == {"kind": "ready"}


def test_being_told_to_end_twice_is_being_told_once(tmp_path: Path) -> None:
    counts = "told = []\nsignal.signal(signal.SIGTERM, lambda *_: told.append(1))\nsend('ready')\n"
    inbox: SimpleQueue[Message] = SimpleQueue()
    patient = child(
        "patient", counts + "sys.stdin.readline()\nsend('told', times=len(told))\n", tmp_path, inbox
    )
    patient.start()
    assert inbox.get(timeout=20)[1]["kind"] == "ready"
    patient.terminate()
    patient.terminate()
    patient.ask("go on")
    assert inbox.get(timeout=20)[1] == {"kind": "told", "times": 1}
    patient.stop()


def test_messages_and_other_output_are_told_apart(tmp_path: Path) -> None:
    inbox: SimpleQueue[Message] = SimpleQueue()
    talker = child("talker", "print('hello', flush=True)\nsend('ready')\nsys.exit(2)", tmp_path, inbox)
    talker.start()
    assert inbox.get(timeout=20) == ("talker", {"kind": "ready"})
    talker.stop()
    assert not talker.running
    assert talker.log_tail() == "hello"


@pytest.mark.skipif(sys.platform != "linux", reason="children end with a killed supervisor on Linux only")
def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    stubborn = SEND + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsend('ready')\nsignal.pause()"
    log = str(tmp_path / "log")
    code = (
        "import os, pathlib, queue, signal\n"
        "from benchmarks.children import Child\n"
        f"inbox, command, log = queue.SimpleQueue(), ['-c', {stubborn!r}], pathlib.Path({log!r})\n"
        "child = Child('child', command, environment=dict(os.environ), log=log, inbox=inbox)\n"
        "child.start()\n"
        "inbox.get(timeout=20)\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = os.pidfd_open(pid)
        parent.kill()
    ended, _, _ = select.select([watch], [], [], 20)
    os.close(watch)
    assert ended
