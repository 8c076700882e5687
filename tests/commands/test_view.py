"""`streamadv view` without a browser: who may ask, what is escaped, and what is said when there is nothing to show."""

from __future__ import annotations

import base64
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from streamadv import cli
from streamadv.errors import SettingError
from streamadv.prompts import Prompts
from streamadv.prompts.stored import carry_ends
from streamadv.status import seen
from streamadv.store.embedded import EmbeddedServer
from streamadv.view import app, book, rollouts
from streamadv.view.serve import serving
from tests.browser.asked import SCREENS, ask, board
from tests.browser.lab import HOSTILE, Lab, make_tokenizer
from tests.support import group_all, join, ledger, producing, some_of, trajectory


class Tags(HTMLParser):
    """What a browser would make of a page: its tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def lab(redis_url: str, run: str, tmp_path: Path) -> Iterator[Lab]:
    with Lab(redis_url, run, make_tokenizer(tmp_path)).working() as working:
        working.tell()
        yield working


def test_every_screen_is_there_and_the_run_is_as_before(lab: Lab) -> None:
    before = ledger(lab.run)
    with serving(lab.url, lab.name, port=0) as address:
        answers = {path: ask(address, path) for path in SCREENS}
        text = board(address, "flow")
    assert {path: answer.status for path, answer in answers.items()} == dict.fromkeys(SCREENS, 200)
    assert "balanced" in text
    assert all(
        "default-src 'none'" in answer.headers["Content-Security-Policy"] for answer in answers.values()
    )
    assert ledger(lab.run) == before


def test_what_a_rollout_says_is_text_wherever_it_is_shown(lab: Lab) -> None:
    lab.push("<script>document.title='taken'</script>", [0.0, 1.0], text=HOSTILE)
    with serving(lab.url, lab.name, port=0) as address:
        for path in (
            *SCREENS,
            "/groups?find=<script>",
            "/group?id=<script>alert(1)</script>",
            "/group?id=%0a<u>",
        ):
            answer = ask(address, path.replace("<", "%3C").replace(">", "%3E"))
            if answer.headers.get_content_type() != "text/html":
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                continue
            page = Tags(answer.text)
            scripts = [attributes for tag, attributes in page.tags if tag == "script"]
            assert scripts == [{"src": "/static/view.js", "defer": None}], path
            assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "u")], path
            names = {name for _, attributes in page.tags for name in attributes}
            assert not [name for name in names if name.startswith("on") or name == "style"], path
            targets = [attributes.get("href") or "" for _, attributes in page.tags]
            assert not [target for target in targets if target and not target.startswith(("/", "#"))], path
        page = Tags(ask(address, "/group?id=hostile/one").text)
        assert "<script>document.title='taken'</script>" in page.text
        assert "{{ 7*7 }}" in page.text
        assert not {"\x1b", "\u202e"} & set(page.text)


def test_prompts_are_shown_with_what_their_tries_have_shown(redis_url: str, run: str) -> None:
    with producing(redis_url, run, {"zero_variance_filter": True}) as producer:
        groups = producer.prompts(Prompts({"math": ["a", "b"]}, shuffle=None), 1)
        for reward in (0.25, 0.75):
            for rollout in next(groups)[1]:
                rollout.push(input_ids=[1, 2], response_mask=[0, 1], reward=reward)
        joined = join(redis_url, run)
        group_all(joined)
        carry_ends(joined)
        with serving(redis_url, run, port=0) as address:
            text = Tags(ask(address, "/prompts").text).text
    assert "2 of 2" in text
    assert text.index("0.25") < text.index("0.75")


class Numbers(HTMLParser):
    """Texts with a digit that stand in a number's place and lead nowhere."""

    PLACES: Final = frozenset({"count", "rate", "note", "figure"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        self._open: list[tuple[str, bool, bool]] = []  # tag, whether in a number's place, whether in a link
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        _, of_number, of_link = self._open[-1] if self._open else ("", False, False)
        classes = {*(given.get("class") or "").split()}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if tag not in ("input", "br", "meta", "link", "polyline", "circle", "rect"):
            self._open.append((tag, of_number or bool(classes & self.PLACES), of_link or tag == "a"))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][1:] == (True, False) and re.search(r"\d", data):
            self.found.append(data.strip())


def test_every_number_of_the_flow_leads_to_rows(lab: Lab) -> None:
    lab.push("more", [1.0, 0.0], size=3)
    with serving(lab.url, lab.name, port=0) as address:
        board(address, "flow")
        page = Numbers(board(address, "flow"))
        places = {link.partition("#")[0] for link in page.links}
        answers = {place: ask(address, place).status for place in places if place}
        ids = {attributes.get("id") for _, attributes in Tags(board(address, "flow")).tags}
    assert page.found == []
    assert answers == dict.fromkeys(answers, 200)
    assert {link[1:] for link in page.links if link.startswith("#")} <= ids


def test_a_batch_without_kept_groups_says_what_the_run_keeps(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    shy = Lab(redis_url, run, make_tokenizer(tmp_path))
    shy.settings |= {"keep": {"trained": 0.0005}}
    with shy.working() as lab, serving(redis_url, run, port=0) as address:
        for number in range(2):
            lab.push(f"sum-{number}", [0.0, 1.0])
        assert (
            "the run keeps 0.05 % of the groups that were trained on"
            in Tags(ask(address, "/batch").text).text
        )
        lab.train()
        lab.end()
        text = Tags(ask(address, "/batch?k=0").text).text
    assert "none of its groups can be looked at: it is not named yet, or none is kept" in text
    assert "the run keeps 0.05 % of the groups that were trained on" in text
    assert "--keep trained=1" in text


def test_settings_are_shown_with_what_they_are(lab: Lab) -> None:
    with serving(lab.url, lab.name, port=0) as address:
        text = Tags(ask(address, "/settings").text).text
    assert '{"trained": 1.0, "dropped": 1.0, "eval": 1.0, "dead": 1.0}' in text
    assert "drop groups whose rewards are all equal" in text
    assert "256.0 MiB default" in text


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ("outcome=dropped", {"late", *(f"equal-{k}" for k in range(4))}),
        ("find=s*-1-*1", {"sum-1-1"}),
        ("where=kept&most=0.5&batch=2", {"sum-2-0", "sum-2-1"}),
        ("where=kept&least=0.5&outcome=zero_variance", set()),
    ],
)
def test_groups_are_chosen(lab: Lab, words: str, groups: set[str]) -> None:
    with serving(lab.url, lab.name, port=0) as address:
        assert opened(ask(address, f"/groups?{words}").text) == groups


def opened(text: str) -> set[str]:
    """The groups of a table."""
    tags = Tags(text).tags
    return {given["title"] or "" for tag, given in tags if tag == "a" and given.get("class") == "open"}


def test_text_is_searched_from_the_newest_group_on(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.push("said", [0.0, 1.0], text="The Answer is forty-two")
    monkeypatch.setattr(rollouts, "SEARCH_S", 0.0)
    with serving(lab.url, lab.name, port=0) as address:
        path, found, steps = "/groups?where=waiting&text=answer+IS", set[str](), 0
        while path:
            answer = ask(address, path)
            found |= opened(answer.text)
            steps += 1
            further = [
                given["href"] for tag, given in Tags(answer.text).tags if "skip=" in (given.get("href") or "")
            ]
            path = further[0] or "" if further else ""
        assert found == {"said"}
        waiting = list(seen.read_groups_at(lab.run, "waiting"))
        assert steps == len(waiting) > 1
        assert opened(ask(address, "/groups?text=no+such+words").text) == set()


def test_many_kept_groups_are_read_by_and_by_the_newest_first(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "SLICE_S", 0.0)
    monkeypatch.setattr(seen, "PAGE", 3)
    newest = [group.group_id for group in seen.read_groups_at(lab.run, "kept")][::-1]
    with serving(lab.url, lab.name, port=0) as address:
        answers = [ask(address, "/groups?where=kept").text for _ in range(len(newest) // 3 + 1)]
        counts = [len(opened(answer)) for answer in answers]
        assert counts == [3 * (number + 1) for number in range(len(newest) // 3)] + [len(newest)]
        assert opened(answers[0]) == {*newest[:3]}
        assert "older ones that are being read" in answers[0]
        assert "older ones that are being read" not in ask(address, "/groups").text
        assert ask(address, f"/group?id={newest[-1]}").status == 200


def test_a_page_that_was_there_before_any_kept_group_shows_them(
    redis_url: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "FRESH_S", 0.0)
    monkeypatch.setattr(book, "PATIENCE", 0.0)
    with (
        Lab(redis_url, run, make_tokenizer(tmp_path)).working() as lab,
        serving(redis_url, run, port=0) as page,
    ):
        assert opened(ask(page, "/groups?where=kept").text) == set()
        lab.tell()
        kept = {group.group_id for group in seen.read_groups_at(lab.run, "kept")}
        assert opened(ask(page, "/groups?where=kept").text) == kept != set()


def test_what_the_server_has_lost_or_forgotten_is_no_longer_shown(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "FRESH_S", 0.0)
    monkeypatch.setattr(book, "PATIENCE", 0.0)
    (shard,) = lab.run.shards
    kept = list(seen.read_groups_at(lab.run, "kept"))
    with serving(lab.url, lab.name, port=0) as address:
        assert opened(ask(address, "/groups?where=kept").text) == {group.group_id for group in kept}
        for place in (-1, 0):
            lost = kept.pop(place)
            lab.run.connection.scripts.xdel(shard.keys.kept, lost.entry)
            assert opened(ask(address, "/groups?where=kept").text) == {group.group_id for group in kept}
        lab.run.connection.scripts.delete(shard.keys.kept)
        assert opened(ask(address, "/groups?where=kept").text) == set()


@pytest.mark.parametrize(
    "field", some_of(["record", "results", "late", "scores", "left_out", "head", "payloads", "tables"], 2)
)
def test_what_nobody_of_the_run_has_written_breaks_no_page(lab: Lab, field: str) -> None:
    (shard,) = lab.run.shards
    (entry,) = lab.run.connection.scripts.xrange(shard.keys.kept, count=1)
    for number, junk in enumerate(
        (b"[" * 3000, b"5", b"null", b"\xff", b'{"late": 5}', b'{"num_groups": "x"}')
    ):
        fields = {**entry[1], b"group_id": b"junk-%d" % number, field.encode(): junk}
        lab.run.connection.scripts.xadd(shard.keys.kept, fields)
    with serving(lab.url, lab.name, port=0) as address:
        assert {f"junk-{number}" for number in range(6)} <= opened(ask(address, "/groups").text)
        for path in ("/batch?k=0", *(f"/group?id=junk-{number}" for number in range(6))):
            assert ask(address, path).status == 200, path
        board(address, "flow")


def test_a_run_that_is_deleted_and_made_again_is_the_new_one(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        producer.push([trajectory("before", 0, 2)])
    with serving(redis_url, run, port=0) as address:
        assert opened(ask(address, "/groups").text) <= {"before"}
        assert cli.main(["runs", "delete", "--redis", redis_url, "--run", run, "--force"]) == 0
        assert ask(address, "/groups").status == 503
        with producing(redis_url, run, {"shards": 3}) as producer:
            for number in range(6):
                producer.push([trajectory(f"after-{number}", 0, 2)])
            group_all(join(redis_url, run))
            assert ask(address, "/group?id=after-3").status == 200
            assert "after-3" in opened(ask(address, "/groups").text)


def test_others_see_it_only_with_the_password(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SettingError, match=r"--host 0\.0\.0\.0 shows rollouts to others: set STREAMADV_VIEW_PASSWORD"
    ):
        serving(lab.url, lab.name, host="0.0.0.0").__enter__()
    monkeypatch.setenv("STREAMADV_VIEW_PASSWORD", "päss:word")

    def by(password: str, user: str = "view") -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}

    with serving(lab.url, lab.name, host="0.0.0.0", port=0) as address:
        address = address.replace("0.0.0.0", "127.0.0.1")
        for path in (*SCREENS, "/events", "/nothing"):
            refused = ask(address, path)
            assert (refused.status, lab.name in refused.text) == (401, False), path
            assert refused.headers["WWW-Authenticate"].startswith("Basic")
        for wrong in (
            by("wrong"),
            by("päss:word", "other"),
            {"Authorization": "Basic ü"},
            {"Authorization": "Bearer x"},
        ):
            assert ask(address, "/groups", wrong).status == 401, wrong
        assert ask(address, "/groups", by("päss:word")).status == 200
        assert "balanced" in board(address, "flow", by("päss:word"))


def test_another_name_of_this_machine_does_not_lead_to_it(lab: Lab) -> None:
    with serving(lab.url, lab.name, port=0) as address:
        port = address.rpartition(":")[2].strip("/")
        for name, status in (("evil.example", 403), (f"127.0.0.1:{port}", 200), (f"localhost:{port}", 200)):
            assert ask(address, "/groups", {"Host": name}).status == status, name


@pytest.mark.parametrize(
    "path", ["/groups?batch=x", "/groups?low=y", "/tokens?id=sum-0-0&index=z", "/batch?k=1e3"]
)
def test_an_address_that_is_none_is_refused_in_words(lab: Lab, path: str) -> None:
    with serving(lab.url, lab.name, port=0) as address:
        answer = ask(address, path)
    assert answer.status == 400
    assert "needs a number" in answer.text


def test_a_package_brings_a_panel_that_stands_apart(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = {
        "board": lambda each: f"<script>1</script><svg>{each.rollout_index}</svg>",
        "broken": lambda each: each.rollout_index / 0,
    }
    monkeypatch.setattr(app, "load_points", {"streamadv.views": panels}.get)
    with serving(lab.url, lab.name, port=0) as address:
        page = Tags(ask(address, "/tokens?id=sum-0-0&index=1").text)
        frames = [attributes for tag, attributes in page.tags if tag == "iframe"]
        sandboxes = [(frame["title"], frame.get("sandbox", "none")) for frame in frames]
        assert sandboxes == [("board", None), ("broken", None)]
        shown, broken, gone = (
            ask(address, f"/panel?id=sum-0-0&index=1&name={name}") for name in ("board", "broken", "no")
        )
    assert "<svg>1</svg>" in shown.text
    assert shown.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
    assert "ZeroDivisionError: division by zero" in broken.text
    assert gone.status == 404


def test_what_has_gone_is_said(lab: Lab) -> None:
    with serving(lab.url, lab.name, port=0) as address:
        answers = [ask(address, path) for path in ("/group?id=no", "/tokens?id=sum-0-0&index=9", "/nothing")]
        assert [answer.status for answer in answers] == [404, 404, 404]
        assert "It is not open, waiting, kept or dead" in answers[0].text
        assert ask(address, "/tokens.json?id=no&index=0").status == 404


def test_the_run_may_come_later(redis_url: str, run: str) -> None:
    with serving(redis_url, run, port=0) as address:
        board(address, "away")
        assert ask(address, "/groups").status == 503
        assert f"run '{run}' does not exist" in Tags(ask(address, "/groups").text).text
        with producing(redis_url, run):
            assert ask(address, "/groups").status == 200
            board(address, "flow")
            assert "no batch can be looked at yet" in ask(address, "/batch").text


@pytest.mark.server
def test_the_server_may_go_and_come_back(run: str, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server, serving(server.url, run, port=0) as address:
        with producing(server.url, run):
            assert ask(address, "/groups").status == 200
        server.stop()
        assert "\n" not in board(address, "away")
        assert ask(address, "/group?id=g").status == 503
        server.start()
        assert ask(address, "/groups").status == 200


def test_a_port_that_is_taken_is_an_error_and_the_default_moves(redis_url: str, run: str) -> None:
    with serving(redis_url, run) as first, serving(redis_url, run) as second:
        assert first != second
        with pytest.raises(SettingError, match=r"--host 127\.0\.0\.1 --port \d+: .*, give another one"):
            serving(redis_url, run, port=int(first.rpartition(":")[2].strip("/"))).__enter__()


@pytest.mark.processes
def test_the_command_prints_the_address_and_ends_with_ctrl_c(redis_url: str, run: str) -> None:
    words = [sys.executable, "-m", "streamadv", "view", "--redis", redis_url, "--run", run, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert ask(address, "/").status == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False), errors


UP: Final = [sys.executable, "-m", "streamadv", "up", "--view", "--", sys.executable, "-c", "print('done')"]


def without_display() -> dict[str, str]:
    """The environment of a program that opens no browser."""
    kept = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


@pytest.mark.processes
@pytest.mark.slow
def test_up_serves_it_to_its_commands(tmp_path: Path) -> None:
    done = subprocess.run(
        UP, cwd=tmp_path, env=without_display(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "view http://127.0.0.1:" in done.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_at_a_terminal_the_page_stays_after_the_run(tmp_path: Path) -> None:
    keyboard, terminal = pty.openpty()
    pipes: dict[str, Any] = {"stdin": terminal, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(UP, cwd=tmp_path, env=without_display(), text=True, **pipes)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "its page stays at" in line)
    address = re.search(r"http://127[^ :]*:\d+/", line)
    assert address is not None
    assert ask(address[0], "/groups").status in (200, 503)  # without a run
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    os.close(keyboard)
    os.close(terminal)


def test_a_wrong_url_is_an_error_at_once(run: str) -> None:
    with pytest.raises(SettingError, match="foo://server"):
        serving("foo://server", run, port=0).__enter__()


def test_a_wrong_tokenizer_is_an_error_at_once(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", "--run", run, "--tokenizer", "no/such.json"]) != 0
    assert "tokenizer no/such.json: there is no such file" in capsys.readouterr().err


def test_a_search_with_many_asterisks_ends() -> None:
    line = book.Line(
        "kept", 0, "1-1", "0199a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b", "trained", "", None, None, None, None, "",
        (), (), None, 0, None, None,
    )  # fmt: skip
    assert not book.Choice(find="*" * 40 + "x").has(line)
    assert book.Choice(find="*" * 40 + "7e5f*4a5b").has(line)
