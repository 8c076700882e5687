"""TransferQueue (PyPI: TransferQueue) on the trajectories of `streamadv bench pipeline`.

Runs in an environment of its own, so it imports nothing of streamadv: `python transferqueue.py SETTINGS`, a JSON
object of `columns` (name to dtype), `tokens` and `batch`. Lines of stdin: `inf` puts and gets batches of `batch`
trajectories, a Ray actor putting the next ones while this process gets and clears; `one` puts single trajectories;
`0` waits. Lines of stdout: `ready`, and `received` with how many came through and when.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # or Ray reports its use to its makers

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

PARTITION = "bench"
AHEAD = 2  # batches being put while one is got
REPORT_S = 0.25


def make_batch(settings: dict[str, Any], count: int) -> TensorDict:
    shape = (count, settings["tokens"])
    columns = {
        name: torch.randint(0, 2, shape, dtype=getattr(torch, dtype))
        if dtype.startswith(("int", "uint"))
        else torch.rand(shape, dtype=getattr(torch, dtype))
        for name, dtype in settings["columns"].items()
    }
    return TensorDict(columns, batch_size=count)


@ray.remote(num_cpus=0)
class Writer:
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        tq.init()
        self._batch = make_batch(settings, settings["batch"])

    def put(self, number: int) -> list[str]:
        keys = [f"{number}:{index}" for index in range(len(self._batch))]
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=self._batch)
        return keys


class Order:
    """The last line of stdin."""

    def __init__(self) -> None:
        self.text = "0"
        self.changed = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for text in sys.stdin:
            self.text = text.strip()
            self.changed.set()
        os.kill(os.getpid(), signal.SIGTERM)


def send(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main(settings: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves by the finally, which ends Ray's processes
    torch.set_num_threads(1)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        tq.init()
        writer = Writer.remote(settings)  # type: ignore[attr-defined]
        single = {name: column[0] for name, column in make_batch(settings, 1).items()}
        pending: list[Any] = []
        order, number, count, due = Order(), 0, 0, 0.0
        send("ready")
        while True:
            if order.text == "one":
                tq.kv_put(key=f"one:{number}", partition_id=PARTITION, fields=single)
                tq.kv_clear(keys=f"one:{number}", partition_id=PARTITION)
                number, count = number + 1, count + 1
            elif order.text == "inf" or pending:
                while order.text == "inf" and len(pending) <= AHEAD:
                    pending.append(writer.put.remote(number))
                    number += 1
                keys = ray.get(pending.pop(0))
                tq.kv_batch_get(keys=keys, partition_id=PARTITION)
                tq.kv_clear(keys=keys, partition_id=PARTITION)
                count += len(keys)
            else:
                order.changed.clear()
                if order.text == "0":
                    order.changed.wait()
                continue
            if time.monotonic() > due:
                send("received", at=time.monotonic(), count=count)
                count, due = 0, time.monotonic() + REPORT_S
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
