"""PipelineRL's way, from its description: one record a group, XADD and XREAD COUNT 1, two hops.

`python -m benchmarks.peers.pipelinerl actor | preprocessor | trainer LINE FORMAT`. The actor adds a group's record to
one stream, the preprocessor reads it, takes it apart, puts it together again and adds it to the next, the trainer reads
that. No consumer groups, no acknowledgements; positions live in memory. The actor stops when too many groups are under
way, as the trainer's own stream of processed ones tells it. FORMAT: `pickle` (its own: lists of numbers, pickled),
`lists` (the same as JSON) or `arrays` (a JSON header and raw arrays behind each other in one field).
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import sys
import time
from typing import Any

import numpy as np
import redis

from streamadv.processes import messages

from ..lines import GROUP_SIZE, Line, make_groups
from ..pace import Pace

Record = list[dict[str, Any]]

MAX_AHEAD = 16  # groups under way; fewer of long trajectories, so that it runs dry in a second or two
MAX_ENTRIES = 2 * MAX_AHEAD  # of a stream; theirs is a million, which no run of minutes reaches
REPORT_S = 0.25


def encode_lists(record: Record) -> bytes:
    return json.dumps(as_lists(record)).encode()


def decode_lists(data: bytes) -> Record:
    record: Record = json.loads(data)
    return record


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts, lists and mappings alone: the server of a benchmark may hold what others have written."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


def encode_pickle(record: Record) -> bytes:
    return pickle.dumps(record)


def decode_pickle(data: bytes) -> Record:
    record: Record = PlainUnpickler(io.BytesIO(data)).load()
    return record


def as_lists(record: Record) -> Record:
    """What it has in memory, so that making lists of arrays is not measured."""
    return [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in each.items()}
        for each in record
    ]


def encode_arrays(record: Record) -> bytes:
    header: list[dict[str, Any]] = []
    parts = []
    for each in record:
        described: dict[str, Any] = {}
        for name, value in each.items():
            if isinstance(value, np.ndarray):
                described[name] = [value.dtype.str, len(value)]
                parts.append(value.data)
            else:
                described[name] = value
        header.append(described)
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *parts])


def decode_arrays(data: bytes) -> Record:
    position = 4 + int.from_bytes(data[:4], "little")
    record: Record = []
    for described in json.loads(data[4:position]):
        each = {}
        for name, value in described.items():
            if isinstance(value, list):
                dtype, length = np.dtype(value[0]), value[1]
                each[name] = np.frombuffer(data, dtype, length, position)
                position += length * dtype.itemsize
            else:
                each[name] = value
        record.append(each)
    return record


FORMS = {
    "lists": (encode_lists, decode_lists),
    "arrays": (encode_arrays, decode_arrays),
    "pickle": (encode_pickle, decode_pickle),
}


def act(client: Any, prefix: str, line: Line, encode: Any, decode: Any) -> None:
    groups = make_groups(line)
    pool = itertools.cycle([as_lists(group) for group in groups] if encode is encode_pickle else groups)
    pace = Pace()
    ahead = max(4, min(MAX_AHEAD, (1 << 19) // (GROUP_SIZE * line.tokens)))
    done, last = 0, "0"
    messages.send("ready")
    for number in itertools.count():
        pace.wait_for_turn()
        while number - done >= ahead:
            for _, entries in client.xread({f"{prefix}processed": last}, count=64, block=1000):
                last = entries[-1][0]
                done += len(entries)
        client.xadd(f"{prefix}actor", {"data": encode(next(pool))}, maxlen=MAX_ENTRIES, approximate=False)


def preprocess(client: Any, prefix: str, line: Line, encode: Any, decode: Any) -> None:
    for data in follow(client, f"{prefix}actor"):
        record = encode(decode(data))
        client.xadd(f"{prefix}training", {"data": record}, maxlen=MAX_ENTRIES, approximate=False)


def train(client: Any, prefix: str, line: Line, encode: Any, decode: Any) -> None:
    messages.send("ready")
    count, due = 0, 0.0
    for data in follow(client, f"{prefix}training"):
        count += len(decode(data))
        client.xadd(f"{prefix}processed", {"samples": GROUP_SIZE}, maxlen=1000)
        if time.monotonic() > due:
            messages.send("received", at=time.monotonic(), count=count)
            count, due = 0, time.monotonic() + REPORT_S


def follow(client: Any, stream: str) -> Any:
    """One entry after the other, from the beginning."""
    last = "0"
    while True:
        for _, entries in client.xread({stream: last}, count=1, block=1000):
            last, fields = entries[0]
            yield fields[b"data"]


def main(role: str, text: str, form: str) -> None:
    line = Line.from_json(text)
    client = redis.Redis.from_url(os.environ["STREAMADV_REDIS_URL"], protocol=2, socket_timeout=None)
    encode, decode = FORMS[form]
    work = {"actor": act, "preprocessor": preprocess, "trainer": train}[role]
    work(client, f"streamadv-bench:{line.run}:{form}:", line, encode, decode)


if __name__ == "__main__":
    main(*sys.argv[1:])
