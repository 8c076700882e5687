"""Payloads of one rank's trajectories: fetched when they are due, or read ahead.

A thread reads the payloads of the next batch ahead while the trainer works on the current one. They are neither
delivered nor counted. If the batch comes out differently (a group died, a server was replaced), its payloads are
fetched when they are due. So are payloads that the thread could not read: `deliver` then meets the error itself.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .. import doors
from ..advantage.results import BatchResults
from ..algorithms.packing import empty_column
from ..batch.record import BatchRecord
from ..errors import UndecodableGroupError, WireError
from ..grouping.layout import Layout, place
from ..messages import log_fields
from ..run import Run
from ..run.packets import decode_own, fetch_replies, know_columns, split_reply
from ..trajectory.columns import (
    HEADER,
    KNOWN_COLUMNS,
    OUTPUT_COLUMNS,
    Array,
    check_values,
    count_ones,
)
from ..trajectory.members import Members, offsets
from ..trajectory.packet import (
    ColumnKind,
    check_column,
    column_kind,
    decode_column,
    parse_header,
    sized,
)
from .plan import Rank, Share, share_of

logger = logging.getLogger(__name__)

#: A batch's payloads are read ahead up to this size.
MAX_BYTES: Final = 512 << 20

Problems = dict[tuple[str, int], str]  # by (group_id, rollout_index)


class FetchedShare:
    """What the server has of a rank's trajectories.

    Columns per token lie end to end, in the order of the share: each packet's are copied there as soon as they have
    come, and a packet that lacks one leaves 0. What else a packet has stays as it came.
    """

    def __init__(self, run: Run, share: Share, device: torch.device) -> None:
        """Raises UndecodableGroupError for packets that announce more than their bytes."""
        self.share = share
        self.columns: dict[str, Tensor] = {}  # name -> [N, ...] on the host
        self.others: dict[int, dict[str, Array]] = {}  # further columns, by the packet's number in the layout
        self.headers: dict[int, bytes] = {}  # likewise
        self._pieces, self._tokens = share.own.pieces()
        self.missing = list(self._pieces)  # packets that are yet to be read
        #: Columns of groups, by their numbers in the layout.
        self.of_groups: dict[int, dict[str, Array]] = {}
        known, common = _kinds(run, share)
        #: Columns that a part of the batch lacks, on whatever rank.
        self.optional = frozenset(known.keys() - common)
        kinds = {name: kind for name, kind in known.items() if kind.per_token}
        self._row_extras = known.keys() - kinds.keys()
        widths = {name: math.prod(kind.shape) * kind.dtype.itemsize for name, kind in kinds.items()}
        problems: Problems = {}
        for number in self.missing:
            packet = share.own.packets[number]
            if self._tokens[number] * sum(widths.get(name, 0) for name in packet.columns) > packet.size:
                text = "columns are larger than the payload"
                problems |= self._problems(np.flatnonzero(share.own.packet == number), text)
        if problems:
            raise UndecodableGroupError(problems)
        for name, kind in kinds.items():
            column = empty_column(share.own.num_tokens, kind.dtype, device, kind.shape)
            self.columns[name] = column.zero_() if name in self.optional else column
        #: Where the columns' bytes go, and bytes of a token.
        self._places = {
            name: (column.numpy().reshape(-1).view(np.uint8).data, widths[name])
            for name, column in self.columns.items()
        }
        self._is_right = False  # all values were checked

    def read(self, run: Run, max_bytes: float = math.inf, stop: threading.Event | None = None) -> Problems:
        """Read the packets that are missing. Returns what is wrong with what was read, and with what stays missing.

        max_bytes: of all of them together. stop: reads no more when it is set.
        """
        own, stop = self.share.own, stop or doors.Event()
        packets = [own.packets[number] for number in self.missing]
        sizes = accumulate(packet.size for packet in packets)
        packets = packets[: sum(size <= max_bytes for size in sizes)]
        read, problems = set[int](), Problems()
        replies = fetch_replies(
            run, [(packet.key, packet.size, [HEADER, *packet.columns]) for packet in packets]
        )
        with closing(replies):
            for number, reply in zip(self.missing[: len(packets)], replies, strict=True):
                try:
                    self._take(run, number, reply)
                    read.add(number)
                except WireError as error:
                    problems |= self._problems(np.flatnonzero(own.packet == number), str(error))
                if stop.is_set():
                    break
        self.missing = [number for number in self.missing if number not in read]
        due = [
            (number, columns)
            for number in np.unique(own.group).tolist()
            if number not in self.of_groups and (columns := own.groups[number].columns) is not None
        ]
        if not self.missing and not stop.is_set() and sum(columns.size for _, columns in due) <= max_bytes:
            replies = fetch_replies(run, [columns for _, columns in due])
            for (number, columns), reply in zip(due, replies, strict=True):
                try:
                    self.of_groups[number] = decode_own(run, columns.names, reply)
                except WireError as error:
                    members = np.flatnonzero(own.group == number)
                    problems |= self._problems(members, f"group's columns: {error}")
        return problems | self._check()

    def _check(self) -> Problems:
        """Check the values of what was read: which trajectories have wrong ones. Looks at each value once."""
        own, problems = self.share.own, Problems()
        if self._is_right:
            return problems
        bounds = offsets(own.members.table["tokens"])
        for name in KNOWN_COLUMNS.keys() & self.columns.keys():
            column, array = self.columns[name], self.columns[name].numpy()
            # A sum of finite numbers is finite, or has overflowed: it takes a third of the time of looking at each.
            if column.is_floating_point() and bool(column.sum().isfinite()):
                continue
            with suppress(ValueError):
                check_values(name, array)
                continue
            for member, (start, stop) in enumerate(pairwise(bounds.tolist())):
                try:
                    check_values(name, array[start:stop])
                except ValueError as error:
                    if own.packet[member] not in self.missing:
                        problems |= self._problems([member], f"column {name} {error}")
        masked = _disagreeing(own.members, self.columns["response_mask"], np.not_equal) if len(own) else ()
        if read := [member for member in masked if own.packet[member] not in self.missing]:
            text = "column response_mask has other numbers of ones than its packet says"
            problems = self._problems(read, text) | problems
        self._is_right = not problems and not self.missing
        return problems

    def has(self) -> dict[str, Tensor]:
        """Of each optional column: [rows of the share] bool, which rows have it."""
        own = self.share.own
        packet, group = (np.repeat(of, own.members.table["rows"]) for of in (own.packet, own.group))
        found = {}
        for name in sorted(self.optional):
            packets_with = np.array([name in each.columns for each in own.packets], np.bool_)
            shared = [each.columns for each in own.groups]
            groups_with = np.array([each is not None and name in each.names for each in shared], np.bool_)
            found[name] = torch.from_numpy(packets_with[packet] | groups_with[group])
        return found

    def row_extras(self) -> dict[str, list[Array | None]]:
        """Columns not per token: name -> an array for each row of the share, None where it was pushed without."""
        own, extras = self.share.own, {name: list[Array | None]() for name in self._row_extras}
        for name, arrays in extras.items():
            of_members = zip(own.packet.tolist(), own.position.tolist(), own.group.tolist(), strict=True)
            for number, position, group in of_members:
                members, column = own.packets[number].members, self.others[number].get(name)
                first, last = members.first_row[position : position + 2].tolist()
                if column is None:
                    arrays += [self.of_groups.get(group, {}).get(name)] * (last - first)
                else:
                    bounds = offsets(members.entries[name]).tolist()
                    arrays += [column[start:stop] for start, stop in pairwise(bounds[first : last + 1])]
        return extras

    def _take(self, run: Run, number: int, reply: Sequence[bytes | None] | None) -> None:
        """reply: header and columns of a packet; None where the key is no hash. Raises WireError."""
        packet = self.share.own.packets[number]
        for name in packet.members.entries.keys() & self._places.keys():
            raise WireError(f"column {name} is per token in the manifest, not in the packet")
        header, columns = split_reply(reply)
        others: dict[str, bytes | None] = {}
        for name, raw in zip(packet.columns, columns, strict=True):
            if name not in self._places:
                others[name] = raw
                continue
            (column, width), tokens = self._places[name], self._tokens[number]
            whole = sized(name, raw, tokens * width)
            for start, stop, first in self._pieces[number]:
                part: bytes | memoryview = whole
                if stop - start < tokens:  # members that are not in the share go nowhere
                    part = memoryview(whole)[first * width : (first + stop - start) * width]
                column[start * width : stop * width] = part
        parse_header(header, packet.members)
        self.others[number] = {  # of all members of the packet, rows end to end
            name: decode_column(packet, name, raw, run.manifest.columns) for name, raw in others.items()
        }
        for name in KNOWN_COLUMNS.keys() & others.keys():
            check_column(packet, name, self.others[number][name])
        self.headers[number] = header

    def _problems(self, positions: Sequence[int] | Array, text: str) -> Problems:
        identities = [self.share.own.identity(int(position)) for position in positions]
        return {(group_id, index): f"rollout {index}: {text}" for group_id, index in identities}


def fetch_outputs(run: Run, results: BatchResults, share: Share, device: torch.device) -> dict[str, Tensor]:
    """The workers' results per token, [N] each on the host. Raises UndecodableGroupError."""
    own = share.own
    dtypes = {name: KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name] for name in results.columns}
    columns = {name: empty_column(own.num_tokens, dtype, device) for name, dtype in dtypes.items()}
    places = {name: column.numpy() for name, column in columns.items()}
    problems: Problems = {}
    for number, pieces in (results.pieces(share.positions) if columns else {}).items():
        key, tokens = results.results[number].output, results.num_tokens[number]
        size = tokens * sum(dtype.itemsize for dtype in dtypes.values())
        [reply] = fetch_replies(run, [(key, size, dtypes)])
        for (name, dtype), raw in zip(dtypes.items(), reply or [None] * len(dtypes), strict=True):
            if raw is not None and len(raw) == tokens * dtype.itemsize:
                place(np.frombuffer(raw, dtype), pieces, places[name])
                continue
            for member in np.flatnonzero(results.result[share.positions] == number).tolist():
                group_id, index = own.identity(member)
                problem = f"output column {name} of rollout {index} has the wrong size or is missing"
                problems[group_id, index] = problem
    if "response_mask" in columns and not problems:
        mask = columns["response_mask"]
        strange = np.flatnonzero(mask.numpy() > 1)
        strangers = np.searchsorted(offsets(own.members.table["tokens"]), strange, side="right") - 1
        wrong = dict.fromkeys(strangers.tolist(), "holds values other than 0 and 1")
        widened = _disagreeing(own.members, mask.bool().view(torch.uint8), np.greater)
        wrong |= dict.fromkeys(widened, "has more ones than what was pushed")
        for member, problem in wrong.items():
            group_id, index = own.identity(member)
            problems[group_id, index] = f"output column response_mask of rollout {index} {problem}"
    if problems:
        raise UndecodableGroupError(problems)
    return columns


class ReadAhead:
    """A thread that fetches the payloads of one batch, from now on."""

    def __init__(self, run: Run, record: BatchRecord, layout: Layout, rank: Rank) -> None:
        self.batch = record.id
        self._run = run
        self.stopped = doors.Event()  # set: fetch no more; nobody waits for a server that does not answer
        #: Whole once the thread has ended. What kept it from the rest, the caller meets itself.
        self.fetched: FetchedShare | None = None
        self.thread = doors.Thread(
            target=self._fetch, args=(layout, record, rank), name="streamadv-read-ahead", daemon=True
        )
        self.thread.start()

    def _fetch(self, layout: Layout, record: BatchRecord, rank: Rank) -> None:
        try:
            budget = record.tokens_per_micro_batch
            share = share_of(layout, budget, rank, keep_groups=record.keep_groups)
            self.fetched = FetchedShare(self._run, share, rank.device)
            self.fetched.read(self._run, MAX_BYTES, self.stopped)
        except BaseException as error:
            fields = log_fields("not_read_ahead", role="trainer", batch=record.k)
            logger.debug("not read ahead: %s: %s", type(error).__name__, error, extra=fields)


def _kinds(run: Run, share: Share) -> tuple[dict[str, ColumnKind], set[str]]:
    """Columns that trajectories trained on were pushed with, on whatever rank they are; and those that all have."""
    trained = share.trained
    numbers, first = np.unique(trained.packet, return_index=True)
    pairs = zip(numbers.tolist(), trained.group[first].tolist(), strict=True)
    of_groups = [each.columns.names if each.columns is not None else () for each in trained.groups]
    names = [
        {*columns, *of_group}
        for columns, of_group in {
            (trained.packets[number].columns, of_groups[group]) for number, group in pairs
        }
    ]
    know_columns(run, names)
    kinds = {}
    for name in sorted(set().union(*names)):
        with suppress(WireError):  # each packet with such a column will be refused
            kinds[name] = column_kind(name, run.manifest.columns)
    return kinds, set.intersection(*names) if names else set()


def _disagreeing(members: Members, mask: Tensor, disagree: np.ufunc) -> list[int]:
    """Members with a row of which `disagree` holds, given the ones in its `mask` and its trainable tokens."""
    is_wrong = disagree(count_ones(mask.numpy(), offsets(members.rows["tokens"])), members.rows["trainable"])
    if not is_wrong.any():
        return []
    owner = np.repeat(np.arange(len(members)), members.table["rows"])
    found: list[int] = np.unique(owner[is_wrong]).tolist()
    return found
