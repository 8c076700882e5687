"""The page of `streamadv view` in a real Chromium, on a live run with known contents: `make test-browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from streamadv.store.embedded import EmbeddedServer
from streamadv.view.serve import serving
from tests.support import producing

from .chrome import Page, chromium, new_page
from .lab import Lab, make_tokenizer

pytestmark = [
    pytest.mark.skipif("STREAMADV_BROWSER" not in os.environ, reason="make test-browser"),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium (Debian's) is not on PATH"),
    pytest.mark.server,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a browser."""
    program = shutil.which("chromium")
    assert program is not None
    with chromium(program, tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest_asyncio.fixture
async def page(browser: str) -> AsyncIterator[Page]:
    """A page that nothing went wrong on in the end."""
    async with new_page(browser) as opened:
        await opened.size(1300, 900)
        yield opened
        assert opened.faults == []


@pytest.fixture
def told(redis_url: str, run: str, tmp_path: Path) -> Iterator[tuple[Lab, str]]:
    """The lab after its story, and the address of its page."""
    with Lab(redis_url, run, make_tokenizer(tmp_path)).working() as lab:
        lab.tell()
        with serving(redis_url, run, port=0) as address:
            yield lab, address


FLOW = "document.querySelector('.flow')"
#: The text of all elements that a selector finds, as a list.
TEXTS = "[...document.querySelectorAll({!r})].map((each) => each.innerText)"


async def test_the_board_says_who_waits_for_whom(page: Page, told: tuple[Lab, str]) -> None:
    await page.open(told[1])
    await page.until(FLOW)
    assert await page.ask("document.querySelector('#box-open .count').innerText") == "1"
    said = await page.ask("document.querySelector('.sentence[data-reason]').innerText")
    assert "is open and lacks 2 rollouts" in said
    ledger = await page.ask("document.querySelector('.ledger').innerText")
    assert "balanced" in ledger


@pytest.mark.parametrize(
    ("box", "groups"),
    [("open", ["short"]), ("committed", ["sum-3-0", "sum-3-1"])],
)
async def test_a_number_leads_to_its_rows(
    page: Page, told: tuple[Lab, str], box: str, groups: list[str]
) -> None:
    await page.open(told[1])
    await page.until(FLOW)
    await page.ask(f"document.querySelector('#box-{box} .count').click()")
    await page.until("document.title.startsWith('Groups')")
    rows = await page.ask(TEXTS.format("table.rows a.open"))
    assert rows[: len(groups)] == groups


async def test_a_dropped_group_says_why(page: Page, told: tuple[Lab, str]) -> None:
    await page.open(f"{told[1]}groups?outcome=stale")
    await page.press("j")
    await page.press("Enter")
    await page.until("document.querySelector('#why')")
    assert "oldest version 0, batch 4, drop_after 3" in await page.ask(
        "document.querySelector('#why').innerText"
    )
    assert await page.ask(TEXTS.format(".crumbs a")) == [
        "kept groups",
        "dropped at the naming of batch 4",
        "sums",
    ]


async def test_tokens_have_the_colour_of_their_advantage(page: Page, told: tuple[Lab, str]) -> None:
    await page.open(f"{told[1]}tokens?id=sum-0-0&index=1")
    await page.until("document.querySelector('#tokens span')")
    colours = await page.ask(
        "[...document.querySelectorAll('#tokens span')]"
        ".map((span) => [span.classList.contains('masked'), span.style.backgroundColor])"
    )
    trained = {colour for masked, colour in colours if not masked}
    assert {colour for masked, colour in colours if masked} == {""}
    assert len(trained) == 1
    (colour,) = trained
    assert colour.startswith("rgba(20, 160, 100")  # the rewarded are green
    await page.open(f"{told[1]}tokens?id=sum-0-0&index=0")
    await page.until(
        "document.querySelector('#tokens span:not(.masked)').style.backgroundColor.startsWith('rgba(225')"
    )


async def test_what_a_rollout_says_runs_nowhere(page: Page, told: tuple[Lab, str]) -> None:
    for path in ("group?id=hostile/one", "tokens?id=hostile/one&index=1"):
        await page.open(told[1] + path)
        await page.until("document.body.innerText.includes('<script>document.title')")
        assert await page.ask("document.title") != "taken"
        assert await page.ask("document.querySelectorAll('img, iframe').length") == 0


async def test_the_server_goes_and_comes_back(page: Page, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server, serving(server.url, "back", port=0) as address:
        with producing(server.url, "back"):
            await page.open(address)
            await page.until(FLOW)
        server.stop()
        await page.until("document.querySelector('#board.old')")
        assert await page.ask("document.querySelector('#away').innerText") != ""
        server.start()
        await page.until("!document.querySelector('#board.old')")


async def test_the_page_of_a_viewer_that_was_started_again_goes_on(
    page: Page, redis_url: str, run: str
) -> None:
    with producing(redis_url, run):
        with serving(redis_url, run, port=0) as address:
            await page.open(address)
            await page.until(FLOW)
        await page.until("document.querySelector('#board.old')")
        with serving(redis_url, run, port=int(address.rpartition(":")[2].strip("/"))):
            await page.until("!document.querySelector('#board.old')")


async def test_without_a_run_it_waits_for_one(page: Page, redis_url: str, run: str) -> None:
    with serving(redis_url, run, port=0) as address:
        await page.open(address)
        await page.until("document.querySelector('#away').innerText.includes('does not exist')")
        with producing(redis_url, run):
            await page.until(FLOW)
            assert await page.ask(TEXTS.format(".flow .count")) == ["1", "0", "0", "0", "0", "0", "0"]
