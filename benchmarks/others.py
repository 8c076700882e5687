"""The peers beside which the pipeline is measured: modules of `peers/`, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

from streamadv.trajectory.columns import KNOWN_COLUMNS

from .crew import Crew
from .lines import Line

INSTALL_S: Final = 300
#: PipelineRL's records: JSON, arrays behind a JSON header, pickled lists (its own).
PIPELINERL_FORMS: Final = ("lists", "arrays", "pickle")
TRANSFERQUEUE: Final = "0.1.11"
#: Trajectories TransferQueue puts and gets at once: the fastest of 1, 8, 64.
PUT_TOGETHER: Final = 64

_EXEC: Final = (
    "import os, sys\n"
    "os.environ.pop('PYTHONPATH', None)\n"  # that of this interpreter
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def pipelinerl_crews(url: str, line: Line) -> dict[str, Crew]:
    """PipelineRL's way in each format, not started."""
    module = ["-m", "benchmarks.peers.pipelinerl"]
    roles = ("actor", "preprocessor", "trainer")
    return {
        f"pipelinerl_{form}": Crew(
            {role: [*module, role, line.to_json(), form] for role in roles}, url, "actor"
        )
        for form in PIPELINERL_FORMS
    }


def transferqueue_crew(url: str, line: Line, python: Path) -> Crew:
    """TransferQueue in its environment, not started."""
    columns = {name: KNOWN_COLUMNS[name].name for name in line.columns}
    settings = json.dumps({"columns": columns, "tokens": line.tokens, "batch": PUT_TOGETHER})
    command = ["-c", _EXEC, str(python), str(Path(__file__).parent / "peers" / "transferqueue.py"), settings]
    return Crew({"transferqueue": command}, url, "transferqueue", ready=1)


def transferqueue_python(say: Callable[[str], None]) -> Path | None:
    """The interpreter of an environment with TransferQueue, made at the first call; None, and why, if it cannot be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "streamadv" / "transferqueue"
    python, done = folder / "bin" / "python", folder / f"installed-{TRANSFERQUEUE}"
    if done.exists():
        return python
    say(f"installing TransferQueue {TRANSFERQUEUE} into {folder}, once")
    torch = version("torch").partition("+")[0]  # the version that is here already, not a newer and larger one
    packages = [f"TransferQueue=={TRANSFERQUEUE}", f"torch=={torch}"]
    try:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", *packages],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        say(f"TransferQueue is left out, it cannot be installed: {' '.join(str(detail).split())[-200:]}")
        return None
    done.touch()
    return python
