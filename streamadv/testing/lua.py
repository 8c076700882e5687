"""Lua scripts on a `Store`: one interpreter for the process, each text compiled once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import lupa.lua51 as lupa  # type: ignore[import-untyped]

from .values import COMMANDS, Refusal, Status

if TYPE_CHECKING:
    from .server import Server

_SETUP: Final = """
function(call, pcall_, encode, decode, null)
  redis = {call = call, pcall = pcall_,
    error_reply = function(text) return {err = text} end,
    status_reply = function(text) return {ok = text} end,
    sha1hex = nil, log = function() end}
  server = redis
  cjson = {encode = encode, decode = decode, null = null}
  os, io, require, python = nil
  return function(script, keys, args)
    KEYS, ARGV = keys, args
    local went_well, value = pcall(script)
    return went_well, value
  end
end
"""


class Scripts:
    """The interpreter. `run` is not reentrant: a script runs to its end."""

    def __init__(self) -> None:
        self._lua = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self._table = self._lua.table_from
        self._null = object()
        self._run = self._lua.eval(_SETUP)(self._call, self._pcall, self._encode, self._decode, self._null)
        self._compile = cache(self._lua.compile)
        self._server: Server | None = None
        self._has_written = False

    def run(self, server: Server, text: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """The reply of a script. Raises Refusal."""
        self._server, self._has_written = server, False
        went_well, value = self._run(self._compile(text), self._table(keys), self._table(args))
        if went_well:
            return self._reply(value, outermost=True)
        if isinstance(value, Exception):
            raise value
        text = value[b"err"] if lupa.lua_type(value) == "table" else b"ERR %b" % value
        raise Refusal(text.decode(errors="replace"))

    def _call(self, name: bytes, *args: Any) -> Any:
        assert self._server is not None
        name = name.upper()
        value = self._server.in_script(name, [_argument(arg) for arg in args], self._has_written)
        self._has_written = self._has_written or COMMANDS[name].writes
        return self._value(value)

    def _pcall(self, *args: Any) -> Any:
        try:
            return self._call(*args)
        except Refusal as error:
            return self._table({b"err": str(error).encode()})

    def _value(self, reply: Any) -> Any:
        """A reply as Lua has it."""
        if reply is None:
            return False
        if isinstance(reply, list):
            return self._table([self._value(item) for item in reply])
        return self._table({b"ok": bytes(reply)}) if isinstance(reply, Status) else reply

    def _reply(self, value: Any, outermost: bool = False) -> Any:
        """What Lua returned as a reply."""
        if isinstance(value, bool):
            return 1 if value else None
        if isinstance(value, float):
            return int(value)
        if lupa.lua_type(value) != "table":
            return value
        if (text := value[b"err"]) is not None:
            refusal = Refusal(text.decode(errors="replace"))
            if outermost:
                raise refusal
            return refusal
        if (text := value[b"ok"]) is not None:
            return Status(text)
        items: list[Any] = []
        while (item := value[len(items) + 1]) is not None:
            items.append(self._reply(item))
        return items

    def _encode(self, value: Any) -> bytes:
        return json.dumps(self._plain(value), separators=(",", ":")).encode()

    def _plain(self, value: Any) -> Any:
        if value is self._null:
            return None
        if isinstance(value, bytes):
            return value.decode("utf-8", "surrogateescape")
        if lupa.lua_type(value) != "table":
            return value
        keys = list(value)
        if keys and all(isinstance(key, int) for key in keys):
            return [self._plain(value[at + 1]) for at in range(len(keys))]
        return {key.decode() if isinstance(key, bytes) else str(key): self._plain(value[key]) for key in keys}

    def _decode(self, text: bytes) -> Any:
        try:
            return self._lua_value(json.loads(text))
        except (ValueError, TypeError) as error:
            raise Refusal(f"Expected value but found invalid token: {error}") from None

    def _lua_value(self, value: Any) -> Any:
        if value is None:
            return self._null
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, list):
            return self._table([self._lua_value(item) for item in value])
        if isinstance(value, dict):
            return self._table({key.encode(): self._lua_value(item) for key, item in value.items()})
        return value


def _argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return b"%.17g" % value
    if isinstance(value, int) and not isinstance(value, bool):
        return b"%d" % value
    raise Refusal("ERR Lua redis lib command arguments must be strings or integers")


@cache
def scripts() -> Scripts:
    """The interpreter of this process."""
    return Scripts()
