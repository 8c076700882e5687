"""The Lua scripts: loading, and calling them by their hash.

Every change of state is one script in `lua/`, in the folder of its life cycle; each file opens with its keys,
arguments and returns. Callers say its plain name, which no other folder has. A line `-- include name` is
replaced by `lua/lib/name.lua`. All scripts but `push` and `begin` first delete a key that never exists: over
`maxmemory` a server refuses a script whose first write needs memory, and these are the ones that let a full
server drain.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from .clients import Client, Payloads
from .connection import AsyncConnection, Connection
from .resp import as_buffer
from .retry import RETRYABLE, closed_under_way, not_now

_LUA = resources.files("streamadv") / "lua"
_LIB = "lib"
_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
#: Left out of what travels; the lines stay, as a script's errors name them.
_INDENT_OR_COMMENT = re.compile(r"^[ \t]+(?:--.*)?|^--.*", re.MULTILINE)


class Script(NamedTuple):
    """A Lua script with what it includes, and the SHA-1 by which a server knows it."""

    name: str
    text: str
    sha: str


class ScriptCall(NamedTuple):
    """One call of a script, ready to be sent by a sync or an asyncio client."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Any]

    @property
    def by_text(self) -> tuple[Any, ...]:
        """Arguments of EVAL: inside MULTI a hash unknown to a restarted server would fail after the HSETs."""
        return (self.script.text, len(self.keys), *self.keys, *self.args)

    @property
    def by_hash(self) -> tuple[Any, ...]:
        """Arguments of EVALSHA."""
        return (self.script.sha, len(self.keys), *self.keys, *self.args)


@cache
def files() -> Mapping[str, Traversable]:
    """Name of each script -> its file."""
    folders = [folder for folder in _LUA.iterdir() if folder.is_dir() and folder.name != _LIB]
    scripts = {file.name.removesuffix(".lua"): file for folder in folders for file in folder.iterdir()}
    return dict(sorted(scripts.items()))


@cache
def load(name: str) -> Script:
    """The script `name` with its includes, less indentation and comment lines."""
    text = files()[name].read_text()
    text = _INCLUDE.sub(lambda match: (_LUA / _LIB / f"{match[1]}.lua").read_text(), text)
    text = _INDENT_OR_COMMENT.sub("", text)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def script_call(name: str, keys: Sequence[str], args: Sequence[Any] = ()) -> ScriptCall:
    """A call of the script `name`; keys and arguments in the order its first lines give."""
    return ScriptCall(load(name), keys, args)


def run_script(client: Any, call: ScriptCall) -> Any:
    """Execute `call`, sending the text once to a server that does not know the hash."""
    try:
        return client.evalsha(*call.by_hash)
    except NoScriptError:
        return client.eval(*call.by_text)


async def run_script_async(client: Any, call: ScriptCall) -> Any:
    """`run_script` for an asyncio client."""
    with closed_under_way():
        try:
            return await client.evalsha(*call.by_hash)
        except NoScriptError:
            return await client.eval(*call.by_text)


def run_transaction(connection: Connection, payloads: Payloads, call: ScriptCall) -> Any:
    """MULTI: write the hashes, then run `call`, whose reply is returned. Never sent twice."""
    client = connection.push
    try:
        if isinstance(client, Client):
            return client.transact(payloads, ("EVAL", *call.by_text))
        pipe = client.pipeline(transaction=True)
        with not_now():
            return _fill(pipe, payloads, call).execute()[-1]
    except RETRYABLE:
        connection.note_failed_push()
        raise


async def run_transaction_async(connection: AsyncConnection, payloads: Payloads, call: ScriptCall) -> Any:
    """`run_transaction` for asyncio."""
    try:
        with closed_under_way(), not_now():
            async with connection.push.pipeline(transaction=True) as pipe:
                return (await _fill(pipe, payloads, call).execute())[-1]
    except RETRYABLE:
        await connection.note_failed_push()
        raise


def _fill(pipe: Any, payloads: Payloads, call: ScriptCall) -> Any:
    for key, fields in payloads:
        pipe.hset(key, mapping={name: as_buffer(value) for name, value in fields.items()})
    pipe.execute_command("EVAL", *call.by_text)  # as a plain command: a cluster's pipeline has no `eval`
    return pipe


def server_ids(connection: Connection, keys: Sequence[str]) -> list[str | None]:
    """For each key which server has it, and since when, None where it does not tell.

    The id changes when that server restarts or another one takes over, which may have lost the last moments. Asked
    where pushes go, as each client of a cluster has its own idea of who is primary.
    """
    asked = _asked(connection, keys)
    found = [_text(run_script(connection.push, script_call("server_id", [key]))) for key in asked]
    return found * (len(keys) // len(found))


async def server_ids_async(connection: AsyncConnection, keys: Sequence[str]) -> list[str | None]:
    """`server_ids` for asyncio."""
    asked = _asked(connection, keys)
    found = [_text(await run_script_async(connection.push, script_call("server_id", [key]))) for key in asked]
    return found * (len(keys) // len(found))


def _asked(connection: Connection | AsyncConnection, keys: Sequence[str]) -> Sequence[str]:
    """One server has all keys, but in a cluster."""
    return keys if connection.is_cluster else keys[:1]


def _text(reply: bytes | None) -> str | None:
    return None if reply is None else reply.decode()
