"""`streamadv show`: groups as lines, and what was said in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamadv import cli
from tests.support import group_all, housekeep, join, producing, trajectory

TEXTS = [("What is 2 + 2?", 0), ("Let me look.", 1), ("\x1b[31m4", 0), ("It is 4.", 1)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([text for text, _ in TEXTS], vocab_size=300, show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def shown(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with a dropped group, an open one, and one that waits."""
    with producing(redis_url, run, {"keep": {"dropped": 1.0}, "zero_variance_filter": True}) as producer:
        joined = join(redis_url, run)
        housekeep(joined)
        producer.push([trajectory("exp/a", index, 2, reward=0.5) for index in range(2)])
        producer.push([trajectory("waits", index, 2) for index in range(2)])
        producer.push([trajectory("open", 0, 2)])
        group_all(joined)
    monkeypatch.setenv("STREAMADV_REDIS_URL", redis_url)
    monkeypatch.setenv("STREAMADV_RUN", run)
    return run


def test_a_line_for_each_group(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show"]) == 0
    lines = [line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines[1:]] == [
        ["open", "open", "open"],
        ["waits", "waiting", "complete"],
        ["exp/a", "kept", "zero_variance"],
    ]
    assert cli.main(["show", "--outcome", "zero_variance", "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["group_id"], found["rewards"]) == ("exp/a", [0.5, 0.5])
    assert found["reason"] == "all two rewards are 0.5"
    assert cli.main(["show", "--where", "dead"]) == 0
    assert capsys.readouterr().out == f"run {shown} has no such groups\n"


def test_one_rollout_of_a_group_whose_id_has_a_slash(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "exp/a/1"]) == 0
    out = capsys.readouterr().out
    assert "group exp/a: zero_variance: all two rewards are 0.5\n" in out
    assert (
        "rollout 1: reward 0.5, completed, 5 tokens, 3 trained on\nprompt:\n10 11\nanswer 1:\n12 13 14\n"
        in out
    )
    assert "rollout 0" not in out
    assert cli.main(["show", "exp/a/1", "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["rollout_index"], found["outcome"], found["input_ids"]) == (
        1,
        "zero_variance",
        [10, 11, 12, 13, 14],
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nothing", "group 'nothing' of run"), ("exp/a/7", "group 'exp/a' has no rollout 7")],
)
def test_what_is_not_there_is_an_error(
    shown: str, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    assert cli.main(["show", name]) == 1
    assert problem in capsys.readouterr().err


def test_text_by_a_tokenizer(
    redis_url: str, run: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids, mask = list[int](), list[int]()
    for text, trained in TEXTS:
        new = known.encode(text).ids
        ids, mask = ids + new, mask + [trained] * len(new)
    with producing(redis_url, run, {"tokenizer": "/gone"}) as producer:
        named = trajectory(
            "g", 0, 2, input_ids=ids, response_mask=mask, rollout_log_probs=..., rewards={"ok": 1}
        )
        producer.push([named])
        group_all(join(redis_url, run))
        where = ["--redis", redis_url, "--run", run]
        assert cli.main(["show", "g", *where, "--tokenizer", str(tokenizer)]) == 0
        out = capsys.readouterr().out
        assert "of two rollouts one not pushed yet" in out
        assert "reward 0, ok 1, completed" in out
        turns = "prompt:\nWhat is 2 + 2?\nanswer 1:\nLet me look.\nresult:\n\\x1b[31m4\nanswer 2:\nIt is 4.\n"
        assert turns in out
        assert cli.main(["show", "g", *where]) == 0  # by the run's setting, which is of another machine
        printed = capsys.readouterr()
        assert "token ids are shown: tokenizer /gone: there is no such file" in printed.err
        assert " ".join(map(str, ids[:3])) in printed.out
        assert cli.main(["show", "g", *where, "--tokenizer", str(tmp_path / "x")]) == 1
        assert "nothing is downloaded" in capsys.readouterr().err


def test_without_the_package_the_remedy_is_said(
    shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("streamadv.extras.is_installed", lambda package: package != "tokenizers")
    assert cli.main(["show", "open", "--tokenizer", "x"]) == 1
    assert "pip install 'streamadv[view]'" in capsys.readouterr().err
