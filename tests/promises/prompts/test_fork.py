"""A stream that was read before the process forked."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# In a process of its own: nothing else runs in it while it forks.
FORKS = textwrap.dedent("""
    import multiprocessing, sys
    import streamadv as sa

    COUNT = 5000

    class Lines:
        def __iter__(self):
            with open(sys.argv[1]) as lines:
                yield from map(str.strip, lines)

    prompts = sa.Prompts(sa.Stream(Lines(), COUNT), shuffle=None)
    context = multiprocessing.get_context("fork")
    found = context.Queue()

    def read_every_second(first):
        found.put([prompts.item(1, index) for index in range(first, COUNT, 2)])

    for first in range(2):
        process = context.Process(target=read_every_second, args=(first,))
        process.start()
        assert found.get(timeout=30) == [f"question {number}" for number in range(first, COUNT, 2)]
        process.join()
""")


@pytest.mark.processes
def test_processes_that_were_forked_read_a_stream_each_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {number}\n" for number in range(5000)))
    child = subprocess.run([sys.executable, "-c", FORKS, path], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
