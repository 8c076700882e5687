"""verl's agent loops push what they have played: to the run of a trainer that trains on it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.experimental.agent_loop import AgentLoopOutput

import streamadv as sa
from streamadv.errors import TrajectoryError
from streamadv.integrations.verl.agent_loop import record
from tests.support import join, ledger, problems, working

from .jobs import TIMEOUT_S, play, run_job
from .settings import SIZE, WORDS, write_model, write_prompts
from .test_jobs import KILLED


def output(**changed: Any) -> AgentLoopOutput:
    fields = {
        "prompt_ids": [3, 5],
        "response_ids": [6, 7, 8],
        "response_mask": [1, 0, 1],
        "response_logprobs": [-0.5, 0.0, -0.25],
        "reward_score": 0.75,
        "num_turns": 4,
        "metrics": {},
        "extra_fields": {
            "min_global_steps": 3,
            "max_global_steps": 5,
            "reward_extra_info": {"acc": 1, "note": "good", "bad": float("nan")},
        },
    }
    return AgentLoopOutput(**{**fields, **changed})


def test_an_output_becomes_the_columns_of_a_row() -> None:
    made = record([output(routed_experts=np.ones((4, 2, 1)))], updates_per_sync=2, response_length=8)
    assert made.pop("input_ids").tolist() == [3, 5, 6, 7, 8]
    assert made.pop("response_mask").tolist() == [0, 0, 1, 0, 1]
    assert made.pop("rollout_log_probs").tolist() == [0, 0, -0.5, 0, -0.25]
    assert made.pop("num_turns").tolist() == [4]
    experts = made.pop("routed_experts")
    assert (experts.dtype, experts.shape) == (np.int16, (5, 2, 1))
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 1, 0]
    assert made == {"rewards": {"acc": 1.0}, "status": "completed", "reward": 0.75, "model_version": (6, 10)}


def test_outputs_of_a_session_are_rows_of_one_trajectory_with_the_last_ones_reward() -> None:
    first = output(reward_score=None, response_logprobs=None, extra_fields={"min_global_steps": 1})
    made = record([first, output(response_logprobs=None)])
    assert [row["input_ids"].tolist() for row in made["rows"]] == [[3, 5, 6, 7, 8]] * 2
    assert (made["reward"], made["model_version"]) == (0.75, (1, 5))
    assert "rollout_log_probs" not in made["rows"][0]


def test_what_an_engine_does_not_say() -> None:
    silent = output(extra_fields={}, reward_score=None)
    made = record([silent], updates_per_sync=4, model_version=7, response_length=3)
    assert made["model_version"] == 4  # the weights are as old as the last sync
    assert made["status"] == "truncated"
    assert "reward" not in made  # a scorer brings it
    assert "model_version" not in record([silent])
    with pytest.raises(TrajectoryError, match="no output"):
        record([])
    with pytest.raises(TrajectoryError, match="multi_modal_data: images have no columns"):
        record([output(multi_modal_data={"images": [1]})])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_verl_plays_its_prompts_and_a_killed_job_goes_on(redis_url: str, run: str, tmp_path: Path) -> None:
    """A rollout that the engine fails drops its group; other prompts are submitted in its place.

    The prompts that the data loader had given after the last checkpoint are the same groups when it gives them again.
    """
    log = tmp_path / "log"
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.parquet", 100)
    with sa.Producer(redis_url, run, settings=sa.RunSettings(keep={"trained": 1.0})):
        pass
    with working(join(redis_url, run)):
        assert run_job(play, tmp_path, redis_url, run, 4, ("in the step", 3), log=log) == KILLED
        assert problems(join(redis_url, run), deep=False) == []
        assert run_job(play, tmp_path, redis_url, run, 4, log=log) == 0
    rows = json.loads((tmp_path / "checkpoints" / "global_step_4" / "actor" / "rows.json").read_text())
    assert len(rows) == len(set(rows)) == 4 * 4 * SIZE
    counted = ledger(join(redis_url, run))
    assert counted["trained"] == len(rows), counted
    assert counted["dropped"].get("failed", 0) > 0, counted
    assert problems(join(redis_url, run), deep=False) == []
    assert json.loads((tmp_path / "left.json").read_text()) == [], "rows that were trained on are still there"
    trained = sa.kept(redis_url, run=run, outcome="trained")
    ids = [each.rows[0].input_ids for each in trained if each.rollout_index == 0]
    digits = Counter((WORDS[row[1]], WORDS[row[2]]) for row in ids)
    assert len(digits) == 4 * 4, digits  # each prompt once: the data set has more than are played
    validated = json.loads((tmp_path / "validated.json").read_text())
    assert any(name.startswith("val-core/digits/") for name in validated), validated
