"""`streamadv view` without a browser: who may ask, what is escaped, and what is said when there is nothing to show."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from streamadv import cli
from streamadv.errors import SettingError
from streamadv.prompts import Prompts
from streamadv.prompts.stored import carry_ends
from streamadv.store.embedded import EmbeddedServer
from streamadv.view import app
from streamadv.view.serve import serving
from tests.browser.asked import SCREENS, ask, board
from tests.browser.lab import HOSTILE, Lab, make_tokenizer
from tests.support import group_all, join, ledger, producing


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


@pytest.mark.processes
@pytest.mark.slow
def test_up_serves_it_to_its_commands(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "streamadv", "up", "--view", "--", sys.executable, "-c", "print('done')"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("DISPLAY", None)
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "view http://127.0.0.1:" in done.stderr


def test_a_wrong_tokenizer_is_an_error_at_once(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", "--run", run, "--tokenizer", "no/such.json"]) != 0
    assert "tokenizer no/such.json: there is no such file" in capsys.readouterr().err
