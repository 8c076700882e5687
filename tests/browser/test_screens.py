"""The page of `streamadv view` in a real Chromium, on a live run with known contents: `make test-browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from streamadv.store.embedded import EmbeddedServer
from streamadv.trajectory.schema import Trajectory
from streamadv.view import app
from streamadv.view.serve import serving
from tests.support import producing

from .asked import SCREENS
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


async def test_a_panel_is_shown_and_runs_nothing(
    page: Page, told: tuple[Lab, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(each: Trajectory) -> str:
        return f"<p>rollout {each.rollout_index}</p><script>top.document.title='taken'</script>"

    monkeypatch.setattr(app, "load_points", lambda group: {"board": render})
    with serving(told[0].url, told[0].name, port=0) as address:
        await page.open(f"{address}panel?id=sum-0-0&index=1&name=board")
        await page.until("document.body.innerText.includes('rollout 1')")
        assert await page.ask("document.title") == ""
        page.faults.clear()  # the browser says that it runs no script there
        await page.open(f"{address}tokens?id=sum-0-0&index=1")
        await page.until("document.querySelector('iframe').contentDocument === null")
        assert await page.ask("document.title") != "taken"
        page.faults.clear()


async def test_a_run_that_has_ended_says_so(page: Page, told: tuple[Lab, str]) -> None:
    lab, address = told
    lab.end()
    await page.open(address)
    await page.until("document.querySelector('#board .sentence').innerText.includes('The run has ended')")


async def test_long_rollouts_are_drawn_where_one_looks(page: Page, told: tuple[Lab, str]) -> None:
    lab, address = told
    lab.push("long", [1.0, 0.0], tokens=4096)
    await page.open(f"{address}tokens?id=long&index=0#t0-2000")
    await page.until("document.querySelector('#tokens span.at')")
    assert await page.ask("document.querySelectorAll('#tokens span').length") < 3000
    await page.until("document.querySelector('#hover').innerText.includes('2000 of 4131')")


async def test_the_board_has_reward_and_divergence_by_batch(page: Page, told: tuple[Lab, str]) -> None:
    await page.open(told[1])
    await page.until(FLOW)
    curves = await page.ask(
        "Object.fromEntries([...document.querySelectorAll('.cards > div:has(.curve)')].map((card) => "
        "[card.querySelector('h2').innerText, card.querySelector('polyline').points.numberOfItems]))"
    )
    assert curves["mean reward by batch, of kept groups"] == curves["KL by batch, of kept groups"] == 4


BY_FORMAT = '{"estimator": "reinforce", "reward": {"components": {"format": 1.0}}}'


async def test_a_batch_is_computed_again_as_it_was_and_by_another_chain(
    page: Page, told: tuple[Lab, str]
) -> None:
    await page.open(f"{told[1]}batch?k=1")
    await page.ask("document.querySelector('#again button').click()")
    await page.until("document.querySelector('#verdict').innerText.includes('as it was bit-identical')")
    await page.ask(f"document.querySelector('#again input[name=chain]').value = {BY_FORMAT!r}")
    await page.ask("document.querySelector('#again button').click()")
    await page.until("document.querySelector('#verdict').innerText.includes('groups would learn')")
    signs = await page.ask("document.querySelector('table.changes tbody td:last-child b').innerText")
    assert f"{signs} of " in await page.ask("document.querySelector('#verdict').innerText")
    assert int(signs) > 0  # of the rollouts with reward 0: all have the same format
    await page.press("ArrowRight")  # the next batch by the same chain
    await page.until("location.search.includes('k=2') && document.querySelector('#verdict')")
    assert await page.ask("document.querySelector('#again input[name=chain]').value") == BY_FORMAT
    await page.ask("document.querySelector('table.changes a').click()")
    await page.until("document.title.startsWith('Groups')")
    assert await page.ask(TEXTS.format("table.rows a.open")) == ["sum-2-0", "sum-2-1"]


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ("nowhere", "nowhere"),
        ("{", "chain is no JSON"),
        ("ppo", "the chain needs column values, which was not pushed"),
    ],
)
async def test_a_chain_that_cannot_be_run_is_refused_in_words(
    page: Page, told: tuple[Lab, str], chain: str, said: str
) -> None:
    await page.open(f"{told[1]}batch?k=1&chain={quote(chain)}")
    assert said in await page.ask("document.querySelector('#verdict').innerText")
    assert await page.ask("document.querySelector('h1').innerText") == "batch 1"


@pytest.mark.parametrize("path", SCREENS)
async def test_every_screen_fits_a_telephone_in_the_dark(
    page: Page, told: tuple[Lab, str], path: str
) -> None:
    if "json" in path or "static" in path:
        return
    await page.size(390, 844, dark=True)
    await page.open(told[1] + path.removeprefix("/"))
    await page.until("document.querySelector('.flow, table, .member, #tokens span, .dim')")
    assert await page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert await page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


async def test_many_groups_come_by_pages(
    page: Page, told: tuple[Lab, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PAGE", 5)
    await page.open(f"{told[1]}groups?where=kept")
    first = await page.ask(TEXTS.format("table.rows a.open"))
    assert len(first) == 5
    await page.press("ArrowRight")
    await page.until("location.search.includes('page=2') && document.querySelector('a[rel=prev]')")
    assert not {*first} & {*await page.ask(TEXTS.format("table.rows a.open"))}


async def test_without_a_server_it_says_so_and_asks_again(page: Page, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        server.stop()
        with serving(server.url, "none", port=0) as address:
            await page.open(address)
            await page.until("document.querySelector('#away').innerText !== ''")
            await page.open(f"{address}groups")
            said = await page.ask("document.querySelector('.sentence.stuck').innerText")
            assert "start the server or correct the URL" in said
            server.start()
            with producing(server.url, "none"):
                await page.until("document.querySelector('table.rows')")  # the page asks again by itself


async def test_a_bin_of_a_histogram_filters(page: Page, told: tuple[Lab, str]) -> None:
    await page.open(f"{told[1]}groups?where=kept")
    await page.ask(
        "document.querySelector('.histogram a').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    await page.until("location.search.includes('low=0')")
    await page.until("document.querySelector('table.rows a.open')")
    assert set(await page.ask(TEXTS.format("table.rows .why"))) == {"all four rewards are 0"}


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
