"""The frame of the command line: exit statuses, one-line errors, what is imported, schema and config."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from streamadv import cli
from streamadv.errors import SettingError
from streamadv.logs import set_up_logging
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.run.manifest import RunSettings
from streamadv.settings import load_settings
from tests.support import group_all, trajectory


@pytest.mark.parametrize("words", [["no-such-command"], [], ["schema", "--no-such-flag"]])
def test_wrong_usage_is_exit_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (SettingError("port=0: give\nanother"), 1, "streamadv: error: port=0: give another\n"),
        (redis.exceptions.OutOfMemoryError("OOM"), 1, "streamadv: error: OOM\n"),
        (
            redis.exceptions.ConnectionError("refused"),
            1,
            "streamadv: error: refused: start the server or correct the URL [server_away]\n",
        ),
        (FileNotFoundError(2, "No such file", "a.jsonl"), 1, "streamadv: error: a.jsonl: No such file\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr("streamadv.cli.schema.trajectory_json_schema", fail)
    assert cli.main(["schema"]) == status
    assert capsys.readouterr().err == message


def test_an_unexpected_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("streamadv.cli.schema.trajectory_json_schema", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["schema"])


@pytest.mark.processes
def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "streamadv", "schema"], stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.processes
def test_help_and_schema_do_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from streamadv.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    for word in ("--help", "schema"):
        done = subprocess.run([sys.executable, "-c", code, word], capture_output=True, check=False)
        assert (word, done.returncode, done.stderr) == (word, 0, b"")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for command in cli.COMMANDS:
        assert any(line.startswith(f"    {command} ") for line in lines), command


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_can_be_asked_for_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: streamadv {command}" in out
    assert "%%" not in out
    assert "`" not in out  # a module's docstring


@pytest.mark.parametrize("option", ["--timeout", "--max-groups"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "0.0"])
def test_consume_refuses_limits_that_are_none(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["consume", f"{option}={value}"])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"streamadv consume: error: argument {option}: is {value!r}, needs ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["consume", "--preset", "no-such-chain"], "no-such-chain"),
        (["consume", "--config", "no-such-file"], "no-such-file"),
        (["replay", "no-such-file"], "no-such-file"),
        (["replay", __file__], "test_cli.py:1"),
        (["replay", __file__, "--format", "chat"], "test_cli.py"),
        (["consume"], "--redis URL"),
        (["replay", os.devnull], "--redis URL"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_served(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("streamadv.metrics.serve", fail)
    monkeypatch.delenv("STREAMADV_REDIS_URL", raising=False)
    assert cli.main(words) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert named in printed.err


def test_schema_prints_a_valid_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    jsonschema: Any = pytest.importorskip("jsonschema")
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "group_id" in schema["properties"]


def test_config_shows_sources_and_the_chain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMADV_RUN", "mine")
    assert cli.main(["config", "--json", "--redis", "redis://me:secret@host"]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    printed = json.loads(out)
    assert printed["settings"]["run"] == {"value": "mine", "source": "STREAMADV_RUN"}
    assert printed["settings"]["redis_url"] == {"value": "redis://me:***@host", "source": "flag"}
    assert any("grpo" in step for step in printed["chain"])
    assert cli.main(["config"]) == 0
    text = capsys.readouterr().out
    assert all(step in text for step in printed["chain"])


def test_config_says_what_is_not_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STREAMADV_REDIS_URL", raising=False)
    assert cli.main(["config"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("redis_url"))
    assert line.endswith("= not set  (default)")


def test_config_reads_a_chain_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chain.json"
    file.write_text('{"estimator": "grpo", "norm_by_std": false}')
    assert cli.main(["config", "--config", str(file)]) == 0
    assert "norm_by_std False" in capsys.readouterr().out
    for wrong in ("{", "[]"):
        file.write_text(wrong)
        assert cli.main(["config", "--config", str(file)]) == 1
        error = capsys.readouterr().err
        assert "chain.json" in error
        assert error.count("\n") == 1


def test_a_command_without_a_server_names_the_remedy() -> None:
    with pytest.raises(SettingError, match="--redis URL"):
        cli.connect(load_settings())


def test_a_likely_typo_in_the_environment_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMADV_REDISURL", "redis://host")
    assert cli.main(["schema"]) == 0
    assert "did you mean STREAMADV_REDIS_URL" in capsys.readouterr().err


def test_a_log_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    logging.getLogger("streamadv.test").warning("first\nsecond")
    logging.getLogger("streamadv.test").debug("not shown")
    assert capsys.readouterr().err.count("\n") == 1


def test_access_rules_show_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "observer"
    file.write_text("from a file\n")
    monkeypatch.setenv("STREAMADV_PRODUCER_PASSWORD", "of a variable")
    monkeypatch.setenv("STREAMADV_PIPELINE_PASSWORD", "another")
    assert cli.main(["config", "acl", "--run", "r"]) == 1
    assert "STREAMADV_OBSERVER_PASSWORD_FILE" in capsys.readouterr().err
    monkeypatch.setenv("STREAMADV_OBSERVER_PASSWORD_FILE", str(file))
    assert cli.main(["config", "acl", "--run", "r", "--user-prefix", "exp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, role, password in zip(
        lines, ("producer", "pipeline", "observer"), ("of a variable", "another", "from a file"), strict=True
    ):
        digest = hashlib.sha256(password.encode()).hexdigest()
        assert line.startswith(f"user exp-{role} reset on #{digest} +")
        assert password not in line


def test_a_user_prefix_cannot_bring_rules_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "acl", "--user-prefix", "a +@all"]) == 1
    assert "--user-prefix" in capsys.readouterr().err


@pytest.mark.server
def test_evals_shows_what_evaluation_has_shown(
    producer: Producer, joined: Run, redis_url: str, run: str, capsys: Any
) -> None:
    arguments = ["evals", "--redis", redis_url, "--run", run]
    assert cli.main(arguments) == 0
    assert "no group of role eval has ended yet" in capsys.readouterr().out
    producer.push(
        [trajectory("e", i, 2, role="eval", data_source="m\x1b[2J", model_version=3) for i in range(2)]
    )
    producer.push([trajectory("f", 0, 1, role="eval", round="step-1", model_version=(3, 5))])
    group_all(joined)
    assert cli.main(arguments) == 0
    head, of_round, line = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["data", "source", "round", "version", "mean", "std"]
    assert of_round.split() == ["-", "step-1", "3..5", "0", "-", "0", "0", "0", "1", "1", "0"]
    assert line.split()[1:] == ["-", "3", "0.5", "-", "1", "0", "1", "2", "1", "0"]
    assert "\x1b" not in line
    assert cli.main([*arguments, "--json"]) == 0
    first, shown = json.loads(capsys.readouterr().out)["evaluations"]
    assert (first["round"], first["oldest_version"], first["version"]) == ("step-1", 3, 5)
    assert (shown["version"], shown["mean"], shown["std_error"], shown["groups"]) == (3, 0.5, None, 1)
    assert (shown["round"], shown["oldest_version"]) == (None, 3)
    assert cli.main(["status", *arguments[1:]]) == 0
    assert "evaluation: round step-1, version 3..5, mean reward 0 of 1 rollouts" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["create", "change"])
def test_every_setting_of_a_run_has_a_flag(action: str) -> None:
    parsed = cli.make_parser(["runs", action]).parse_args(["runs", action])
    assert RunSettings.model_fields.keys() <= vars(parsed).keys()
