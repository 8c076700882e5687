"""Every Python and shell block of README and docs runs, as the story of its page."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
import yaml

from streamadv.store.embedded import free_port

from .story import OWN_SERVER, ROOT, SHELLS, SHOWN, blocks_of, in_child, pages, run_story

INSTALLED: Final = "the tests run in an environment that has it"
INSTALL: Final = "pip install 'streamadv[torch,embedded]'"
TRANSFORMERS: Final = "import transformers"
GATEWAY_RUN: Final = (
    "streamadv gateway run --gateway http://127.0.0.1:8200 --size 8 --groups 100 --timeout-s 1800 "
    "-- python solve.py"
)
#: Blocks that do not run, by page and first line, with the reason.
NOT_RUN: Final[dict[str, dict[str, str]]] = {
    "README.md": {
        INSTALL: INSTALLED,
        "make demo     # a policy learns FrozenLake through the whole pipeline while its workers are killed": "CI runs "
        "make test, and tests/commands/test_demo.py the demo",
    },
    "docs/start/install.md": {"pip install streamadv": "tests of installations do it with the built wheel"},
    "docs/start/tutorial.md": {"pip install 'streamadv[torch,embedded,view]'": "the same"},
    "docs/start/project.md": {
        "cd tool_use && streamadv up": "tests/commands/test_project.py runs and kills it"
    },
    "docs/operate/view.md": {
        "pip install 'streamadv[view]'": "it serves until Ctrl-C; tests/commands/test_view.py"
    },
    "docs/start/demo.md": {
        'make demo ARGS="--metrics-port 9101"': "needs a Prometheus; tests/unit/demo compares its file with the ports"
    },
    "deploy/README.md": {"docker build --file deploy/Dockerfile --tag streamadv:0.3.0 .": "needs Docker"},
    "docs/produce/any-agent.md": {
        "pip install 'streamadv[gateway]'": "needs engines; tests/gateway plays with the same commands",
        GATEWAY_RUN: "needs the gateway of the block before",
    },
    "docs/operate/server.md": {
        "sh secrets.sh exp1        # once: passwords and users of run exp1, in secrets/": "needs Docker",
        "export STREAMADV_REDIS_URL=redis://streamadv-producer@127.0.0.1:6379/0 STREAMADV_RUN=exp1 \\": "the same",
        "docker compose --profile core run --rm grouper runs create --max-bytes 1gb": "the same",
        "helm upgrade --install exp1 deploy/helm/streamadv --namespace rl --values values.yaml": "needs a cluster",
        "sh deploy/secrets.sh exp1        # passwords, and users.acl with a user for each role": "the same",
        "kubectl -n rl exec deploy/exp1-streamadv-grouper -- streamadv status": "the same",
    },
}
if find_spec("transformers") is None:
    NOT_RUN["docs/produce/engines.md"] = {TRANSFORMERS: "needs pip install 'streamadv[examples]'"}
for extras, folder in (("ray", "operate"), ("trl,embedded", "train"), ("verifiers", "produce")):
    package = extras.partition(",")[0]
    page = f"docs/{folder}/{package}.md"
    if find_spec(package) is None:
        reason = f"`make test-integrations` runs it, in an environment that has {package}"
        NOT_RUN[page] = {block.first_line: reason for block in blocks_of(page) if block.runs}
    else:
        NOT_RUN[page] = {f"pip install 'streamadv[{extras}]'": INSTALLED}
NOT_RUN["docs/train/verl.md"] = {
    "pip install 'streamadv[verl]'": INSTALLED,
    "python3 -m verl.trainer.main_ppo \\": "needs GPUs; tests/integrations/verl/test_entry.py runs it up to there",
}
STORIES: Final = [
    page
    for page in pages()
    if any(block.runs and block.first_line not in NOT_RUN.get(page, {}) for block in blocks_of(page))
]
#: What a new user reads first: `make test` runs these.
FIRST: Final = ("README.md", "docs/produce/producers.md")
LIMIT_S: Final = 400.0


def reward_rises(log: str, by: float, what: str = "reward") -> None:
    rewards = [float(reward) for reward in re.findall(rf"version \d+: {what} (.*)$", log, re.MULTILINE)]
    assert rewards[0] + by < max(rewards[len(rewards) // 2 :]), rewards


def ends_as_said(log: str) -> None:
    """The last reward of the tutorial is in the range that the page says."""
    text = " ".join((ROOT / "docs/start/tutorial.md").read_text().split())
    (said,) = re.findall(r"ended between (\d\.\d+) and (\d\.\d+)", text)
    lowest, highest = map(float, said)
    reward = float(re.findall(r"version \d+: reward (.*)$", log, re.MULTILINE)[-1])
    assert lowest <= reward <= highest


#: What else the output of a page has to show.
CHECKS: Final[dict[str, Callable[[str], None]]] = {
    "README.md": lambda log: reward_rises(log, 0.6, "the policy says 7 with probability"),
    "docs/start/tutorial.md": ends_as_said,
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "streamadv.advantage.worker", "streamadv.trainer.queue", __name__])


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.slow
@pytest.mark.server
@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [
        # one process runs the first pages, since its server of forks has loaded torch
        pytest.param(page, marks=pytest.mark.xdist_group("pages") if page in FIRST else pytest.mark.release)
        for page in STORIES
    ],
)
def test_the_code_of_a_page_runs(page: str, redis_url: str, tmp_path: Path) -> None:
    left_out = NOT_RUN.get(page, {})
    blocks = [block for block in blocks_of(page) if block.runs and block.first_line not in left_out]
    own_server = any(words in block.code for block in blocks for words in OWN_SERVER)
    port = str(free_port()) if own_server else redis_url.removesuffix("/0").rpartition(":")[2]
    folder, log = tmp_path / "story", tmp_path / "log"
    folder.mkdir()
    arguments = (log, run_story, page, tuple(left_out), folder, redis_url, port)
    process = _context.Process(target=in_child, args=arguments)
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, log.read_text()[-20_000:]
    if page in CHECKS:
        CHECKS[page](log.read_text())


@pytest.mark.parametrize(
    ("page", "line", "reason"),
    [(page, line, reason) for page, lines in NOT_RUN.items() for line, reason in lines.items()],
)
def test_not_run(page: str, line: str, reason: str) -> None:
    assert line in {block.first_line for block in blocks_of(page)}, "no block of the page begins like this"
    pytest.skip(reason)


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("docs/")])
def test_links_outside_the_site_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", list(pages()))
def test_data_that_is_shown_can_be_read(page: str) -> None:
    for block in blocks_of(page):
        if block.language in ("json", "yaml"):
            yaml.safe_load(block.code) if block.language == "yaml" else json.loads(block.code)


@pytest.mark.parametrize("page", list(pages()))
def test_every_block_has_a_language(page: str) -> None:
    unknown = [block.line for block in blocks_of(page) if block.language not in ("python", *SHELLS, *SHOWN)]
    assert not unknown, f"lines {unknown}: use python, bash or one of {', '.join(SHOWN)}"
