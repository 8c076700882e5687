"""The Lua scripts: what their headers say, calling them by name, and sending the calls.

Every change of state is one script in `lua/`, in the folder of its life cycle. Callers name the script, its arguments
and the keys that only they know; `load` reads the rest from the script's header:

    -- KEYS  void, trainer, group, stream: rollouts | scoring, payloads: payload ..., (outputs: output ...)
    -- fenced by trainer

The script finds its keys in the Lua table `keys` (`keys.trainer`), a list among them as `keys.payloads[1]`.

- `trainer` is the attribute of that name of ShardKeys. Nobody passes it.
- `group` is a method of ShardKeys: the caller gives its parameter, `group=group_id`.
- `stream: rollouts | scoring` is a key of one of these kinds that the caller gives in full, `stream=keys.rollouts`.
  The kind `void` stands for "there is none".
- `payloads: payload ...` is a list of keys, `payloads=[...]`. It comes last.
- `(outputs: output ...)` is declared for the server only: the script knows these keys by its arguments. A list before
  them has them at its end too.
- A `void` at the start, which never exists, is deleted before anything else. Over `maxmemory` a server refuses a script
  whose first write needs memory, so every script does this except those that bring data in (`push`, `begin`,
  `columns`). With a key `kept` the script asks before that whether there is memory, by a write that changes
  nothing: `has_memory`.
- `fenced by trainer`: the first argument is the caller's epoch and session, `Progress.fence`. When the hash
  `keys.trainer` has a higher epoch, or the same one of another session (a server may have lost that of a session
  before), the script changes nothing and `Shard.call` raises EpochFencedError. In the script `ARGV[1]` is the epoch,
  `session` the session.

Pipeline processes call scripts through a shard of their run:

    run.shards[0].call("sweep", items, payloads=payload_keys)
    run.home.call("trained", [fence, version, groups, "", "", ""], version=run.home.keys.session)

Producers make the call and leave it to their generator's driver to send it:

    yield script_call("touch", keys, [group_id, deadline_ms, producer], group=group_id)

`-- include name` is replaced by `lua/lib/name.lua`, whose KEYS line names what the script has to have. It stands in a
function where few calls need it: a script makes its functions anew in every call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Final, NamedTuple

from redis.exceptions import NoScriptError

from .connection import AsyncConnection, Connection
from .exchange import UNREGISTERED_MS, Client, Payloads, as_buffer
from .keys import EntryKeys, ShardKeys
from .pipelined import Pipelined
from .retry import RETRYABLE, not_now

_LUA = resources.files("streamadv") / "lua"
_LIB = "lib"
_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
#: Left out of what travels; the lines stay, because a script's errors name them.
_INDENT_OR_COMMENT = re.compile(r"^[ \t]+|[ \t]*--.*$", re.MULTILINE)
_KEYS = re.compile(r"^-- KEYS  (.*(?:\n-- {7}.*)*)", re.MULTILINE)
_KEY = re.compile(r"(\()?(\w+)(?:: (\w+(?: \| \w+)*))?( \.\.\.)?\)?")
_FENCE = re.compile(r"^-- fenced by (\w+)$", re.MULTILINE)

#: A write that changes nothing, as `void` is never there; above maxmemory it is refused.
ASK_FOR_MEMORY: Final = "local has_memory=type(redis.pcall('LPUSHX',KEYS[1],''))=='number'"
#: Reply of a fenced script to an older caller.
FENCED: Final = -1
#: Turns away who is fenced by the hash NAME.
_FENCE_CODE: Final = (
    "local held,session=redis.call('HMGET',keys.NAME,'epoch','session'),string.match(ARGV[1],' (.*)') "
    "ARGV[1]=string.match(ARGV[1],'^%d+') "
    "if tonumber(ARGV[1])<(tonumber(held[1] or '') or 0) "
    "or (ARGV[1]==held[1] and held[2] and session~=held[2]) "
    f"then return {FENCED} end"
)


class Key(NamedTuple):
    """One name in the KEYS line of a script."""

    name: str
    kinds: tuple[str, ...]  # attributes of ShardKeys or EntryKeys, one of which it is
    from_caller: bool  # whether the caller gives it in full, under this name
    is_list: bool
    is_declared: bool  # whether it is there for the server only

    @property
    def is_void(self) -> bool:
        """Whether it never exists: deleting it is a write that needs no memory."""
        return self.name.endswith("void") and not self.is_declared


class Script(NamedTuple):
    """A Lua script with what it includes, and the SHA-1 by which a server knows it."""

    name: str
    text: str
    sha: str
    keys: tuple[Key, ...]
    fence: str | None  # which of the keys has the epoch that fences older callers


class ScriptCall(NamedTuple):
    """One call of a script, ready to be sent by a sync or an asyncio client."""

    script: Script
    arguments: Sequence[Any]
    """Of EVALSHA behind the hash, and of EVAL behind the text, for a server that does not know the script."""


@cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    """Folder -> name -> text. All are read at the first call: later the process may have no file descriptor left."""
    return {
        folder.name: {file.name.removesuffix(".lua"): file.read_text() for file in folder.iterdir()}
        for folder in _LUA.iterdir()
        if folder.is_dir()
    }


@cache
def files() -> Mapping[str, str]:
    """Name of each script -> the text of its file."""
    scripts = {
        name: text for folder, texts in _texts().items() if folder != _LIB for name, text in texts.items()
    }
    return dict(sorted(scripts.items()))


def source(name: str) -> str:
    """The file of the script `name` with what it includes."""
    return _with_includes(files()[name])


def _with_includes(text: str) -> str:
    return _INCLUDE.sub(lambda match: _with_includes(_texts()[_LIB][match[1]]), text)


@cache
def load(name: str) -> Script:
    """The script `name`: its key table, its fence, then its source without indentation and comments."""
    text = source(name)
    keys = parse_keys(text)
    fence = found[1] if (found := _FENCE.search(text)) else None
    # In front of the first line, which is a comment and thereby empty: no other line gets another number.
    text = _prologue(keys, fence) + _INDENT_OR_COMMENT.sub("", text)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, text, sha, keys, fence)


def parse_keys(text: str) -> tuple[Key, ...]:
    """What the first KEYS lines of a script name. Raises ValueError when they are not of the form above."""
    header = _KEYS.search(text)
    if header is None:
        raise ValueError(f"no KEYS line: {text[:100]!r}")
    items = re.split(r",\s+", header[1].replace("\n--", " ").strip())
    matches = [_KEY.fullmatch(item) for item in items]
    if None in matches:
        raise ValueError(f"KEYS line {header[1]!r}: {items[matches.index(None)]!r} is no key")
    return tuple(
        Key(
            match[2],
            tuple(match[3].split(" | ")) if match[3] else (match[2],),
            from_caller=match[3] is not None,
            is_list=match[4] is not None,
            is_declared=match[1] is not None,
        )
        for match in matches
        if match is not None
    )


def _prologue(keys: Sequence[Key], fence: str | None) -> str:
    """Lua that asks for memory, deletes `void`, makes the table `keys` and turns away who is fenced. One line."""
    used = [(i, key) for i, key in enumerate(keys, 1) if not (key.is_void or key.is_declared)]
    parts = ["redis.call('DEL',KEYS[1])"] if keys[0].is_void else []
    if any(key.name == "kept" for key in keys):
        parts.insert(0, ASK_FOR_MEMORY)
    parts.append(f"local keys={{{','.join(f'{key.name}=KEYS[{i}]' for i, key in used if not key.is_list)}}}")
    for i, key in used:
        if key.is_list:
            parts.append(f"keys.{key.name}={{}} for i={i},#KEYS do keys.{key.name}[i-{i - 1}]=KEYS[i] end")
    if fence is not None:
        parts.append(_FENCE_CODE.replace("NAME", fence))
    return " ".join(parts)


@lru_cache(4096)
def _template(
    name: str, keys: ShardKeys | EntryKeys
) -> tuple[Sequence[str | None], Sequence[tuple[int, Key]]]:
    """The script's keys, None for those that the shard does not have once; and these with their places, last first."""
    found = [None if key.from_caller else getattr(keys, key.name) for key in load(name).keys]
    template = [key if isinstance(key, str) else None for key in found]
    places = [place for place, key in enumerate(template) if key is None]
    return template, [(place, load(name).keys[place]) for place in reversed(places)]


def script_call(
    name: str, keys: ShardKeys | EntryKeys, args: Sequence[Any] = (), **caller_keys: Any
) -> ScriptCall:
    """A call of the script `name` with these arguments, in the order of its ARGV lines.

    keys: of the shard. caller_keys: what the script's KEYS lines leave to the caller. Raises TypeError when one is
    missing or the script has none of that name.
    """
    template, missing = _template(name, keys)
    names: list[Any] = list(template)
    for place, key in missing:  # from the end, so that a list shifts nothing that is still to come
        if key.name not in caller_keys:
            raise TypeError(f"script {name}: {key.name}= is missing")
        given = caller_keys.pop(key.name)
        if key.is_list:
            names[place : place + 1] = given
        else:
            names[place] = given if key.from_caller else getattr(keys, key.name)(given)
    if caller_keys:
        raise TypeError(f"script {name} takes no {', '.join(caller_keys)}")
    return ScriptCall(load(name), [len(names), *names, *args])


# Sending calls: by hash, by text if the server does not know the script, or with payloads in one MULTI


def run_script(client: Any, call: ScriptCall) -> Any:
    """Execute `call`, sending the text once to a server that does not know the hash."""
    try:
        return client.evalsha(call.script.sha, *call.arguments)
    except NoScriptError:
        return client.eval(call.script.text, *call.arguments)


async def run_script_async(client: Any, call: ScriptCall) -> Any:
    """`run_script` for an asyncio client."""
    try:
        return await client.evalsha(call.script.sha, *call.arguments)
    except NoScriptError:
        return await client.eval(call.script.text, *call.arguments)


def run_transaction(connection: Connection, payloads: Payloads, call: ScriptCall) -> Any:
    """MULTI: write the hashes, then run `call`, whose reply is returned. Never sends a hash twice.

    A server that does not know the script is sent its text: the hashes are there, or the script finds them gone.
    """
    client: Any = connection.push
    try:
        try:
            if isinstance(client, Client):
                return client.transact(payloads, ("EVALSHA", call.script.sha, *call.arguments))
            with not_now():
                return _fill(client.pipeline(transaction=True), payloads, call).execute()[-1]
        except NoScriptError:
            return client.eval(call.script.text, *call.arguments)
    except RETRYABLE:
        connection.note_failed_push()
        raise


async def run_transaction_async(connection: AsyncConnection, payloads: Payloads, call: ScriptCall) -> Any:
    """`run_transaction` for asyncio."""
    client: Any = connection.pipelined or connection.push
    try:
        try:
            if isinstance(client, Pipelined):
                return await client.transact(payloads, ("EVALSHA", call.script.sha, *call.arguments))
            with not_now():
                async with client.pipeline(transaction=True) as pipe:
                    return (await _fill(pipe, payloads, call).execute())[-1]
        except NoScriptError:
            return await client.eval(call.script.text, *call.arguments)
    except RETRYABLE:
        await connection.note_failed_push()
        raise


def _fill(pipe: Any, payloads: Payloads, call: ScriptCall) -> Any:
    for key, fields in payloads:
        pipe.hset(key, mapping={name: as_buffer(value) for name, value in fields.items()})
        pipe.pexpire(key, UNREGISTERED_MS)
    pipe.execute_command("EVALSHA", call.script.sha, *call.arguments)  # a cluster's pipeline has no `evalsha`
    return pipe


def server_ids(connection: Connection, shards: Sequence[ShardKeys]) -> list[str | None]:
    """The id of the server that has each shard, None where a server does not tell.

    The id changes when the server restarts or another one takes over: recent writes may be lost then. This asks the
    client that pushes, because each client of a cluster has its own view of who is primary.
    """
    return ids_of([run_script(connection.push, call) for call in server_id_calls(connection, shards)], shards)


async def server_ids_async(connection: AsyncConnection, shards: Sequence[ShardKeys]) -> list[str | None]:
    """`server_ids` for asyncio."""
    client = connection.pipelined or connection.push
    replies = [await run_script_async(client, call) for call in server_id_calls(connection, shards)]
    return ids_of(replies, shards)


def server_id_calls(
    connection: Connection | AsyncConnection, shards: Sequence[ShardKeys]
) -> list[ScriptCall]:
    """One call for each shard of a cluster; elsewhere one server has all shards."""
    return [script_call("server_id", keys) for keys in (shards if connection.is_cluster else shards[:1])]


def ids_of(replies: Sequence[bytes | None], shards: Sequence[ShardKeys]) -> list[str | None]:
    """The ids from the replies to `server_id_calls`."""
    ids = [None if reply is None else reply.decode() for reply in replies]
    return ids * (len(shards) // len(ids))
