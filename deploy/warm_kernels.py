"""Computes a few trajectories by every preset, so that numba's cache holds the loops an image's workers call."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from streamadv.algorithms.chain.presets import PRESETS
from streamadv.cli import main

GROUPS, SIZE, TOKENS, PROMPT = 2, 4, 8, 3
#: Without what these need beside the columns below, they have no loop of their own.
LEFT_OUT = ("remax",)


def trajectory(group: int, index: int) -> dict[str, object]:
    """One with every column that a preset may need, in two turns."""
    response = TOKENS - PROMPT
    tokens = [-0.1 - 0.01 * t for t in range(TOKENS)]
    return {
        "group_id": f"group-{group}",
        "group_size": SIZE,
        "rollout_index": index,
        "reward": float(index % 3),
        "rewards": {"correct": float(index % 3), "format": float(index % 2)},
        "input_ids": list(range(TOKENS)),
        "response_mask": [0] * PROMPT + [1] * response,
        **dict.fromkeys(
            ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "sum_pi_squared"), tokens
        ),
        "steps": [
            {"row": 0, "start": PROMPT, "end": PROMPT + 2, "reward": 0.5, "state_key": "a"},
            {"row": 0, "start": PROMPT + 2, "end": TOKENS, "reward": 0.25, "state_key": "b"},
        ],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        lines = [json.dumps(trajectory(group, index)) for group in range(GROUPS) for index in range(SIZE)]
        source.write_text("\n".join(lines) + "\n")
        failed = [
            preset
            for preset in PRESETS
            if not preset.endswith(LEFT_OUT)
            and main(["compute", str(source), "-o", str(result), "--preset", preset]) != 0
        ]
    if failed:
        sys.exit(f"not computed: {', '.join(failed)}")
