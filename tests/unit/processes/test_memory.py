"""Freed memory stays with the process, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from streamadv.processes.memory import keep_freed_memory

def faults(size=4 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this")
@pytest.mark.processes
def test_large_buffers_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 10
