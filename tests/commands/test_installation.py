"""Wheel and source distribution, installed into new environments outside the checkout.

The environments are those of the oldest and the newest supported Python that this machine has, without extras, and one
of this Python that gets the extras `torch` and `demo` one after the other.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email import message_from_string
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from streamadv.grouping.groups_log import read_log
from streamadv.run import Run
from streamadv.store.connection import Connection
from tests.docs.story import SHELLS, blocks_of
from tests.support import join, ledger, problems

pytestmark = [
    *(pytest.mark.processes, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(900)),
    pytest.mark.xdist_group("installation"),  # its environments are made once
]

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 600.0
VERSIONS: Final = ("3.11", "3.12", "3.13")
PYTHONS: Final = ("oldest", "newest")

#: What the package is made of.
SUFFIXES: Final = (".py", ".lua", ".html", ".css", ".js", ".toml", ".jsonl")
#: What a source distribution has beside the package.
BESIDE: Final = (
    "pyproject.toml",
    "PKG-INFO",
    ".gitignore",
    "README.md",
    "LICENSE",
    "SECURITY.md",
    "CHANGELOG.md",
)

PRODUCER: Final = """
import streamadv as sa
with sa.Producer(sa.redis_url(), "{run}") as producer:
    for number in range(2):
        with producer.group(size=2, group_id=f"g{{number}}") as group:
            columns = {{"input_ids": [1, 2, 3], "response_mask": [0, 1, 1], "rollout_log_probs": [0.0, -1.0, -1.0]}}
            group.push([{{"rollout_index": index, "reward": float(index), **columns}} for index in range(2)])
    producer.finish()
"""
SURFACE: Final = """
import sys, importlib.util
assert not any(importlib.util.find_spec(name) for name in ("torch", "numba")), "this is no base environment"
import streamadv as sa
from streamadv.algorithms import build_chain, preset_names
sa.Producer, sa.AsyncProducer, sa.Scorer, sa.RunSettings, sa.Trajectory, sa.Ticket, sa.Connection, sa.redis_url
@sa.estimator("mine", scope="group")
def mine(batch, *, scale: float = 1.0): ...
chains = [build_chain(name) for name in preset_names()] + [build_chain({"estimator": "mine", "scale": 2.0})]
assert {chain.scope for chain in chains} == {"row", "group", "batch"}
assert "values" in build_chain("ppo").needs
print(len(chains))
"""


def runs(python: str) -> bool:
    """Whether the program can make environments: a shim may stand for a version that is not chosen."""
    words = [python, "-c", "import venv, ensurepip"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@cache
def python_of(version: str) -> str | None:
    """A Python of this version: the one that runs the tests, one on PATH, or one of pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    return next((str(python) for python in found if python is not None and runs(str(python))), None)


def python_called(which: str) -> str:
    """The oldest or the newest of the supported Pythons that are here."""
    here = [version for version in VERSIONS if python_of(version)]
    wanted = VERSIONS[0 if which == "oldest" else -1]
    if which == "newest" and len(here) == 1:
        pytest.skip(f"this machine has no other Python than {here[0]} of {', '.join(VERSIONS)}")
    version = wanted if wanted in here else here[0 if which == "oldest" else -1]
    return python_of(version) or sys.executable


@dataclass(frozen=True)
class Environment:
    """A new virtual environment, used from a folder of its own, where nothing of the checkout can be imported."""

    folder: Path

    def call(self, *words: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
        """A program of the environment. Its last words are arguments."""
        return subprocess.run(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            **{"cwd": self.folder, "capture_output": True, "text": True, "check": False},
            **{"timeout": LIMIT_S, "env": self.variables(url)},
        )

    def start(self, *words: str, url: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            **{"cwd": self.folder, "env": self.variables(url), "stderr": subprocess.PIPE, "text": True},
        )

    def output(self, *words: str, url: str | None = None) -> str:
        """What a program prints that has to succeed."""
        done = self.call(*words, url=url)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def variables(self, url: str | None) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "STREAMADV_", "VIRTUAL_"))}
        server = {} if url is None else {"STREAMADV_REDIS_URL": url}
        return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **server}

    def install(self, *words: str) -> None:
        done = self.call(
            "python", "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *words
        )
        unless_offline(done)


def unless_offline(done: subprocess.CompletedProcess[str]) -> None:
    """Skip the test where packages cannot be fetched, except in CI."""
    if (
        done.returncode
        and "No matching distribution" in done.stderr + done.stdout
        and not os.environ.get("CI")
    ):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    unless_offline(subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S))
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def new_environment(python: str, wheel: Path, folder: Path, extras: str = "") -> Environment:
    """An environment of this Python with the wheel in it."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True, capture_output=True, timeout=LIMIT_S)
    environment = Environment(folder)
    environment.install(f"{wheel}{extras}")
    return environment


@pytest.fixture(scope="module", params=PYTHONS)
def base(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    return new_environment(python_called(request.param), wheel, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def with_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("torch")
    yield new_environment(sys.executable, wheel, folder, "[torch]")
    shutil.rmtree(folder)  # more than 1 GB, which pytest would keep


@pytest.fixture(scope="module")
def with_demo(with_torch: Environment, wheel: Path) -> Environment:
    with_torch.install(f"{wheel}[demo]")
    return with_torch


def files_of(*folders: str) -> Iterator[str]:
    """What git knows in these folders: nothing else may be in a distribution, and nothing of it may be missing."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    for name in listed.stdout.splitlines():
        assert Path(name).suffix in SUFFIXES or name == "streamadv/py.typed", f"{name} would be installed"
        if (ROOT / name).exists():
            yield name


def test_the_distributions_hold_what_an_installation_needs(built: Path, wheel: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        described = message_from_string(archive.read(metadata).decode())
    assert {name for name in names if ".dist-info/" not in name} == set(files_of("streamadv", "workers"))
    assert packed == {*files_of("streamadv", "workers"), *BESIDE}
    assert {name.partition("/")[0] for name in names} == {"streamadv", "workers", metadata.partition("/")[0]}
    assert re.findall(r"^\[(.*)\]$", entry_points, re.MULTILINE) == [
        "console_scripts"
    ]  # hooks into no package
    needed = [text for text in described.get_all("Requires-Dist", []) if "extra ==" not in text]
    base = "hiredis numpy prometheus-client pydantic pydantic-settings redis rich"
    assert {re.split(r"[^\w-]", text)[0] for text in needed} == set(base.split())
    assert set(described.get_all("Provides-Extra", [])) >= {"torch", "embedded", "demo", "test", "dev"}
    supported = [f"Programming Language :: Python :: {version}" for version in VERSIONS]
    assert set(supported) <= set(described.get_all("Classifier", []))


def test_the_base_surface_needs_no_torch(base: Environment) -> None:
    assert int(base.output("python", "-c", SURFACE)) > 40
    assert "advantage chain:" in base.output("streamadv", "config", "--preset", "ppo")
    assert json.loads(base.output("streamadv", "schema"))["properties"]["group_id"]
    for command in ("demo", "server", "replay", "consume", "compute", "status", "dead", "runs", "bench"):
        assert command in base.output("streamadv", command, "--help")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["worker", "advantage"], "torch"),
        (["compute", "in.jsonl", "-o", "out.jsonl"], "torch"),
        (["consume"], "torch"),
        (["demo"], "demo"),
    ],
)
def test_a_command_names_the_extra_that_it_misses(
    base: Environment, words: Sequence[str], extra: str
) -> None:
    done = base.call("streamadv", *words)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"streamadv: error: streamadv {words[0]}")
    assert line.endswith(f": pip install 'streamadv[{extra}]'")


@pytest.mark.parametrize(
    "code",
    [
        "import streamadv as sa; sa.TrainerQueue",
        "from streamadv import MicroBatch",
        "import streamadv.padded",
        "import streamadv as sa; sa.losses",
        "from streamadv.trainer.queue import TrainerQueue",
        "from streamadv.advantage.worker import run_worker",
        "import streamadv as sa, streamadv.algorithms as a; a.pack_trajectories([sa.Trajectory(group_id='g', "
        "group_size=1, rollout_index=0, input_ids=[1, 2], response_mask=[0, 1], reward=1.0)])",
    ],
)
def test_an_import_names_the_extra_that_it_misses(base: Environment, code: str) -> None:
    done = base.call("python", "-c", code)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("streamadv.errors.MissingDependencyError: ")
    assert error.endswith(": pip install 'streamadv[torch]'")


def test_an_estimator_of_ones_own_that_needs_torch_says_so(base: Environment) -> None:
    (base.folder / "my_estimators.py").write_text("import torch\n")
    done = base.call("streamadv", "config", "--import", "my_estimators")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "--import my_estimators: cannot be imported: ModuleNotFoundError" in line
    assert "pip install 'streamadv[torch]'" in line


def test_an_entry_point_that_cannot_be_loaded_disturbs_only_who_asks_for_it(base: Environment) -> None:
    (packages,) = base.folder.glob("lib/python*/site-packages")
    (packages / "needs_torch.py").write_text("import torch\n")
    info = packages / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[streamadv.estimators]\ntheirs = needs_torch\n")
    assert base.call("streamadv", "config").stderr == ""
    done = base.call("streamadv", "config", "--preset", "theirs")
    assert done.returncode == 1
    warning, error = done.stderr.splitlines()
    assert "entry point theirs = needs_torch of package theirs cannot be loaded" in warning
    assert "pip install 'streamadv[torch]'" in warning
    assert "--import MODULE" in error


def grouped(environment: Environment, url: str, run: str) -> Run:
    """A run whose two groups a producer of the environment has pushed and a grouper of it has completed."""
    environment.output("python", "-c", PRODUCER.format(run=run), url=url)
    worker = environment.start("streamadv", "worker", "grouper", "--run", run, url=url)
    try:
        joined = join(Connection(url), run)
        pause = threading.Event()
        while len(read_log(joined, 0, "0-0", 10)) < 2:
            assert worker.poll() is None, worker.communicate()
            pause.wait(0.05)
    finally:
        worker.terminate()
        _, log = worker.communicate(timeout=240)
    assert worker.returncode == 0, log
    return joined


def test_a_base_installation_produces_groups_and_looks_after_runs(
    base: Environment, redis_url: str, run: str
) -> None:
    joined = grouped(base, redis_url, run)
    lines = [
        {"group_id": "r", "group_size": 2, "rollout_index": index, "reward": 1.0, "input_ids": [1, 2]}
        for index in range(2)
    ]
    text = "".join(json.dumps({**line, "response_mask": [0, 1]}) + "\n" for line in lines)
    (base.folder / "recorded.jsonl").write_text(text)
    named = ("--run", run)
    assert "2" in base.output("streamadv", "replay", "recorded.jsonl", *named, url=redis_url)
    status = json.loads(base.output("streamadv", "status", "--json", "--check", *named, url=redis_url))
    assert (status["ledger"]["pushed"], status["balanced"]) == (6, True)
    assert run in base.output("streamadv", "runs", "list", url=redis_url)
    assert "redundancy" in base.output("streamadv", "runs", "show", *named, url=redis_url)
    base.output("streamadv", "runs", "create", "--run", f"{run}-2", "--batch-groups", "4", url=redis_url)
    base.output("streamadv", "dead", "list", *named, url=redis_url)
    assert problems(joined) == []


def test_with_torch_everything_computes(with_torch: Environment, redis_url: str, run: str) -> None:
    joined = grouped(with_torch, redis_url, run)
    named = ("--run", run)
    worker = with_torch.start("streamadv", "worker", "advantage", "--device", "cpu", *named, url=redis_url)
    try:
        with_torch.output(
            "streamadv", "consume", "-o", "out.jsonl", "--timeout", "240", *named, url=redis_url
        )
    finally:
        worker.terminate()
        _, log = worker.communicate(timeout=240)
    assert worker.returncode == 0, log
    assert ledger(joined)["trained"] == 4
    with_torch.output("streamadv", "compute", "out.jsonl", "-o", "again.jsonl")
    for name in ("out.jsonl", "again.jsonl"):
        written: list[dict[str, Any]] = list(
            map(json.loads, (with_torch.folder / name).read_text().splitlines())
        )
        advantages = {line["rollout_index"]: line["advantages"][1] for line in written}
        assert advantages[0] == pytest.approx(-advantages[1])
        assert advantages[1] > 0.5
    with_torch.output("python", "-c", "import streamadv.padded; from streamadv import TrainerQueue, losses")


def test_the_demo_runs_from_the_wheel(with_demo: Environment) -> None:
    words = ("--maps", "random", "--updates", "1", "--no-kill", "--json", "demo.json")
    with_demo.output("streamadv", "demo", *words)
    assert json.loads((with_demo.folder / "demo.json").read_text())["balanced"] is True


@pytest.mark.skipif(not os.environ.get("STREAMADV_RELEASE_CHECK"), reason="`make release-check` runs it")
def test_the_program_of_the_readme_runs_from_the_wheel(with_demo: Environment) -> None:
    folder = with_demo.folder / "readme"
    folder.mkdir()
    for block in blocks_of("README.md"):
        if block.language == "python":
            (folder / block.title.removeprefix('title="').rstrip('"')).write_text(block.code)
    (command,) = (
        block.code
        for block in blocks_of("README.md")
        if block.language in SHELLS and block.first_line.startswith("streamadv up")
    )
    path = f"{with_demo.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        **{"cwd": folder, "capture_output": True, "text": True, "check": False, "timeout": LIMIT_S},
        env={**with_demo.variables(None), "PATH": path},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "trainer | version 20: " in done.stdout
    assert (folder / "checkpoints" / "20" / "logits.pt").exists()


@pytest.mark.skipif(not os.environ.get("STREAMADV_RELEASE_CHECK"), reason="`make release-check` runs it")
def test_the_example_is_written_from_the_wheel(with_demo: Environment) -> None:
    printed = with_demo.output("streamadv", "up", "--example", "tool_use")
    assert all((with_demo.folder / name).exists() for name in printed.split())
    assert "tool_use/trainer.py" in printed
