"""Child processes of a few lines, for tests: `send` and what they need is there."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue

from streamadv.processes.children import Child, Message

SEND = "import json, signal, sys\ndef send(kind, **f): print(json.dumps(dict(f, kind=kind)), flush=True)\n"


def child(name: str, code: str, directory: Path, inbox: SimpleQueue[Message]) -> Child:
    environment = dict(os.environ)
    log = directory / f"{name}.log"
    return Child(name, ["-c", SEND + code], environment=environment, log=log, inbox=inbox)
