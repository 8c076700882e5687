"""A page as a story: its code blocks run one after the other, in an empty folder, in a process of their own.

```python              runs in one namespace for the whole page; `await` works at top level
```python title="f.py" is saved as f.py; a shell block runs it
```bash                runs with `streamadv` and `python` on the PATH; what it exports, the next one has, and what it
                       leaves in the background ends with the page
```text title="prints" is what the block before it has printed; `...` stands for anything
```text title="prints, for example" the same; another run may print other numbers
other languages        do not run
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
GIVEN: Final = Path(__file__).parent / "given"
SHELLS: Final = ("bash", "sh")
#: Languages of blocks that are read and not run. A block without a language could be meant to run.
SHOWN: Final = ("conf", "json", "text", "toml", "yaml")
PRINTS: Final = 'title="prints"'
EXAMPLE: Final = 'title="prints, for example"'
NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
FENCE: Final = re.compile(r"^( *)```(\S*) ?(.*)\n((?s:.*?))^\1```$", re.MULTILINE)
#: Where pages say that the server is. The test's server is elsewhere.
PORT: Final = "6379"
#: The run of pages that start no workers: a grouper and an advantage worker serve it.
RUN: Final = "exp1"
#: A page with one of these starts its own server or workers, or needs none.
OWN_SERVER: Final = ("streamadv server", "streamadv up")
OWN_WORKERS: Final = (*OWN_SERVER, "streamadv worker grouper", "integrations.ray", "streamadv.testing")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int  # of its first line of code
    language: str
    title: str  # title="..." of the fence, or ""
    code: str

    @property
    def first_line(self) -> str:
        return self.code.strip().partition("\n")[0]

    @property
    def runs(self) -> bool:
        return self.language in ("python", *SHELLS)


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks, in order. page: its path in the checkout."""
    text = (ROOT / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        _, language, title, code = match.groups()
        line = text[: match.start()].count("\n") + 2
        found.append(Block(line, language, title, textwrap.dedent(code)))
    return found


def run_story(page: str, left_out: Sequence[str], folder: Path, url: str, port: str) -> None:
    """Run the blocks of a page, except those that begin with a line of `left_out`; raises what a block raises."""
    os.chdir(folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    blocks = [block for block in blocks_of(page) if block.first_line not in left_out]
    if not any(words in block.code for block in blocks if block.runs for words in OWN_WORKERS):
        for target in (_group, _compute):
            threading.Thread(target=target, args=(url,), daemon=True).start()
    story = _Story(page, port)
    try:
        given = GIVEN / page.removeprefix("docs/").replace("/", "-").replace(".md", ".py")
        if given.exists():
            story.run_python(given.read_text().replace(PORT, port), str(given))
        for block in blocks:
            story.run(block)
    finally:
        story.end()


class _Story:
    def __init__(self, page: str, port: str) -> None:
        self._page = page
        self._port = port
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._loop = asyncio.new_event_loop()
        self._shells: list[subprocess.Popen[bytes]] = []
        self._printed = ""

    def run(self, block: Block) -> None:
        where = f"{self._page}:{block.line}"
        print(f"--- {where}", file=sys.stderr, flush=True)
        code = block.code.replace(PORT, self._port)
        if block.title in (PRINTS, EXAMPLE):
            expected, printed = code, self._printed
            if block.title == EXAMPLE:
                expected, printed = (NUMBER.sub("0", text) for text in (expected, printed))
            pattern = ".*".join(map(re.escape, expected.strip().split("...")))
            printed = "\n".join(line.rstrip() for line in printed.strip().split("\n"))
            assert re.fullmatch(pattern, printed, re.DOTALL), (
                f"{where}: the block before it prints\n{printed}"
            )
        elif block.language == "python" and block.title:
            Path(block.title.removeprefix('title="').rstrip('"')).write_text(code)
        elif block.language == "python":
            with redirect_stdout(io.StringIO()) as printed_here:
                self.run_python("\n" * (block.line - 1) + code, self._page)
            self._printed = printed_here.getvalue()
        elif block.language in SHELLS:
            self._run_shell(code, where)

    def run_python(self, code: str, name: str) -> None:
        compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, self._names)
        if inspect.iscoroutine(result):
            self._loop.run_until_complete(result)

    def _run_shell(self, code: str, where: str) -> None:
        output, exported = Path("../output"), Path("../exported")
        exported.touch()
        with output.open("wb") as file:
            words = ["bash", "-e", "-c", f". {exported}\n{code}\nexport -p > {exported}"]
            shell = subprocess.Popen(words, stdout=file, start_new_session=True)
        self._shells.append(shell)
        status = shell.wait()
        self._printed = output.read_text()
        print(self._printed, file=sys.stderr, flush=True)
        assert status == 0, f"{where}: exit status {status}"

    def end(self) -> None:
        """End what shells have left in the background."""
        for shell in self._shells:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)


def _group(url: str) -> None:
    from streamadv.grouping.grouper import run_grouper
    from streamadv.run import open_run
    from streamadv.store.connection import Connection

    run_grouper(open_run(Connection(url), RUN), threading.Event())


def _compute(url: str) -> None:
    from streamadv.advantage.worker import run_worker
    from streamadv.run import open_run
    from streamadv.store.connection import Connection

    run_worker(open_run(Connection(url), RUN), threading.Event(), device="cpu")


def pages() -> Iterator[str]:
    """All pages that users read, as paths in the checkout."""
    yield from ("README.md", "deploy/README.md")
    yield from (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))


def in_child(log: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Body of the process of a story: its output goes into the log, its exit status says how it ended."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads may be at work
