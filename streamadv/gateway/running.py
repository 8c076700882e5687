"""Rollouts that are processes: each finds its engine in its environment, and ends its rollout when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any, Final

from ..errors import SettingError, StreamadvError
from ..launcher import ending_with_parent
from ..messages import brief, log_fields, one_line
from ..store.urls import PREFIX
from .access import Access, AgainError, post

logger = logging.getLogger(__name__)

EXIT: Final = "exit"
FILE: Final = "file"
#: Names the file into which the process of a rollout writes its reward.
REWARD_FILE: Final = "STREAMADV_REWARD_FILE"
#: Bytes that are read of it.
MAX_REWARD: Final = 1 << 20
#: Seconds between SIGTERM and SIGKILL for a process that is told to end.
END_S: Final = 10.0
#: Seconds that one request for a group waits for admission; then the next one does.
ADMISSION_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """How the processes of a group run."""

    url: str
    """Of the gateway."""
    key: str = field(repr=False)
    """The operator's, which begins groups."""
    command: Sequence[str]
    reward: str = EXIT
    """`exit`: 1 for exit status 0, else 0. `file`: what the process has written to STREAMADV_REWARD_FILE. A URL:
    what it answers to a POST of rollout and exit_status."""
    timeout_s: float | None = None
    """After which a process is ended, and its rollout fails."""
    group: Mapping[str, Any] = field(default_factory=dict)
    """Of `POST /v1/groups`: size, data_source, metadata ..."""

    def __post_init__(self) -> None:
        if not self.command:
            raise SettingError("there is no command behind `--`: write the one that plays a rollout")
        if which(self.command[0]) is None:
            raise SettingError(f"{brief(self.command[0])}: no such command, give its path")
        if self.reward not in (EXIT, FILE) and not self.reward.startswith(("http://", "https://")):
            raise SettingError(f"--reward is {brief(self.reward)}, needs exit, file or a URL")

    async def play(self) -> list[dict[str, Any] | None]:
        """Begin a group, play all its rollouts; what the gateway says of each end, None where it could not be told."""
        begun = await self._ask("groups", {"timeout_s": ADMISSION_S, **self.group})
        # What agents run must not find by what others end rollouts, or reach the run's server.
        clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        with tempfile.TemporaryDirectory(prefix="streamadv-") as folder:
            playing = [
                asyncio.create_task(self._play(f"{begun['group']}/{one['index']}", one, clean, Path(folder)))
                for one in begun["rollouts"]
            ]
            try:
                return await asyncio.gather(*playing)
            except asyncio.CancelledError:
                await asyncio.gather(*playing, return_exceptions=True)  # they end their rollouts
                raise

    async def finish(self) -> None:
        """Tell the gateway that no more groups come, so that a run of finite data ends."""
        await self._ask("finish", {})

    async def _ask(self, what: str, said: Mapping[str, Any]) -> Any:
        """The answer to an operator's request, however long the gateway does not answer or has to wait itself."""
        is_told, body = False, json.dumps(said).encode()
        while True:
            try:
                return await asyncio.to_thread(post, f"{self.url}/v1/{what}", self.key, body)
            except AgainError as error:
                if not is_told:
                    logger.warning("waiting: %s", error, extra=log_fields("gateway_waits", role="gateway"))
                is_told = True
                await asyncio.sleep(1.0)

    async def _play(
        self, name: str, rollout: Mapping[str, Any], clean: Mapping[str, str], folder: Path
    ) -> dict[str, Any] | None:
        access = Access(rollout["base_url"], rollout["api_key"], rollout["close_key"])
        file = folder / str(rollout["index"])
        environment = {**clean, **access.environment, "STREAMADV_ROLLOUT": name, REWARD_FILE: str(file)}
        try:
            said = await self._run(name, environment, file)
        except asyncio.CancelledError:
            said = {"fail": "the process was told to end", "reason": "aborted"}
            await self._end(name, access, said)
            raise
        return await self._end(name, access, said)

    async def _end(self, name: str, access: Access, said: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            try:
                return await access.end(**said)
            except StreamadvError as error:
                if "fail" in said:
                    raise
                logger.warning("rollout %s: %s", name, error, extra=log_fields("end_refused", role="gateway"))
                return await access.end(fail=one_line(str(error)))
        except StreamadvError as error:
            fields = log_fields("rollout_not_ended", role="gateway")
            logger.error("rollout %s could not be ended: %s", name, error, extra=fields)
            return None

    async def _run(self, name: str, environment: Mapping[str, str], file: Path) -> dict[str, Any]:
        """Run the process; what `Access.end` is told."""
        program, *arguments = self.command
        command = ending_with_parent([which(program) or program, *arguments], signal.SIGTERM)
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await process.wait()
        except TimeoutError:
            return {"fail": f"the process has not ended within {self.timeout_s:g} s", "reason": "aborted"}
        finally:
            await _end_processes(process)
        if status < 0:
            return {"fail": f"the process was ended by {signal.Signals(-status).name}", "reason": "aborted"}
        try:
            return await self._rewarded(name, status, file)
        except (OSError, ValueError, TypeError, StreamadvError, AgainError) as error:
            return {"fail": f"no reward: {one_line(str(error))}"}

    async def _rewarded(self, name: str, status: int, file: Path) -> dict[str, Any]:
        if self.reward == EXIT:
            return {"reward": float(status == 0)}
        if self.reward == FILE:
            found = json.loads(await asyncio.to_thread(_written, file))
        else:
            body = json.dumps({"rollout": name, "exit_status": status}).encode()
            found = await asyncio.to_thread(post, self.reward, None, body)
        said = found if isinstance(found, dict) else {"reward": found}
        if unknown := sorted(said.keys() - {"reward", "rewards", "status", "metadata", "fail", "reason"}):
            raise ValueError(f"{brief(unknown[0])} is no field of an end")
        return said


def _written(file: Path) -> bytes:
    """What a process has written, who may have put anything in the file's place. Raises OSError, ValueError."""
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(number, "rb") as opened:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError(f"{REWARD_FILE} is no file any more")
        data = opened.read(MAX_REWARD + 1)
    if len(data) > MAX_REWARD:
        raise ValueError(f"{REWARD_FILE} has more than {MAX_REWARD} bytes")
    return data


async def _end_processes(process: asyncio.subprocess.Process) -> None:
    """End a process with all that it has started."""
    _signal(process, signal.SIGTERM)
    if process.returncode is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
    _signal(process, signal.SIGKILL)
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
