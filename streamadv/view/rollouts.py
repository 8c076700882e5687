"""What the screens of a group, of tokens and of a batch show: rollouts, their columns, a batch computed again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .. import clock
from ..errors import SettingError, StreamadvError
from ..extras import TO_COMPUTE, require
from ..messages import one_line
from ..run import Run
from ..status.kept import Turn, advantage_range, read_trajectories, turns_of
from ..status.seen import KeptEntry, SeenGroup, find_group
from ..trajectory.columns import LOG_PROBS, Array
from ..trajectory.schema import Row, Trajectory
from .book import Line, histogram
from .texts import Ids

if TYPE_CHECKING:
    from ..archive.compare import Change

#: Characters of a turn that the screen of a group shows.
MAX_TEXT: Final = 4000
#: Seconds that a search of text takes at most.
SEARCH_S: Final = 2.0
#: Rollouts side by side.
MAX_MEMBERS: Final = 16
#: Groups of a batch whose tokens are read for its distribution, and tokens named at each end of it.
MAX_GROUPS: Final = 32
EXTREMES: Final = 3
#: Columns whose sign matters, and those whose values are names. The others go from low to high.
DIVERGING: Final = frozenset(
    {"advantages", "raw_advantages", "returns", "log_ratio", "token_level_rewards", "values"}
)
NAMED: Final = frozenset({"response_mask", "versions", "step", "turn"})
#: Significant digits of a value that is sent.
DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class Text:
    """A turn with its text: as it is before the first difference, the token there, and what follows."""

    turn: Turn
    before: str
    mark: str
    after: str


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout in a column of its own."""

    trajectory: Trajectory
    counts: bool
    advantages: tuple[float, float] | None
    texts: list[Text]


@dataclass(frozen=True, slots=True)
class Side:
    """A group side by side. prompt: where all rollouts begin with the same one."""

    prompt: Text | None
    members: list[Member]
    gone: list[int]  # rollouts whose data is gone or cannot be read
    more: int  # rollouts that are not shown


def find(run: Run, lines: Sequence[Line], group_id: str) -> SeenGroup | None:
    """The group of this id, by its line in the book if it has one."""
    line = next((line for line in lines if line.group_id == group_id), None)
    return find_group(run, group_id) if line is None else read_again(run, line)


def read_again(run: Run, line: Line) -> SeenGroup | None:
    """The group of this line as it is now; wherever it is once it has left its place."""
    if line.where == "kept":
        shard = run.shards[line.shard]
        page: Any = shard.connection.scripts.xrange(shard.keys.kept, line.entry, line.entry, 1)
        if page:
            return KeptEntry(shard.index, line.entry, page[0][1]).seen()
    return find_group(run, line.group_id)


def search(run: Run, lines: Sequence[Line], text: str, texts: Ids) -> tuple[list[Line], int]:
    """Those of the groups that have this text in a rollout, in any case; and how many were searched, the first ones."""
    until, wanted, found, count = clock.now() + SEARCH_S, text.casefold(), list[Line](), 0
    for line in lines:
        count += 1
        group = read_again(run, line)
        rows = [row for each in read_trajectories(run, group) for row in each.rows] if group else []
        if any(wanted in texts.decode(row.input_ids.tolist()).casefold() for row in rows):
            found.append(line)
        if clock.now() >= until:
            break
    return found, count


def panel_text(render: Callable[[Trajectory], str | None], trajectory: Trajectory) -> str:
    """What a package's panel makes of a rollout, or why it cannot."""
    try:
        return str(render(trajectory) or "")
    except Exception as error:  # it is anybody's
        return f"<p>{escape(one_line(f'{type(error).__name__}: {error}'))}</p>"


def side_by_side(run: Run, group: SeenGroup, texts: Ids, start: int = 0) -> Side:
    """The rollouts of a group from `start` on, with the first difference of each marked."""
    found = sorted(read_trajectories(run, group), key=lambda each: each.rollout_index)
    there = {each.rollout_index for each in found}
    shown = found[start : start + MAX_MEMBERS]
    ids = [each.rows[0].input_ids for each in shown]
    prompts = []
    for each in shown:
        turn = next(turns_of(each, 0, each.rows[0]))
        prompts.append(each.rows[0].input_ids[: turn.stop if turn.kind == "prompt" else 0])
    alike = (
        bool(prompts) and len(prompts[0]) > 0 and all(np.array_equal(prompts[0], each) for each in prompts)
    )
    members = []
    for number, each in enumerate(shown):
        other = ids[0 if number else min(1, len(ids) - 1)]
        common = min(len(ids[number]), len(other))
        different = np.flatnonzero(ids[number][:common] != other[:common])
        # The first token that the other has not; None where they are equal as far as this one goes.
        differs = int(different[0]) if len(different) else common if len(ids[number]) > common else None
        turns = [turn for row_number, row in enumerate(each.rows) for turn in turns_of(each, row_number, row)]
        columns = [_text(each.rows[turn.row], turn, texts, differs) for turn in turns[alike:]]
        counts = each.rollout_index in group.counting
        members.append(Member(each, counts, advantage_range(each), columns))
    prompt = None
    if alike:
        prompt = _text(shown[0].rows[0], next(turns_of(shown[0], 0, shown[0].rows[0])), texts, None)
    gone = [member.rollout_index for member in group.members if member.rollout_index not in there]
    return Side(prompt, members, gone, max(0, len(found) - start - len(shown)))


def _text(row: Row, turn: Turn, texts: Ids, differs: int | None) -> Text:
    ids = row.input_ids[turn.start : turn.stop].tolist()
    if differs is None or turn.row or not turn.start <= differs < turn.stop:
        return Text(turn, _head(texts.decode(ids)), "", "")
    pieces, at = texts.pieces(ids), differs - turn.start
    before, after = "".join(pieces[:at]), "".join(pieces[at + 1 :])
    before = before if len(before) <= MAX_TEXT else f"…{before[-MAX_TEXT:]}"
    return Text(turn, before, pieces[at], _head(after))


def _head(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


# Tokens


def tokens_of(trajectory: Trajectory, texts: Ids) -> dict[str, Any]:
    """The tokens of a rollout row by row, with a value for each in every column."""
    rows = []
    for number, row in enumerate(trajectory.rows):
        ids, columns = row.input_ids.tolist(), dict(_columns(trajectory, number, row))
        shown: dict[str, list[Any]] = {}
        for name, values in columns.items():
            found = values.tolist()
            if values.dtype.kind == "f":
                found = [float(f"{each:.{DIGITS}g}") if np.isfinite(each) else None for each in found]
            shown[name] = found
        of_row = {"agent": row.agent or "", "reward": row.reward, "ids": ids, "text": texts.pieces(ids)}
        rows.append({**of_row, "columns": shown})
    names = list(dict.fromkeys(name for row in rows for name in row["columns"]))
    kinds = {
        name: "diverging" if name in DIVERGING else "named" if name in NAMED else "rising" for name in names
    }
    return {"rows": rows, "kinds": kinds}


def _columns(trajectory: Trajectory, number: int, row: Row) -> Iterator[tuple[str, Array]]:
    known = {name: values for name, values in row.columns.items() if name != "input_ids"}
    for first in ("advantages", "response_mask"):
        if first in known:
            yield first, known.pop(first)
    if "old_log_probs" in known and "rollout_log_probs" in known:
        yield "log_ratio", known["old_log_probs"] - known["rollout_log_probs"]
    yield from sorted(known.items(), key=lambda column: column[0] not in LOG_PROBS)
    yield "turn", _spans(len(row), ((turn.start, turn.stop) for turn in turns_of(trajectory, number, row)))
    steps = [(step.start, step.end) for step in trajectory.steps if step.row == number]
    if steps:
        yield "step", _spans(len(row), steps)
    for name, column in row.extras.items():
        if column.per_token and column.data.ndim == 1:
            yield name, column.data


def _spans(length: int, spans: Any) -> Array:
    numbers = np.full(length, -1, np.int32)
    for number, (start, stop) in enumerate(spans):
        numbers[start:stop] = number
    return numbers


# Batches


@dataclass(frozen=True, slots=True)
class Extreme:
    """A token with a very high or very low advantage."""

    group_id: str
    index: int
    row: int
    token: int
    text: str
    advantage: float


def _said(setting: Any) -> Any:
    """A chain without what is left out or off."""
    if not isinstance(setting, dict):
        return setting
    parts = {name: _said(value) for name, value in setting.items()}
    return {name: value for name, value in parts.items() if value is not False and value not in (None, {})}


def batch_view(run: Run, lines: Sequence[Line], k: int, texts: Ids) -> dict[str, Any]:
    """Batch k as far as its groups can be looked at."""
    members = [line for line in lines if line.batch == k]
    rewards = [reward for line in members for reward in line.known]
    record: dict[str, Any] = {}
    values, extremes = list[float](), list[Extreme]()
    for line in members[:MAX_GROUPS]:
        group = read_again(run, line)
        if group is None:
            continue
        record = dict(group.record) or record
        for each in read_trajectories(run, group):
            for number, row in enumerate(each.rows):
                if row.advantages is None:
                    continue
                trained = np.flatnonzero(row.response_mask)
                found = row.columns["advantages"][trained]
                values += found.tolist()
                order = np.argsort(found, kind="stable")
                for at in dict.fromkeys([*order[:EXTREMES].tolist(), *order[-EXTREMES:].tolist()]):
                    token = int(trained[at])
                    piece = texts.decode([int(row.input_ids[token])])
                    extremes.append(
                        Extreme(line.group_id, each.rollout_index, number, token, piece, float(found[at]))
                    )
    extremes.sort(key=lambda extreme: extreme.advantage)
    stale = [k - line.versions[0] for line in members if line.versions]
    lengths = [line.length for line in members if line.length is not None]
    return {
        "k": k,
        "members": members,
        "dropped": [line for line in lines if line.named_for == k],
        "figures": {
            "groups to look at": len(members),
            "rollouts": sum(len(line.rewards) for line in members),
            "tokens": sum(line.tokens for line in members),
            "tokens a rollout": sum(lengths) / len(lengths) if lengths else None,
            "mean reward": sum(rewards) / len(rewards) if rewards else None,
            "deviation of rewards": float(np.std(rewards)) if rewards else None,
            "mean staleness": sum(stale) / len(stale) if stale else None,
            "greatest staleness": max(stale, default=None),
            "tokens with advantage 0": f"{np.mean(np.array(values) == 0):.1%}" if values else None,
        },
        "is_open": any(line.where == "waiting" for line in members),
        "of": record.get("num_groups"),
        "chain": _said(record.get("chain")),
        "rewards": histogram(rewards),
        "advantages": histogram(values),
        "punished": [extreme for extreme in extremes[:EXTREMES] if extreme.advantage < 0],
        "rewarded": [extreme for extreme in extremes[: -EXTREMES - 1 : -1] if extreme.advantage > 0],
    }


@dataclass(slots=True)
class Again:
    """What came out."""

    chain: str
    """As it was asked for; "" = that of the batch."""
    about: list[str] = field(default_factory=list)
    """What was there of the batch, a line each."""
    verdict: str = ""
    is_same: bool | None = None
    """None with another chain."""
    problem: str = ""
    """Why it cannot be computed."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By data source; the last one, of all of them, has the name "all"."""


def compute_again(run: Run, k: int, chain: str) -> Again:
    """Compute batch k again on this machine's processor. chain: a preset's name, or JSON; "" = as it was."""
    again = Again(chain)
    try:
        require("to compute a batch again", *TO_COMPUTE)
        import torch

        from ..archive.compare import compare, total, with_chain
        from ..archive.folder import RunSource
        from ..archive.rewind import find_batch, first_difference, rewind

        source = RunSource(run)
        batch = find_batch(source, k)
        again.about = batch.about()
        chosen: str | dict[str, Any] = chain.strip()
        if chain.lstrip().startswith("{"):
            try:
                chosen = json.loads(chain)
            except ValueError as error:
                raise SettingError(f"chain is no JSON: {one_line(str(error))}") from None
        record = with_chain(batch, chosen) if chain else None
        computed = rewind(source, batch, torch.device("cpu"), record)
        if record is None:
            difference = first_difference(batch, computed)
            again.is_same = difference is None
            again.verdict = f"first difference: {difference}" if difference else "bit-identical"
        else:
            changes = compare(source, batch, computed)
            of_all = total(changes.values())
            again.changes = {**changes, "all": of_all} if len(changes) > 1 else changes
            again.verdict = _in_words(of_all)
    except StreamadvError as error:
        again.problem = str(error)
    return again


def _in_words(change: Change) -> str:
    before, after = change.before, change.after
    learn = f"{after.groups} of {change.groups} groups would learn"
    learn += f" instead of {before.groups}" if after.groups != before.groups else ", as before"
    size = f"the effective sample size is {after.effective:,.0f} tokens"
    size += (
        f" instead of {before.effective:,.0f}" if round(after.effective - before.effective) else ", as before"
    )
    signs = f"{change.signs:,} of {change.compared:,} tokens turn from good to bad or back"
    return f"{learn}; {size}; {signs}"
