"""Wrong words on the command line: whose usage is shown, and which right word is offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamadv import cli


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        (["statsu"], "streamadv [", "did you mean status?"),
        (["worker", "gruper"], "streamadv worker [", "did you mean grouper?"),
        (["worker", "grouper", "--rn", "x"], "streamadv worker grouper [", "--rn: did you mean --run?"),
        (["status", "--jsn=1"], "streamadv status [", "--jsn: did you mean --json?"),
        (["compute", "a", "-o", "b", "--zzz", "c"], "streamadv compute [", "unrecognized option --zzz\n"),
        (["status", "more"], "streamadv status [", "unrecognized arguments: more"),
        (["up", "python", "a.py"], "streamadv up [", "python a.py: write `--` in front of each command"),
        (["runs", "create", "--max-bytes", "much"], "streamadv runs create [", "512mb or 4gb"),
        (
            ["runs", "create", "--scorers", "a,,b"],
            "streamadv runs create [",
            "a name before and after each comma",
        ),
        (
            ["worker", "scorer", "m:f", "--columns", "input_id"],
            "streamadv worker scorer [",
            "to be input_ids",
        ),
        (["replay", "f", "--format", "tau_bench"], "streamadv replay [", "did you mean tau-bench?"),
        (["status", "--ru", "x"], "streamadv status [", "unrecognized option --ru: did you mean --run?"),
        (["dead", "list", "--js"], "streamadv dead list [", "unrecognized option --js"),
    ],
)
def test_a_wrong_word_is_an_error_of_its_command(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    written = capsys.readouterr().err
    assert caught.value.code == 2
    assert written.startswith(f"usage: {usage}")
    assert said in written


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["worker", "grouper", "--run", "exp1", "--max-bytes", "4gb"], "--run exp1 --max-bytes 4gb"),
        (
            ["worker", "scorer", "m:f", "--scorers=a,b", "--no-zero-variance-filter"],
            "--run default --scorers=a,b --no-zero-variance-filter",
        ),
        (["replay", "--difficulty-low", "-0.5", "a file"], "--run default --difficulty-low -0.5"),
        (["worker", "advantage", "--batch-groups", "8"], "--run default --batch-groups 8"),
    ],
)
def test_a_setting_of_the_run_given_to_a_process_is_an_error_with_the_command_that_takes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], remedy: str
) -> None:
    monkeypatch.delenv("STREAMADV_RUN", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"`streamadv runs create {remedy}`, or `runs change`" in line
    create = ["runs", "create", *remedy.split()]
    assert cli.make_parser(create).parse_args(create).run_name == remedy.split()[1]


@pytest.mark.parametrize(
    ("words", "listed"), [([], "consume"), (["worker"], "grouper"), (["dead"], "requeue")]
)
def test_a_command_that_needs_another_word_lists_them(
    capsys: pytest.CaptureFixture[str], words: list[str], listed: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert f"  {listed}  " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ('{"estimator": "gae", "gama": 0.9}', "did you mean gamma?"),
        ('{"estimator": "grpo", "gamma": 0.9}', "no option of grpo"),
        ('{"kl": {"coeficient": 1}}', "did you mean coefficient?"),
        ('{"kl": {"coef": 1}}', "did you mean coefficient?"),
        ('{"estimator": "gropo"}', "grpo"),
    ],
)
def test_a_wrong_field_of_a_chain_names_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chain: str, said: str
) -> None:
    file = tmp_path / "chain.json"
    file.write_text(chain)
    assert cli.main(["config", "--config", str(file)]) == 1
    assert said in capsys.readouterr().err


def test_a_wrong_preset_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--preset", "verl/grppo"]) == 1
    assert "did you mean verl/grpo?" in capsys.readouterr().err


def test_an_unknown_option_beside_settings_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["runs", "create", "--max-bytes", "1gb", "--nonsense"])
    assert "unrecognized option --nonsense" in capsys.readouterr().err
