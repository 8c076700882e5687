"""The commands of streams, and with them all that streamadv uses of a server."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from .keyspace import Keyspace
from .values import LAST_ID, OK, ConsumerGroup, Id, Pending, Refusal, Stream, command, id_of, id_text, whole


class Store(Keyspace):
    @command(needs_memory=True)
    def xadd(self, key: bytes, *args: bytes) -> Any:
        rest, limit = list(args), None
        if rest[0].upper() == b"MAXLEN":
            rest = rest[2 if rest[1] == b"~" else 1 :]
            limit = whole(rest.pop(0))
        wanted, *fields = rest
        if wanted != b"*" or not fields or len(fields) % 2:
            raise Refusal("ERR this world knows XADD with `*`, and pairs of fields and values")
        stream = self._make(key, Stream)
        now, (last_ms, number) = self.now_ms(), stream.last
        stream.last = entry = (now, 0) if now > last_ms else (last_ms, number + 1)
        stream.ids.append(entry)
        stream.entries[entry] = fields
        if limit is not None:
            for gone in stream.ids[: max(0, len(stream.ids) - limit)]:
                del stream.entries[gone]
            stream.ids = stream.ids[-limit:] if limit else []
        self.added.add(key)
        return id_text(entry)

    @command(writes=True)
    def xdel(self, key: bytes, *names: bytes) -> Any:
        stream = self._get(key, Stream)
        if stream is None:
            return 0
        gone = 0
        for entry in map(id_of, names):
            if stream.entries.pop(entry, None) is not None:
                del stream.ids[bisect_left(stream.ids, entry)]
                gone += 1
        return gone

    @command()
    def xlen(self, key: bytes) -> Any:
        stream = self._get(key, Stream)
        return len(stream.ids) if stream else 0

    @command()
    def xrange(self, key: bytes, first: bytes, last: bytes, *options: bytes, step: int = 1) -> Any:
        stream = self._get(key, Stream)
        ids = _between(stream.ids, first, last)[::step] if stream else []
        return [_entry(stream, each) for each in (ids[: whole(options[1])] if options else ids)]

    @command()
    def xrevrange(self, key: bytes, last: bytes, first: bytes, *options: bytes) -> Any:
        return self.xrange(key, first, last, *options, step=-1)

    @command()
    def xread(self, *args: bytes) -> Any:
        options, keys, starts = _read_arguments(args)
        found = []
        for key, start in zip(keys, starts, strict=True):
            stream = self._get(key, Stream)
            if stream is None or start == b"$":
                continue
            if ids := stream.after(id_of(start), options.get(b"COUNT")):
                found.append([key, [_entry(stream, each) for each in ids]])
        return found or None

    @command(writes=True)
    def xreadgroup(self, *args: bytes) -> Any:
        options, keys, starts = _read_arguments(args[3:])
        name, consumer = args[1], args[2]
        found = []
        for key, start in zip(keys, starts, strict=True):
            stream, group = self._group(key, name, "XREADGROUP with GROUP option")
            group.consumers[consumer] = self.now_ms()
            count = options.get(b"COUNT")
            if start == b">":
                ids = stream.after(group.last, count)
                for each in ids:
                    group.pending[each] = Pending(consumer, self.now_ms(), 1)
                if not ids:
                    continue
                group.last = ids[-1]
            else:
                own = [each for each in sorted(group.pending) if group.pending[each].consumer == consumer]
                ids = own[bisect_right(own, id_of(start)) :][:count]
            found.append([key, [_entry(stream, each) for each in ids]])
        return found or None

    def _group(self, key: bytes, name: bytes, what: str) -> tuple[Stream, ConsumerGroup]:
        stream = self._get(key, Stream)
        if stream is None or name not in stream.groups:
            text = f"No such key '{key.decode()}' or consumer group '{name.decode()}'"
            raise Refusal(f"NOGROUP {text} in {what}")
        return stream, stream.groups[name]

    @command(writes=True)
    def xgroup(self, what: bytes, key: bytes, name: bytes, *args: bytes) -> Any:
        match what.upper():
            case b"CREATE":
                stream = self._get(key, Stream)
                if stream is None and b"MKSTREAM" not in args:
                    raise Refusal("ERR The XGROUP subcommand requires the key to exist")
                stream = self._make(key, Stream)
                if name in stream.groups:
                    raise Refusal("BUSYGROUP Consumer Group name already exists")
                stream.groups[name] = ConsumerGroup(stream.last if args[0] == b"$" else id_of(args[0]))
                return OK
            case b"DELCONSUMER":
                _, group = self._group(key, name, "XGROUP")
                group.consumers.pop(args[0], None)
                gone = [each for each, pending in group.pending.items() if pending.consumer == args[0]]
                for each in gone:
                    del group.pending[each]
                return len(gone)
        raise Refusal(f"ERR unknown subcommand '{what.decode()}'")

    @command(writes=True)
    def xack(self, key: bytes, name: bytes, *names: bytes) -> Any:
        stream = self._get(key, Stream)
        if stream is None or name not in stream.groups:
            return 0
        pending = stream.groups[name].pending
        return sum(pending.pop(entry, None) is not None for entry in map(id_of, names))

    @command(writes=True)
    def xclaim(self, key: bytes, name: bytes, consumer: bytes, idle: bytes, *args: bytes) -> Any:
        stream, group = self._group(key, name, "XCLAIM")
        if any(not arg[:1].isdigit() for arg in args):
            raise Refusal("ERR this world knows no options of XCLAIM")
        now, claimed = self.now_ms(), []
        group.consumers[consumer] = now
        for entry in map(id_of, args):
            pending = group.pending.get(entry)
            if pending is None or (whole(idle) and now - pending.when < whole(idle)):
                continue
            if entry not in stream.entries:
                del group.pending[entry]
                continue
            group.pending[entry] = Pending(consumer, now, pending.count + 1)
            claimed.append(_entry(stream, entry))
        return claimed

    @command()
    def xpending(self, key: bytes, name: bytes, *args: bytes) -> Any:
        _, group = self._group(key, name, "XPENDING")
        ids = sorted(group.pending)
        if not args:
            owners: dict[bytes, int] = {}
            for pending in group.pending.values():
                owners[pending.consumer] = owners.get(pending.consumer, 0) + 1
            ends = [id_text(ids[0]), id_text(ids[-1])] if ids else [None, None]
            return [len(ids), *ends, [[owner, b"%d" % count] for owner, count in owners.items()] or None]
        inside = _between(ids, args[0], args[1])[: whole(args[2])]
        now = self.now_ms()
        pendings = [(each, group.pending[each]) for each in inside]
        return [[id_text(each), p.consumer, now - p.when, p.count] for each, p in pendings]

    @command()
    def xinfo(self, what: bytes, key: bytes, *args: bytes) -> Any:
        stream = self._get(key, Stream)
        if stream is None:
            raise Refusal("ERR no such key")
        match what.upper():
            case b"STREAM":
                ends: list[Any] = [_entry(stream, each) for each in (stream.ids[:1] + stream.ids[-1:])]
                ends = ends or [None, None]
                return [
                    *(b"length", len(stream.ids), b"radix-tree-keys", 1, b"radix-tree-nodes", 2),
                    *(b"last-generated-id", id_text(stream.last), b"max-deleted-entry-id", b"0-0"),
                    *(b"entries-added", len(stream.ids), b"recorded-first-entry-id", b"0-0"),
                    *(b"groups", len(stream.groups), b"first-entry", ends[0], b"last-entry", ends[1]),
                ]
            case b"GROUPS":
                return [
                    [
                        *(b"name", name, b"consumers", len(group.consumers), b"pending", len(group.pending)),
                        *(b"last-delivered-id", id_text(group.last)),
                        *(b"lag", len(stream.ids) - bisect_right(stream.ids, group.last)),
                    ]
                    for name, group in sorted(stream.groups.items())
                ]
        group, now = self._group(key, args[0], "XINFO")[1], self.now_ms()
        return [
            [
                *(b"name", name, b"pending", sum(p.consumer == name for p in group.pending.values())),
                *(b"idle", max(0, now - heard), b"inactive", max(0, now - heard)),
            ]
            for name, heard in sorted(group.consumers.items())
        ]


def _between(ids: list[Id], first: bytes, last: bytes) -> list[Id]:
    start = 0
    if first[:1] == b"(":
        start = bisect_right(ids, id_of(first[1:]))
    elif first != b"-":
        start = bisect_left(ids, id_of(first))
    if last == b"+":
        return ids[start:]
    if last[:1] == b"(":
        return ids[start : bisect_left(ids, id_of(last[1:], LAST_ID[1]))]
    return ids[start : bisect_right(ids, id_of(last, LAST_ID[1]))]


def _entry(stream: Stream, entry: Id) -> list[Any]:
    return [id_text(entry), stream.entries.get(entry)]


def _read_arguments(args: Sequence[bytes]) -> tuple[dict[bytes, Any], Sequence[bytes], Sequence[bytes]]:
    """Options, keys and starts of XREAD; XREADGROUP has what is behind its consumer."""
    options: dict[bytes, Any] = {}
    at = 0
    while (name := args[at].upper()) != b"STREAMS":
        if name == b"NOACK":
            raise Refusal("ERR this world knows no NOACK")
        options[name] = whole(args[at + 1])
        at += 2
    rest = args[at + 1 :]
    half = len(rest) // 2
    return options, rest[:half], rest[half:]
