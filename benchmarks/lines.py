"""What the pipeline benchmarks run on: chains, columns, sizes, and synthetic trajectories of them. No torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self, get_args

import numpy as np

from streamadv.trajectory.columns import KNOWN_COLUMNS, Array

GROUP_SIZE: Final = 8
TURNS: Final = 8
#: Turns of an agent's record. Its versions go up by one in each, from one that the trainer never reaches: so the same
#: record may be pushed for ever and does not get stale.
AGENT_STEPS: Final = 4
AGENT_VERSION: Final = 1_000_000
TOKENS: Final = (512, 4096, 32768)
#: A batch holds about so many tokens, and MAX_BATCH_GROUPS groups at most.
BATCH_TOKENS: Final = 1 << 20
MAX_BATCH_GROUPS: Final = 64
#: How a producer pushes. Plain arrays in the dtypes of the columns: groups of 8 begun and pushed one after another; the
#: same with the next group's admission in the push; several groups a call; or asyncio, trajectory by trajectory.
#: Agents' records, as `agent_record` makes them: groups of arrays, of lists, or arrays by asyncio.
Way = Literal["push", "ahead", "many", "asyncio", "agent", "agent-lists", "agent-asyncio"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)
#: Groups of a call of "many", and trajectories under way at once of "asyncio".
GROUPS_A_CALL: Final = 4
IN_FLIGHT: Final = 256
#: Groups made up in advance and pushed in turn, so that making them up is not measured.
POOL_GROUPS: Final = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """A chain with the columns that cross the network for it."""

    chain: Mapping[str, Any]
    columns: Sequence[str]  # pushed, and read by the trainer
    read: Sequence[str] = ()  # of them by the advantage worker
    made: Sequence[str] = ()  # written by the worker, read by the trainer; float32
    late: Sequence[str] = ()  # of the pushed ones, what a trainer would make itself otherwise


_POLICY: Final = ("input_ids", "response_mask", "rollout_log_probs", "ref_log_probs")
_KL: Final = {"coefficient": 0.01, "penalty": "k3"}

#: Four columns of four bytes a token, and the mask of one byte.
KINDS: Final = {
    "grpo": Kind({"estimator": "grpo"}, (*_POLICY, "old_log_probs")),
    "grpo+kl": Kind(
        {"estimator": "grpo", "kl": _KL}, (*_POLICY, "old_log_probs"), ("response_mask", *_POLICY[2:])
    ),
    "gae+kl": Kind(
        {"estimator": "gae", "kl": _KL},
        (*_POLICY, "values"),
        ("response_mask", *_POLICY[2:], "values"),
        ("advantages", "returns", "token_level_rewards"),
        ("values",),
    ),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table, as its processes get it."""

    kind: str
    tokens: int
    run: str = ""
    min_groups: int | None = None  # name a batch as soon as so many groups are there
    world_size: int = 1  # ranks among which payloads are divided; rank 0 alone is there

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}"

    @property
    def batch_groups(self) -> int:
        return max(1, min(MAX_BATCH_GROUPS, BATCH_TOKENS // (GROUP_SIZE * self.tokens)))

    @property
    def columns(self) -> Sequence[str]:
        return KINDS[self.kind].columns

    def size(self, columns: Sequence[str]) -> int:
        """Bytes of these columns of one trajectory."""
        return sum(KNOWN_COLUMNS.get(name, np.dtype("<f4")).itemsize for name in columns) * self.tokens

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def make_columns(line: Line, rng: np.random.Generator) -> dict[str, Array]:
    """The columns of one trajectory: an eighth is prompt, a quarter of each of the turns is observation."""
    first = line.tokens // 8
    mask = np.zeros(line.tokens, np.uint8)
    bounds = np.linspace(first, line.tokens, TURNS + 1).astype(np.int64)
    for start, end in itertools.pairwise(bounds):
        mask[start : start + 3 * (end - start) // 4] = 1
    columns: dict[str, Array] = {}
    for name in line.columns:
        if name == "input_ids":
            columns[name] = rng.integers(0, 150_000, line.tokens, np.int32)
        elif name == "response_mask":
            columns[name] = mask
        else:
            columns[name] = -rng.random(line.tokens, np.float32)
    return columns


def agent_record(record: Mapping[str, Any], *, lists: bool = False) -> dict[str, Any]:
    """The record as an agent's loop has it: arrays of numpy's default dtypes, steps, versions by token, metadata.

    lists: Python lists in place of arrays.
    """
    tokens = len(record["input_ids"])
    bounds = np.linspace(tokens // 8, tokens, AGENT_STEPS + 1).astype(int).tolist()
    versions = np.full(tokens, -1)
    for step, (start, end) in enumerate(itertools.pairwise(bounds)):
        versions[start:end] = AGENT_VERSION + step
    arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
    columns: dict[str, Any] = {
        name: array.astype(float if array.dtype.kind == "f" else int) for name, array in arrays.items()
    }
    columns["versions"] = versions
    return {
        **record,
        **({name: column.tolist() for name, column in columns.items()} if lists else columns),
        "steps": [
            {"start": start, "end": end, "reward": 0.25, "state_key": f"room {step}"}
            for step, (start, end) in enumerate(itertools.pairwise(bounds))
        ],
        "model_version": (AGENT_VERSION, AGENT_VERSION + AGENT_STEPS - 1),
        "metadata": {"task": "search/1204", "seed": 7, "tools": ["search", "open"]},
    }


def make_groups(line: Line, way: Way = "push") -> list[list[dict[str, Any]]]:
    """POOL_GROUPS groups of records for `Group.push`, as this way pushes them."""
    groups = _plain_groups(line)
    if not way.startswith("agent"):
        return groups
    return [[agent_record(record, lists=way == "agent-lists") for record in group] for group in groups]


def _plain_groups(line: Line) -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(0)
    return [
        [
            {"rollout_index": index, "reward": float(rng.normal()), **make_columns(line, rng)}
            for index in range(GROUP_SIZE)
        ]
        for _ in range(POOL_GROUPS)
    ]
