"""What actors cost beside plain worker processes: the figures of docs/operate/ray.md.

python -m tests.integrations.ray.cost [SECONDS]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray

from streamadv.integrations.ray import start
from streamadv.store.embedded import EmbeddedServer

RUN = "cost"


def timed(what: str, call: Callable[[], object]) -> None:
    began = time.perf_counter()
    call()
    print(f"{what}: {time.perf_counter() - began:.1f} s", flush=True)


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_mib(pid: int) -> float:
    """Memory that a process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main(seconds: float) -> None:
    with EmbeddedServer() as server:
        timed("ray.init", lambda: ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False))
        made = []
        timed(
            "start, 1 grouper and 2 advantage workers", lambda: made.append(start(server.url, RUN, workers=2))
        )
        (actors,) = made
        pids = [each.pid for each in actors.health()]
        before = [processor_s(pid) for pid in pids]
        time.sleep(seconds)
        used = [(processor_s(pid) - first) / seconds for pid, first in zip(pids, before, strict=True)]
        print("an actor alone, % of a core:", *(f"{100 * share:.2f}" for share in used))
        print("an actor alone, MiB of its own:", *(f"{private_mib(pid):.0f}" for pid in pids))

        def back() -> None:
            os.kill(pids[1], signal.SIGKILL)
            while actors.health()[1].pid in (0, pids[1]):
                time.sleep(0.05)
            actors.wait_until_ready()

        timed("from the death of an actor until its worker is ready again", back)
        timed("stop", actors.stop)
        ray.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
