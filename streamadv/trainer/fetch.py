"""Payloads of one rank's trajectories: fetched when they are due, or read ahead.

A thread reads the payloads of the next batch ahead while the trainer works on the one before. They are neither
delivered nor counted: if the batch comes out differently (a group died, the server was another one), its payloads are
fetched when they are due. So are payloads that the thread could not read: `fetch` then meets the error itself.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from torch import Tensor

from ..advantage.results import BatchResults
from ..batch.record import BatchRecord
from ..errors import StreamadvError, UndecodableGroupError, WireError
from ..grouping.layout import Layout, Piece, place
from ..messages import log_fields
from ..run import Run
from ..run.payloads import fetch_replies, know_columns, slices, split_reply
from ..store.direct import HashRead, receive
from ..store.retry import SERVER_ERRORS
from ..trajectory.columns import (
    HEADER,
    KNOWN_COLUMNS,
    OUTPUT_COLUMNS,
    Array,
    check_values,
    count_ones,
)
from ..trajectory.members import offsets
from ..trajectory.packet import ColumnKind, StoredPacket, check_column, column_kind, decode_column, sized
from ..trajectory.payload import parse_header
from .memory import ColumnMemory
from .plan import Rank, Share, share_of

logger = logging.getLogger(__name__)

#: A batch's payloads are read ahead up to this size.
MAX_BYTES: Final = 512 << 20
#: Headers that are expected to be larger are asked for without expecting a size.
MAX_HEADER_BYTES: Final = 1 << 20

Problems = dict[tuple[str, int], str]  # by (group_id, rollout_index)


class FetchedShare:
    """What the server has of a rank's trajectories.

    Columns per token that all packets of the batch have lie end to end, in the order of the share: they are copied
    once, from the reply to their place. What else a packet has stays as it came.
    """

    def __init__(self, run: Run, share: Share, memory: ColumnMemory) -> None:
        """Raises UndecodableGroupError for packets that announce more than their bytes."""
        self.share = share
        self.columns: dict[str, Tensor] = {}  # name -> [N, ...] on the host
        self.others: dict[int, dict[str, Array]] = {}  # further columns, by the packet's number in the layout
        self.headers: dict[int, bytes] = {}  # likewise
        self._pieces = share.own.pieces()
        self.missing = list(self._pieces)  # packets that are yet to be read
        packets = {number: share.own.packets[number] for number in self.missing}
        self._tokens = {n: int(packet.members.table["tokens"].sum()) for n, packet in packets.items()}
        common = _kinds(run, share)
        kinds = {name: kind for name, kind in common.items() if kind.per_token}
        self._row_extras = common.keys() - kinds.keys()
        self._widths = {name: math.prod(kind.shape) * kind.dtype.itemsize for name, kind in kinds.items()}
        self._check_sizes()
        for name, kind in kinds.items():
            self.columns[name] = memory.column(share.own.num_tokens, kind.dtype, kind.shape)
        self._bytes = {name: _bytes_of(column) for name, column in self.columns.items()}
        self._is_right = False  # all values were checked

    def is_of(self, share: Share) -> bool:
        """Whether `share` has the same trajectories, read from the same entries of the log."""
        return self.share.own.groups == share.own.groups and np.array_equal(
            self.share.positions, share.positions
        )

    def read(self, run: Run, max_bytes: int | None = None, stop: threading.Event | None = None) -> Problems:
        """Read the packets that are missing. Returns what is wrong with those that cannot be read: they stay missing.

        max_bytes: of all of them together. stop: reads no more when it is set.
        """
        due = list(self.missing)
        packets = [self.share.own.packets[number] for number in due]
        if max_bytes is not None:
            sizes = accumulate(packet.size for packet in packets)
            packets = packets[: sum(size <= max_bytes for size in sizes)]
        read: set[int] = set()
        problems: Problems = {}
        for number, names, reply in self._replies(run, due[: len(packets)]):
            try:
                self._take(run, number, names, reply)
                read.add(number)
            except WireError as error:
                problems |= self._problems(np.flatnonzero(self.share.own.packet == number), str(error))
            if stop is not None and stop.is_set():
                break
        self.missing = [number for number in due if number not in read]
        return problems

    def check(self) -> Problems:
        """Check the values of what was read: which trajectories have wrong ones. Looks at each value once."""
        own, problems = self.share.own, dict[tuple[str, int], str]()
        if self._is_right:
            return problems
        bounds = offsets(own.members.table["tokens"])
        for name in KNOWN_COLUMNS.keys() & self.columns.keys():
            column, array = self.columns[name], self.columns[name].numpy()
            # A sum of finite numbers is finite, or has overflowed: it takes a third of the time of looking at each.
            if column.is_floating_point() and bool(column.sum().isfinite()):
                continue
            if _problem(name, array) is None:
                continue
            for member, (start, stop) in enumerate(pairwise(bounds.tolist())):
                problem = _problem(name, array[start:stop])
                if problem is not None and own.packet[member] not in self.missing:
                    problems |= self._problems([member], problem)
        problems = self._mask_problems() | problems
        self._is_right = not problems and not self.missing
        return problems

    def row_extras(self) -> dict[str, list[Array]]:
        """Columns not per token that all packets of the batch have: name -> an array for each row of the share."""
        own, extras = self.share.own, {name: list[Array]() for name in self._row_extras}
        for name, arrays in extras.items():
            for number, position in zip(own.packet.tolist(), own.position.tolist(), strict=True):
                arrays += rows_of(own.packets[number], name, self.others[number][name], position)
        return extras

    def _check_sizes(self) -> None:
        own, problems = self.share.own, dict[tuple[str, int], str]()
        width = sum(self._widths.values())
        for number in self.missing:
            packet = own.packets[number]
            if self._tokens[number] * width > packet.size:
                text = "columns are larger than the payload"
                problems |= self._problems(np.flatnonzero(own.packet == number), text)
        if problems:
            raise UndecodableGroupError(problems)

    def _replies(
        self, run: Run, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Sequence[str], Sequence[bytes | None] | None]]:
        """Number, names of columns, and header and these columns of each packet; None where the key is no hash.

        Columns per token are not among them where they could be received in their places.
        """
        packets = {number: self.share.own.packets[number] for number in numbers}
        for part in slices([packet.size for packet in packets.values()]):
            some = numbers[part]
            received = self._receive(run, some)
            if received is not None:
                yield from received
                continue
            names = {number: packets[number].columns for number in some}
            replies = fetch_replies(
                run,
                [packets[number].key for number in some],
                [packets[number].size for number in some],
                [_fields(names[number]) for number in some],
            )
            for number, reply in zip(some, replies, strict=True):
                yield number, names[number], reply

    def _receive(
        self, run: Run, numbers: Sequence[int]
    ) -> list[tuple[int, Sequence[str], Sequence[bytes | None]]] | None:
        """`_replies` with the columns per token received in their places. None where that cannot be done.

        The header of a packet without other columns is the rest of its bytes.
        """
        fields, width = [name.encode() for name in self._widths], sum(self._widths.values())
        reads, headers, others = list[HashRead](), dict[int, bytearray](), dict[int, list[str]]()
        for number in numbers:
            packet = self.share.own.packets[number]
            places = [self._places(number, name) for name in self._widths]
            others[number] = [name for name in packet.columns if name not in self._widths]
            header_bytes = packet.size - self._tokens[number] * width
            if others[number] or header_bytes > MAX_HEADER_BYTES:
                reads.append(HashRead(packet.key, fields, places, _fields(others[number])))
                continue
            headers[number] = bytearray(header_bytes)
            reads.append(HashRead(packet.key, [*fields, HEADER], [*places, [memoryview(headers[number])]]))
        replies = receive(run.connection.scripts, reads)
        if replies is None:
            return None
        rest = iter(replies)
        return [
            (number, others[number], [bytes(headers[number])] if number in headers else next(rest))
            for number in numbers
        ]

    def _places(self, number: int, name: str) -> list[memoryview]:
        """Where a column of a packet goes; members that are not in the share go nowhere."""
        return _places(self._bytes[name], self._widths[name], self._pieces[number], self._tokens[number])

    def _take(
        self, run: Run, number: int, names: Sequence[str], reply: Sequence[bytes | None] | None
    ) -> None:
        """reply: header and these columns of a packet; None where the key is no hash. Raises WireError."""
        packet = self.share.own.packets[number]
        for name in packet.members.entries.keys() & self._widths.keys():
            raise WireError(f"column {name} is per token in the manifest, not in the packet")
        header, columns = split_reply(reply)
        others: dict[str, bytes | None] = {}
        for name, raw in zip(names, columns, strict=True):
            if name in self._widths:
                self._place(number, name, raw)
            else:
                others[name] = raw
        parse_header(header, packet.members)
        self.others[number] = _decode_others(run, packet, others)
        self.headers[number] = header

    def _place(self, number: int, name: str, raw: bytes | None) -> None:
        rest = memoryview(sized(name, raw, self._tokens[number] * self._widths[name]))
        for part in self._places(number, name):
            part[:], rest = rest[: len(part)], rest[len(part) :]

    def _mask_problems(self) -> Problems:
        own, members = self.share.own, self.share.own.members
        if not len(own):
            return {}
        mask = self.columns["response_mask"].numpy()
        ones = count_ones(mask, offsets(members.rows["tokens"]))
        wrong_rows = np.flatnonzero(ones != members.rows["trainable"])
        owner = np.unique(np.repeat(np.arange(len(members)), members.table["rows"])[wrong_rows])
        read = [member for member in owner.tolist() if own.packet[member] not in self.missing]
        return self._problems(read, "column response_mask has other numbers of ones than its packet says")

    def _problems(self, positions: Sequence[int] | Array, text: str) -> Problems:
        identities = [self.share.own.identity(int(position)) for position in positions]
        return {(group_id, index): f"rollout {index}: {text}" for group_id, index in identities}


def fetch(run: Run, share: Share, memory: ColumnMemory, ahead: FetchedShare | None) -> FetchedShare:
    """Fetch what was not read ahead. Raises UndecodableGroupError for what is gone or cannot be read."""
    fetched = ahead if ahead is not None and ahead.is_of(share) else FetchedShare(run, share, memory)
    problems = fetched.read(run)
    problems |= fetched.check()
    if problems:
        raise UndecodableGroupError(dict(sorted(problems.items())))
    return fetched


def fetch_outputs(run: Run, results: BatchResults, share: Share, memory: ColumnMemory) -> dict[str, Tensor]:
    """The workers' results per token, [N] each on the host. Raises UndecodableGroupError."""
    own = share.own
    dtypes = {name: KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name] for name in results.columns}
    columns = {name: memory.column(own.num_tokens, dtype) for name, dtype in dtypes.items()}
    places = {name: column.numpy() for name, column in columns.items()}
    pieces = results.pieces(share.positions) if columns else {}
    keys = [results.results[number].output for number in pieces]
    sizes = [results.num_tokens[number] * sum(d.itemsize for d in dtypes.values()) for number in pieces]
    fields = [name.encode() for name in dtypes]
    reads = [
        HashRead(
            key,
            fields,
            [
                _places(_bytes_of(columns[name]), d.itemsize, pieces[number], results.num_tokens[number])
                for name, d in dtypes.items()
            ],
        )
        for number, key in zip(pieces, keys, strict=True)
    ]
    if all(receive(run.connection.scripts, reads[part]) is not None for part in slices(sizes)):
        return columns
    replies = fetch_replies(run, keys, sizes, [fields] * len(keys))
    problems: Problems = {}
    for number, reply in zip(pieces, replies, strict=True):
        for (name, dtype), raw in zip(dtypes.items(), reply or [None] * len(dtypes), strict=True):
            if raw is not None and len(raw) == results.num_tokens[number] * dtype.itemsize:
                place(np.frombuffer(raw, dtype), pieces[number], places[name])
                continue
            for member in np.flatnonzero(results.result[share.positions] == number).tolist():
                group_id, index = own.identity(member)
                text = f"output column {name} of rollout {index} has the wrong size or is missing"
                problems[group_id, index] = text
    if problems:
        raise UndecodableGroupError(problems)
    return columns


class ReadAhead:
    """A thread that fetches the payloads of one batch, from now on."""

    def __init__(
        self, run: Run, record: BatchRecord, layout: Layout, rank: Rank, memory: ColumnMemory
    ) -> None:
        self.batch = record.id
        self._run = run
        self._stopped = threading.Event()
        self._fetched: FetchedShare | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._fetch, args=(layout, record, rank, memory), name="streamadv-read-ahead", daemon=True
        )
        self._thread.start()

    def result(self) -> FetchedShare | None:
        """Wait for the thread and return what it has fetched. Raises what no server brought about."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._fetched

    def stop(self) -> None:
        """Fetch no more. Does not wait for a server that does not answer."""
        self._stopped.set()

    def _fetch(self, layout: Layout, record: BatchRecord, rank: Rank, memory: ColumnMemory) -> None:
        try:
            budget = record.tokens_per_micro_batch
            share = share_of(layout, budget, rank, keep_groups=record.keep_groups)
            self._fetched = FetchedShare(self._run, share, memory)
            self._fetched.read(self._run, MAX_BYTES, self._stopped)
            self._fetched.check()
        except (StreamadvError, *SERVER_ERRORS) as error:
            fields = log_fields("not_read_ahead", role="trainer", batch=record.k)
            logger.debug("not read ahead: %s", error, extra=fields)
        except BaseException as error:  # raised where the batch is asked for
            self._error = error


def _kinds(run: Run, share: Share) -> dict[str, ColumnKind]:
    """Columns that every trajectory trained on was pushed with, on whatever rank it is."""
    packets = [share.trained.packets[number] for number in np.unique(share.trained.packet).tolist()]
    names = [set(columns) for columns in {packet.columns for packet in packets}]
    common = sorted(set.intersection(*names)) if names else []
    know_columns(run, names)
    kinds = {}
    for name in common:
        with suppress(WireError):  # each packet with such a column will be refused
            kinds[name] = column_kind(name, run.manifest.columns)
    return kinds


def _bytes_of(column: Tensor) -> memoryview:
    return column.numpy().reshape(-1).view(np.uint8).data


def _places(column: memoryview, width: int, pieces: Sequence[Piece], entries: int) -> list[memoryview]:
    """The memory that `entries` of `width` bytes each fill: those of `pieces` theirs in `column`, others none of it."""
    places, at = list[memoryview](), 0
    for start, stop, first in [*pieces, Piece(0, 0, entries)]:
        if first > at:
            places.append(memoryview(bytearray((first - at) * width)))
        if stop > start:
            places.append(column[start * width : stop * width])
        at = first + stop - start
    return places


def _fields(names: Sequence[str]) -> list[bytes]:
    return [HEADER, *(name.encode() for name in names)]


def _problem(name: str, array: Array) -> str | None:
    try:
        check_values(name, array)
    except ValueError as error:
        return f"column {name} {error}"
    return None


def rows_of(packet: StoredPacket, name: str, column: Array, position: int) -> list[Array]:
    """The rows of the member at `position`, of a column not per token."""
    bounds = offsets(packet.members.entries[name]).tolist()
    first, last = packet.members.first_row[position : position + 2].tolist()
    return [column[start:stop] for start, stop in pairwise(bounds[first : last + 1])]


def _decode_others(run: Run, packet: StoredPacket, others: Mapping[str, bytes | None]) -> dict[str, Array]:
    """Columns of all members of a packet, rows end to end. Raises WireError."""
    columns = {name: decode_column(packet, name, raw, run.manifest.columns) for name, raw in others.items()}
    for name in KNOWN_COLUMNS.keys() & columns.keys():
        check_column(packet, name, columns[name])
    return columns
