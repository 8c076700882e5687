"""Sends script calls: by hash, by text if the server does not know the script, or with payloads in one MULTI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from .clients import Client
from .connection import AsyncConnection, Connection
from .exchange import UNREGISTERED_MS, Payloads, as_buffer
from .keys import ShardKeys
from .retry import RETRYABLE, not_now
from .scripts import ScriptCall, script_call


def run_script(client: Any, call: ScriptCall) -> Any:
    """Execute `call`, sending the text once to a server that does not know the hash."""
    try:
        return client.evalsha(*call.by_hash)
    except NoScriptError:
        return client.eval(*call.by_text)


async def run_script_async(client: Any, call: ScriptCall) -> Any:
    """`run_script` for an asyncio client."""
    try:
        return await client.evalsha(*call.by_hash)
    except NoScriptError:
        return await client.eval(*call.by_text)


def run_transaction(connection: Connection, payloads: Payloads, call: ScriptCall) -> Any:
    """MULTI: write the hashes, then run `call`, whose reply is returned. Never sends a hash twice.

    A server that does not know the script is sent its text: the hashes are there, or the script finds them gone.
    """
    client = connection.push
    if not isinstance(client, Client):
        return _run_in_pipeline(connection, client, payloads, call)
    try:
        return client.transact(payloads, ("EVALSHA", *call.by_hash))
    except NoScriptError:
        return client.eval(*call.by_text)


def _run_in_pipeline(connection: Connection, client: Any, payloads: Payloads, call: ScriptCall) -> Any:
    try:
        with not_now():
            try:
                return _fill(client.pipeline(transaction=True), payloads, call).execute()[-1]
            except NoScriptError:
                return client.eval(*call.by_text)
    except RETRYABLE:
        connection.note_failed_push()
        raise


async def run_transaction_async(connection: AsyncConnection, payloads: Payloads, call: ScriptCall) -> Any:
    """`run_transaction` for asyncio."""
    if (pipelined := connection.pipelined) is not None:
        try:
            return await pipelined.transact(payloads, ("EVALSHA", *call.by_hash))
        except NoScriptError:
            return await pipelined.eval(*call.by_text)
    try:
        with not_now():
            try:
                async with connection.push.pipeline(transaction=True) as pipe:
                    return (await _fill(pipe, payloads, call).execute())[-1]
            except NoScriptError:
                return await connection.push.eval(*call.by_text)
    except RETRYABLE:
        await connection.note_failed_push()
        raise


def _fill(pipe: Any, payloads: Payloads, call: ScriptCall) -> Any:
    for key, fields in payloads:
        pipe.hset(key, mapping={name: as_buffer(value) for name, value in fields.items()})
        pipe.pexpire(key, UNREGISTERED_MS)
    pipe.execute_command("EVALSHA", *call.by_hash)  # a cluster's pipeline has no `evalsha`
    return pipe


def server_ids(connection: Connection, shards: Sequence[ShardKeys]) -> list[str | None]:
    """The id of the server that has each shard, None where a server does not tell.

    The id changes when the server restarts or another one takes over: recent writes may be lost then. This asks the
    client that pushes, because each client of a cluster has its own view of who is primary.
    """
    replies = [run_script(connection.push, call) for call in _server_id_calls(connection, shards)]
    return _ids(replies, len(shards))


def server_ids_with(
    connection: Connection, shards: Sequence[ShardKeys], pipe: Any
) -> tuple[list[str | None], list[Any]]:
    """`server_ids` for the client that runs scripts, and the replies to the reads in its pipeline `pipe`.

    One server says both at once.
    """
    calls = _server_id_calls(connection, shards)
    if connection.is_cluster:
        return _ids([run_script(connection.scripts, call) for call in calls], len(shards)), pipe.execute()
    pipe.execute_command("EVALSHA", *calls[0].by_hash)
    *replies, server_id = pipe.execute(raise_on_error=False)
    if isinstance(server_id, NoScriptError):
        server_id = run_script(connection.scripts, calls[0])
    for reply in (*replies, server_id):
        if isinstance(reply, Exception):
            raise reply
    return _ids([server_id], len(shards)), replies


async def server_ids_async(connection: AsyncConnection, shards: Sequence[ShardKeys]) -> list[str | None]:
    """`server_ids` for asyncio."""
    client = connection.pipelined or connection.push
    replies = [await run_script_async(client, call) for call in _server_id_calls(connection, shards)]
    return _ids(replies, len(shards))


def _server_id_calls(
    connection: Connection | AsyncConnection, shards: Sequence[ShardKeys]
) -> list[ScriptCall]:
    """One call for each shard of a cluster; elsewhere one server has all shards."""
    return [script_call("server_id", keys) for keys in (shards if connection.is_cluster else shards[:1])]


def _ids(replies: Sequence[bytes | None], shards: int) -> list[str | None]:
    ids = [None if reply is None else reply.decode() for reply in replies]
    return ids * (shards // len(ids))
