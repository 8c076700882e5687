"""`streamadv gateway run`: a process plays a rollout, and ends it when it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamadv import cli
from streamadv.errors import SettingError
from streamadv.gateway.running import Running
from streamadv.run import open_run
from streamadv.store.connection import Connection
from tests.support import group_all, problems
from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import Playing, playing, pushed

pytestmark = [pytest.mark.server, pytest.mark.processes]

#: An agent without any package; its arguments are what it does at its end.
AGENT = """
import json, os, sys, time, urllib.request
url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
request = urllib.request.Request(url, body, {"Authorization": "Bearer " + key})
json.load(urllib.request.urlopen(request))
exec(sys.argv[1])
"""


def running(gateway: Playing, ends: str, **options: Any) -> Running:
    key = gateway.keys.sign("operator", gateway.producer.run, None)
    return Running(gateway.url, key, [sys.executable, "-c", AGENT, ends], **options)


async def test_the_reward_is_the_exit_status(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            ends = "sys.exit(int(os.environ['STREAMADV_ROLLOUT'][-1]))"
            answers = await running(gateway, ends, group={"size": 2, "metadata": {"task": 7}}).play()
    assert [answer and answer["result"] for answer in answers] == ["pushed", "pushed"]
    found = pushed(redis_url, run)
    assert len(found) == 2
    assert {str(rows.header["metadata"]) for rows in found.values()} == {"{'task': 7}"}


async def test_the_process_has_no_key_but_its_own(
    redis_url: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMADV_REDIS_URL", redis_url)
    told = tmp_path / "environment"
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            await running(gateway, f"json.dump(dict(os.environ), open({str(told)!r}, 'w'))").play()
    environment = json.loads(told.read_text())
    assert {name for name in environment if name.startswith("STREAMADV")} == {
        "STREAMADV_ROLLOUT",
        "STREAMADV_REWARD_FILE",
    }
    assert {"OPENAI_API_KEY", "ANTHROPIC_BASE_URL"} < set(environment)


@pytest.mark.parametrize(
    "instead",
    [
        "os.mkfifo(file)", "os.symlink('/dev/zero', file)", "os.mkdir(file)", "os.symlink(file, file)",
        "open(file, 'w').write(' ' * (1 << 20) + '1')",
    ],
)  # fmt: skip
async def test_what_stands_in_place_of_the_file_is_no_reward(redis_url: str, run: str, instead: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            ends = f"file = os.environ['STREAMADV_REWARD_FILE']; {instead}"
            (answer,) = await running(gateway, ends, reward="file").play()
    assert answer is not None
    assert answer["detail"].startswith("no reward: ")


async def test_the_gateway_is_told_that_no_more_groups_come(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            one = running(gateway, "")
            await one.play()
            await one.finish()
            assert gateway.producer._logic.membership.last_word == "finished"


@pytest.mark.parametrize(
    ("written", "ended"),
    [
        ("0.25", {"ended": "pushed"}),
        ('{"reward": 1, "rewards": {"a": 2}, "status": "truncated"}', {"ended": "pushed"}),
        ('{"fail": "the judge broke"}', {"detail": "the judge broke"}),
        ("much", {"ended": "failed"}),
        ("NaN", {"ended": "failed"}),
        ('{"reward": "much"}', {"ended": "failed"}),
        ('{"cancel": true}', {"ended": "failed"}),
    ],
)
async def test_the_reward_is_in_a_file(redis_url: str, run: str, written: str, ended: dict[str, str]) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            ends = f"open(os.environ['STREAMADV_REWARD_FILE'], 'w').write({written!r})"
            (answer,) = await running(gateway, ends, reward="file").play()
    assert answer is not None
    assert answer.items() >= ended.items(), answer


async def test_the_reward_is_what_a_judge_answers(redis_url: str, run: str) -> None:
    async def judge(request: web.Request) -> web.Response:
        told.append(await request.json())
        return web.json_response(0.5)

    told: list[Any] = []
    app = web.Application()
    app.router.add_post("/judge", judge)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}/judge".format(*runner.addresses[0])
    try:
        with serving(talkative()) as engine:
            async with playing(redis_url, run, engine) as gateway:
                (answer,) = await running(gateway, "sys.exit(3)", reward=url).play()
    finally:
        await runner.cleanup()
    assert answer is not None
    assert answer["result"] == "pushed"
    assert [(one["exit_status"], one["rollout"].count("/")) for one in told] == [(3, 1)]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("time.sleep(600)", "not ended within 2 s"),
    ],
)
async def test_a_process_that_does_not_end_by_itself_fails(
    redis_url: str, run: str, ends: str, words: str
) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (answer,) = await running(gateway, ends, timeout_s=2.0).play()
    assert answer is not None
    assert words in answer["detail"]
    joined = open_run(Connection(redis_url), run)
    group_all(joined)
    assert problems(joined) == []


async def test_who_is_told_to_end_ends_processes_and_rollouts(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            ends = (
                f"child = os.fork() or time.sleep(600); open({str(pid) + '-'!r}, 'w').write(str(child)); "
                f"os.rename({str(pid) + '-'!r}, {str(pid)!r}); time.sleep(600)"
            )
            task = asyncio.create_task(running(gateway, ends).play())
            while not pid.exists():  # noqa: ASYNC110  a file has no event
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not len(gateway.front.sessions)
            while is_alive(int(pid.read_text())):  # noqa: ASYNC110  nor has a process of somebody else
                await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_the_command(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            words = ["gateway", "run", "--gateway", gateway.url, "--run", run, "--size", "2", "--groups", "2"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "streamadv", *words, "--", sys.executable, "-c", AGENT, "print('--')",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await process.communicate()
    assert process.returncode == 0
    lines = out.decode().splitlines()
    assert sorted(line for line in lines if line == "--") == ["--"] * 4
    assert [json.loads(line)["result"] for line in lines if line != "--"] == ["pushed"] * 4
    assert len(pushed(redis_url, run)) == 4


def test_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gateway", "run", "--gateway", "http://127.0.0.1:1"]) == 1
    assert "behind `--`" in capsys.readouterr().err
    with pytest.raises(SettingError, match="exit, file or a URL"):
        Running("http://127.0.0.1:1", "key", ["true"], "judge")
