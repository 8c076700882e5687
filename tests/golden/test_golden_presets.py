"""Every preset verl/* and roll/*, as a chain over packed trajectories, against the recorded calls of its peer.

A recorded row is one trajectory of one row, padding and all: ROLL's time runs over padding too. Rewards on masked
tokens are taken away first: the peers lose them, a chain credits them to the action before. What a call sets apart
from the preset is set in the configuration. Only trainable tokens are compared: the peers leave values elsewhere.

`roll/gigpo` pools no states of different prompts, ROLL does: step terms are compared where a state has one prompt.
`roll/grpo` and `roll/reinforce` put a reward on the last trainable token, ROLL on the last attended one: token
rewards are compared in rows where that is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamadv.algorithms import ChainResult, PackedBatch, build_chain, expand, preset_names, run_chain
from streamadv.algorithms.chain.sources import run_by_source, split_by_source
from streamadv.algorithms.kl import adapted_coefficient
from streamadv.trajectory.columns import Array
from streamadv.trajectory.schema import Step

from ..unit.algorithms.reference import batch_of, member
from .compare import assert_close, entries, function_of, load
from .mapping_roll import METHODS

Call = tuple[str, Mapping[str, Array], dict[str, Any], dict[str, Array]]  # where, inputs, kwargs, outputs


def calls(function: str) -> Iterator[Call]:
    """The recorded calls of a peer's function that gave a result."""
    for entry in entries():
        if function_of(entry) != function:
            continue
        arrays = load(entry)
        given = {key.removeprefix("in."): array for key, array in arrays.items() if key.startswith("in.")}
        for variant in entry["variants"]:
            if variant.get("raises") or {"dtype", "response_mask"} & variant["kwargs"].keys():
                continue
            prefix = f"out.{variant['name']}."
            outputs = {
                key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)
            }
            plain = {name.removeprefix("config."): value for name, value in variant["kwargs"].items()}
            yield f"{entry['id']}.{variant['name']}", given, plain, outputs


class Rows:
    """Padded rows as trajectories, and back."""

    def __init__(
        self,
        mask: Array,
        labels: Sequence[Any],
        rewards: Array,
        columns: Mapping[str, Array],
        baselines: Array | None = None,
    ) -> None:
        codes = {label: code for code, label in enumerate(dict.fromkeys(labels))}
        self.labels = list(codes)  # of each group
        self.order = sorted(range(len(labels)), key=lambda i: (codes[labels[i]], i))
        self.mask = mask
        pairs = []
        for i in self.order:
            own = {name: column[i] for name, column in columns.items()}
            group = f"g{codes[labels[i]]:04d}"
            pairs.append(member(group, i, float(rewards[i]), [mask[i].tolist()], **own))
            if baselines is not None:
                pairs.append(
                    member(group, len(labels) + i, float(baselines[i]), [mask[i].tolist()], (), True, **own)
                )
        self.batch: PackedBatch = batch_of(pairs)

    def run(self, config: Mapping[str, Any]) -> ChainResult:
        return run_chain(build_chain(config), self.batch)

    def padded(self, values: Tensor) -> Array:
        """[B, T]: packed values [N] in the rows' own order; those of baseline members are left out."""
        table = values.reshape(-1, self.mask.shape[1]).numpy()
        kept = table[~self.batch.baseline.numpy()]
        result = np.zeros(self.mask.shape)
        result[self.order] = kept
        return result

    def advantages(self, result: ChainResult) -> tuple[Array, Array]:
        """(advantages, returns) [B, T], 0 where masked."""
        assert result.advantages is not None
        advantages = self.padded(expand(self.batch, result.level, result.advantages))
        if result.returns is None:
            return advantages, advantages
        return advantages, self.padded(expand(self.batch, result.level, result.returns))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The preset's configuration with options and fields changed; an option set to None keeps the preset's."""
    config: dict[str, Any] = build_chain(name).config.model_dump()
    for key, value in changes.items():
        if value is None:
            continue
        if key in config:
            config[key] = value
        else:
            config["options"][key] = value
    return config


# verl ---------------------------------------------------------------------------------------------------------

OPTIONS = {
    "gamma": "gamma",
    "lam": "lam",
    "epsilon": "epsilon",
    "f_norm": "f_norm",
    "norm_adv_by_std_in_grpo": "norm_by_std",
    "handle_zero_tail": "handle_zero_tail",
}


def verl_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {OPTIONS[name]: value for name, value in kwargs.items() if name in OPTIONS}


def of_outcome(name: str, z: Mapping[str, Array], kwargs: dict[str, Any]) -> tuple[Array, Array]:
    options = verl_options(kwargs)
    if name == "verl-2026-01/grpo_vectorized":
        options["least_std"] = options["epsilon"] ** 0.5
    scores = z["token_level_rewards"].astype(np.float64).sum(1)
    rows = Rows(z["response_mask"], z["index"].tolist(), scores, {})
    return rows.advantages(rows.run(config_of(name, **options)))


def of_gdpo(name: str, z: Mapping[str, Array], kwargs: dict[str, Any]) -> tuple[Array, Array]:
    names = kwargs["gdpo_reward_keys"]
    weights = kwargs.get("gdpo_reward_weights") or [1.0] * len(names)
    rows = Rows(z["response_mask"], z["index"].tolist(), np.zeros(len(z["index"])), {})
    named = {name: torch.from_numpy(z[name][rows.order].astype(np.float64)) for name in names}
    rows.batch = replace(rows.batch, components=named)
    options = {**verl_options(kwargs), "weights": dict(zip(names, weights, strict=True))}
    return rows.advantages(rows.run(config_of(name, **options)))


def of_tokens(name: str, z: Mapping[str, Array], kwargs: dict[str, Any]) -> tuple[Array, Array]:
    mask = z["response_mask"]
    given = {key: z[key] for key in ("values", "old_log_probs", "sum_pi_squared") if key in z}
    if kwargs.get("rollout_is_weights"):
        given["rollout_is_weights"] = z["rollout_is_weights"]
    given["token_level_rewards"] = np.where(mask != 0, z["token_level_rewards"], 0)
    labels = z["index"].tolist() if "index" in z else list(range(len(mask)))
    rows = Rows(mask, labels, np.zeros(len(mask)), given)
    return rows.advantages(rows.run(config_of(name, token_rewards="column", **verl_options(kwargs))))


def of_remax(name: str, z: Mapping[str, Array], kwargs: dict[str, Any]) -> tuple[Array, Array]:
    mask = z["response_mask"]
    rewards = np.where(mask != 0, z["token_level_rewards"], 0).astype(np.float64).sum(1)
    rows = Rows(mask, list(range(len(mask))), rewards, {}, z["reward_baselines"])
    return rows.advantages(rows.run(config_of(name)))


def without_cancellation(z: Mapping[str, Array]) -> Array:
    """[B] bool: rows whose group's variance verl can take from sums of squares in float32."""
    scores, labels = z["token_level_rewards"].astype(np.float64).sum(1), z["index"]
    spread = np.array([scores[labels == label].var() for label in labels])
    offset = np.array([scores[labels == label].mean() ** 2 for label in labels])
    return (spread == 0) | (offset <= 30 * spread)


Compute = Callable[[str, Mapping[str, Array], dict[str, Any]], tuple[Array, Array]]

#: preset -> what its calls are recorded under, without the peer's version, and how the chain computes them
VERL: dict[str, tuple[str, Compute]] = {
    "verl/dr_grpo": ("grpo", of_outcome),
    "verl/gae": ("gae", of_tokens),
    "verl/gdpo": ("gdpo", of_gdpo),
    "verl/gpg": ("gpg", of_outcome),
    "verl/grpo": ("grpo", of_outcome),
    "verl/grpo_passk": ("grpo_passk", of_outcome),
    "verl/grpo_vectorized": ("grpo_vectorized", of_outcome),
    "verl/opo": ("opo", of_outcome),
    "verl/optimal_token_baseline": ("optimal_token_baseline", of_tokens),
    "verl/reinforce_plus_plus": ("reinforce_plus_plus", of_tokens),
    "verl/reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", of_outcome),
    "verl/remax": ("remax", of_remax),
    "verl/rloo": ("rloo", of_outcome),
    "verl/rloo_vectorized": ("rloo_vectorized", of_outcome),
    "verl/tir_optimal_token_baseline": ("tir_optimal_token_baseline", of_tokens),
    "verl-2026-01/grpo_vectorized": ("grpo_vectorized", of_outcome),
    "verl-2026-01/optimal_token_baseline": ("optimal_token_baseline", of_tokens),
    "verl-2026-01/reinforce_plus_plus": ("reinforce_plus_plus", of_tokens),
}


def recorded(name: str) -> Iterator[Call]:
    """The calls that a preset of verl reproduces: of 0.9.1, of January 2026, or of both where nothing has changed."""
    function = VERL[name][0]
    if f"verl-2026-01/{name.removeprefix('verl/')}" not in VERL:
        yield from calls(f"verl_adv_{function}")
    if name.startswith("verl/"):
        yield from calls(f"verl091_adv_{function}")


@pytest.mark.parametrize("name", VERL)
def test_verl(name: str) -> None:
    _, compute = VERL[name]
    compared = 0
    for where, z, kwargs, want in recorded(name):
        if name == "verl/dr_grpo" and kwargs.get("norm_adv_by_std_in_grpo", True):
            continue
        if name == "verl/gdpo" and ("gdpo_reward_keys" not in kwargs or where.endswith("ignored")):
            continue  # one reward is no named one, and verl ignores this option of its config
        mask = z["response_mask"] != 0
        if name == "verl-2026-01/grpo_vectorized":
            mask = mask & without_cancellation(z)[:, None]
        if (
            name == "verl/remax"
        ):  # one number a row here: verl's at the row's first action, where all is to come
            mask = mask & (np.cumsum(mask, 1) == 1)
        got = compute(name, z, kwargs)
        for field, values in zip(("advantages", "returns"), got, strict=True):
            assert_close(values[mask], want[field][mask], f"{name} {where} {field}")
        compared += 1
    assert compared


# ROLL ---------------------------------------------------------------------------------------------------------

ROLL_RETURNS = {
    "roll/agentic_reinforce": ("agentic_reinforce",),
    "roll/gae": ("gae",),
    "roll/grpo": ("grpo",),
    "roll/reinforce": ("reinforce",),
}


def distillation(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    if not (kwargs.get("is_pure_opd") or kwargs.get("use_opd")):
        return None
    recomputed = kwargs.get("enable_old_logprobs_recompute")
    return {
        "coefficient": kwargs.get("opd_kl_coef", 1.0),
        "penalty": kwargs.get("kl_penalty", "kl"),
        "log_probs": "old_log_probs" if recomputed else "rollout_log_probs",
        "only": bool(kwargs.get("is_pure_opd")),
    }


@pytest.mark.parametrize("name", ROLL_RETURNS)
def test_roll_returns(name: str) -> None:
    compared = 0
    for function in ("roll_compute_advantage", "roll_agentic_compute_advantage"):
        for where, z, kwargs, want in calls(function):
            if kwargs["adv_estimator"] not in ROLL_RETURNS[name] or kwargs.get("opd_kl_coef") == 0:
                continue
            mask = z["response_mask"][:, 1:]
            columns = {
                "token_level_rewards": np.where(mask != 0, z["token_level_rewards"], 0),
                "values": z["values"],
                "old_log_probs": z["old_log_probs"],
                "rollout_log_probs": z["infer_logprobs"],
                "teacher_log_probs": z["ref_log_probs_default"],
            }
            rows = Rows(mask, list(range(len(mask))), np.zeros(len(mask)), columns)
            takes = build_chain(name).config.estimator
            config = config_of(
                name,
                token_rewards="column",
                gamma=kwargs["gamma"],
                lam=kwargs["lambd"] if takes == "gae" else None,
                whiten_rewards=kwargs["whiten_rewards"],
                whiten_advantages=kwargs["whiten_advantages"],
                advantage_clip=kwargs["advantage_clip"],
                distill=distillation(kwargs),
            )
            got, returns = rows.advantages(rows.run(config))
            known = mask != 0
            assert_close(got[known], want["advantages"][known], f"{name} {where} advantages")
            assert_close(returns[known], want["returns"][known], f"{name} {where} returns")
            compared += 1
    assert compared


@pytest.mark.parametrize("name", ["roll/grpo", "roll/reinforce"])
def test_roll_rewards(name: str) -> None:
    """The shaping of the response's reward: for grpo by group, for others as configured, then the clip."""
    compared = 0
    for where, z, kwargs, want in calls("roll_reward_postprocess"):
        scopes = kwargs.get("norm_mean_type"), kwargs.get("norm_std_type")
        if (kwargs["adv_estimator"] == "grpo") != (name == "roll/grpo") or "running" in scopes:
            continue
        count, size = len(z["rewards"]), kwargs.get("n_sample") or 1
        rows = Rows(np.ones((count, 1), np.uint8), [i // size for i in range(count)], z["rewards"], {})
        reward: dict[str, Any] = {
            "mean": scopes[0],
            "std": scopes[1],
            "statistics": "row" if any(scopes) else "trajectory",
        }
        if name == "roll/grpo":
            reward = dict(build_chain(name).config.reward)
        clip = kwargs.get("reward_clip") or None
        result = rows.run(config_of(name, reward={**reward, "clip": clip}))
        known = np.isfinite(want["rewards"])  # a group of one: NaN there, 0 here
        got = result.rewards.numpy()
        assert_close(got[known], want["rewards"][known], f"{name} {where}")
        assert np.all(got[~known] == 0)
        if clip is not None and known.all():
            metrics = dict(zip(want["metric_names"].tolist(), want["metric_values"], strict=True))
            share = "critic/reward_clip_frac"
            assert_close(np.array(result.metrics[share]), metrics[share], f"{name} {where} {share}")
        compared += 1
    assert compared


@pytest.mark.parametrize("name", ["roll/grpo", "roll/reinforce", "roll/gae", "roll/agentic_reinforce"])
def test_roll_token_rewards(name: str) -> None:
    """Placing, KL penalty and the clip after it: ROLL's compute_token_reward."""
    compared = 0
    for where, z, kwargs, want in calls("roll_compute_token_reward"):
        if z.get("ref_log_probs") is None or kwargs.get("ref_log_probs", "given") is None:
            continue
        mask = z["response_mask"][:, 1:]
        control = kwargs["controller"]
        columns = {key: z[key] for key in ("old_log_probs", "ref_log_probs")} | {
            "values": np.zeros(mask.shape)
        }
        rows = Rows(mask, list(range(len(mask))), z["response_level_rewards"], columns)
        kl = {
            "penalty": kwargs["kl_penalty"],
            "coefficient": control.get("init_kl_coef", control.get("kl_coef")),
            "log_probs": "old_log_probs",
        }
        config = config_of(name, reward={}, token_reward_clip=kwargs["reward_clip"] or None)
        config["kl"] = kl if kwargs["add_token_level_kl"] else None
        result = rows.run(config)
        got = rows.padded(result.columns["token_level_rewards"])
        attended = z["position_ids"].reshape(len(mask), -1, z["attention_mask"].shape[1])[:, 0]
        last = (attended * z["attention_mask"]).argmax(1) - 1
        same = [row for row in range(len(mask)) if last[row] >= 0 and mask[row, last[row]]]
        assert_close(got[same], want["token_level_rewards"][same], f"{name} {where}")
        if config["kl"] and all(mask.any(1)):
            metrics = dict(zip(want["metric_names"].tolist(), want["metric_values"], strict=True))
            assert_close(np.array(result.metrics["critic/kl"]), metrics["critic/kl"], f"{name} {where} kl")
        compared += bool(same)
    assert compared


def test_roll_gigpo() -> None:
    compared = 0
    for where, z, kwargs, want in calls("roll_compute_response_level_rewards"):
        mean, std = METHODS[kwargs.get("method", "identity")]
        if kwargs["adv_estimator"] != "gigpo" or mean is None or kwargs.get("grouping") != "traj_group_id":
            continue
        assert kwargs.get("norm_mean_type") is None
        labels, states = z["traj_group_id"].tolist(), z["state_hash"].tolist()
        codes = {label: f"g{code:04d}" for code, label in enumerate(dict.fromkeys(labels))}
        order = sorted(range(len(labels)), key=lambda i: (codes[labels[i]], i))
        pairs = [
            member(
                codes[labels[i]],
                i,
                float(z["episode_scores"][i]),
                [[1]],
                [Step(start=0, end=1, reward=float(z["step_rewards"][i]), state_key=states[i])],
            )
            for i in order
        ]
        batch = batch_of(pairs)
        weights = kwargs["episode_reward_weight"], kwargs["step_reward_weight"]

        def found(
            episode: float, step: float, clip: float | None, batch: PackedBatch = batch, std: Any = std
        ) -> Array:
            config = config_of(
                "roll/gigpo",
                gamma=0.0,  # the recorded step rewards are returns already
                norm_by_std=std is not None,
                episode_weight=episode,
                step_weight=step,
                advantage_clip=clip,
            )
            advantages = run_chain(build_chain(config), batch).advantages
            assert advantages is not None
            return advantages.numpy()

        episode_norm, step_norm = want["episode_rewards_norm"][order], want["step_rewards_norm"][order]
        assert_close(found(1.0, 0.0, None), episode_norm, f"{where} episode")
        prompts = {state: {labels[i] for i in order if states[i] == state} for state in states}
        alone = np.array([len(prompts[states[i]]) == 1 for i in order])
        assert_close(found(0.0, 1.0, None)[alone], step_norm[alone], f"{where} step")
        total = found(*weights, kwargs.get("reward_clip") or None)
        assert_close(total[alone], want["response_level_rewards"][order][alone], f"{where} sum")
        compared += bool(alone.any())
    assert compared


def test_roll_step_reinforce() -> None:
    compared = 0
    for where, z, kwargs, want in calls("roll_compute_discounted_returns"):
        if "step_rewards" not in want:
            continue
        names, numbers = z["traj_id"].tolist(), z["step"].tolist()
        ids = {name: code for code, name in enumerate(dict.fromkeys(names))}
        order = sorted(range(len(names)), key=lambda i: (ids[names[i]], numbers[i]))
        pairs = []
        for name, code in ids.items():
            own = [i for i in order if names[i] == name]
            steps = [Step(start=k, end=k + 1, reward=float(z["step_scores"][i])) for k, i in enumerate(own)]
            pairs.append(member("g", code, 0.0, [[1] * len(own)], steps))
        config = config_of("roll/step_reinforce", gamma=kwargs.get("gamma", 1.0))
        advantages = run_chain(build_chain(config), batch_of(pairs)).advantages
        assert advantages is not None
        assert_close(advantages.numpy(), want["step_rewards"][order], where)
        compared += 1
    assert compared


def flow_config(kwargs: Mapping[str, Any], width: int) -> dict[str, Any]:
    """ROLL's RLVR pipeline as one chain: masks, rewards, KL, token rewards, estimator, whitening, domain by domain."""
    estimator = kwargs.get("adv_estimator", "reinforce")
    scopes = kwargs.get("norm_mean_type"), kwargs.get("norm_std_type")
    reward: dict[str, Any] = {
        "mean": scopes[0],
        "std": scopes[1],
        "statistics": "row" if any(scopes) else "trajectory",
    }
    if estimator == "grpo":
        reward = dict(build_chain("roll/grpo").config.reward)
    kl = {"penalty": kwargs.get("kl_penalty", "kl"), "log_probs": "old_log_probs"}
    masks = {"difficulty_low": 0.1, "difficulty_high": 0.95} if kwargs.get("difficulty_mask") else {}
    masks |= {"max_length": width} if kwargs.get("max_len_mask") else {}
    return config_of(
        f"roll/{estimator}",
        by_source=True,
        reward={**reward, "clip": kwargs.get("reward_clip")},
        masks=masks or None,
        token_reward_clip=kwargs.get("reward_clip"),
        kl={**kl, "coefficient": kwargs["kl"]["init_kl_coef"]} if kwargs.get("add_token_level_kl") else None,
        whiten_rewards=kwargs.get("whiten_rewards"),
        whiten_advantages=kwargs.get("whiten_advantages"),
        advantage_clip=kwargs.get("advantage_clip"),
        gamma=kwargs.get("gamma"),
        lam=kwargs.get("lambd"),
    )


def test_roll_flow_by_domain() -> None:
    compared = 0
    for where, z, kwargs, want in calls("roll2026_rlvr_domain_flow"):
        mask = z["response_mask"][:, 1:]
        columns = {key: z[key] for key in ("old_log_probs", "ref_log_probs", "values")}
        rows = Rows(mask, z["prompt_id"].tolist(), z["response_level_rewards"], columns)
        domains = dict(zip(z["prompt_id"].tolist(), z["domain"].tolist(), strict=True))
        rows.batch = replace(rows.batch, group_sources=[domains[label] for label in rows.labels])
        config = flow_config(kwargs, mask.shape[1])
        found = by_domain_in_turn(rows, config, kwargs["kl"], want["domain_order"].tolist())
        if "target_kl" not in kwargs["kl"]:
            found = rows.run(config)
        assert found.advantages is not None
        trained = want["final_response_mask"] != 0
        if config["masks"]:
            assert_close(rows.padded(found.columns["response_mask"]), trained, f"{where} mask")
        got, returns = rows.advantages(found)
        known = mask != 0
        assert_close(got[known], want["advantages"][known], f"{where} advantages")
        assert_close(returns[known], want["returns"][known], f"{where} returns")
        metrics = dict(zip(want["metric_names"].tolist(), want["metric_values"], strict=True))
        for domain in want["domain_order"].tolist():
            name = f"{domain}/critic/reward_clip_frac"
            if name in found.metrics:
                assert_close(np.array(found.metrics[name]), metrics[name], f"{where} {name}")
        compared += 1
    assert compared


def by_domain_in_turn(
    rows: Rows, config: dict[str, Any], kl: Mapping[str, float], domains: Sequence[str]
) -> ChainResult:
    """The chain domain by domain, with a coefficient that moves after each, as ROLL's shared controller does.

    In a run it moves from batch to batch: a batch record carries one.
    """
    moved = {"coefficient": kl["init_kl_coef"]}
    coefficients: dict[str, float] = {}
    parts = dict(split_by_source(rows.batch))
    for domain in domains:
        coefficients[domain] = moved["coefficient"]
        part = run_chain(
            build_chain({**config, "by_source": False}), parts[domain].batch, coefficients[domain]
        )
        if "target_kl" in kl:
            moved["coefficient"] = adapted_coefficient(
                *(moved["coefficient"], part.metrics["critic/kl"], kl["target_kl"], kl["kl_horizon"]),
                parts[domain].batch.num_trajectories,
            )
    chain = build_chain({**config, "by_source": False})
    return run_by_source(lambda source, part: run_chain(chain, part, coefficients[source]), rows.batch)


# TRL ----------------------------------------------------------------------------------------------------------

#: preset -> the setting of TRL's that its calls are recorded with
TRL = {
    "trl/gdpo": ("normalize_then_sum", None),
    "trl/grpo": ("sum_then_normalize", "group"),
    "trl/grpo_batch": ("sum_then_normalize", "batch"),
    "trl/grpo_none": ("sum_then_normalize", "none"),
    "trl/rloo": (False, None),
    "trl/rloo_normalized": (True, None),
}


@pytest.mark.parametrize("name", TRL)
def test_trl(name: str) -> None:
    """Completions that no function could score are left out. gdpo: a chain counts a reward that is not there as 0."""
    compared = 0
    functions = (
        ("trl_rloo_advantages",) if "rloo" in name else ("trl116_grpo_advantages", "trl_grpo_advantages")
    )
    for where, z, kwargs, want in (call for function in functions for call in calls(function)):
        kind = kwargs.get("aggregation", kwargs.get("multi_objective_aggregation"))
        kind = kwargs["normalize_advantages"] if "rloo" in name else kind
        if (kind, kwargs.get("scale_rewards")) != TRL[name]:
            continue
        scores = z.get("rewards_per_func_nan", z.get("rewards_per_func"))
        assert scores is not None
        scored = ~np.isnan(scores).all(1)
        if name == "trl/gdpo" and np.isnan(scores[scored]).any():
            continue
        labels = (np.arange(len(scores)) // kwargs["num_generations"])[scored]
        given = scores[scored].astype(np.float64)
        sums = np.nansum(given * z["reward_weights"], 1)
        columns: dict[str, Array] = {}
        mask, kl = np.ones((len(labels), 1), np.int64), None
        if kwargs.get("beta"):
            mask, kl = (
                z["completion_mask"][scored],
                {"coefficient": kwargs["beta"], "log_probs": "old_log_probs"},
            )
            columns = {
                "old_log_probs": z["old_per_token_logps"][scored],
                "ref_log_probs": z["ref_per_token_logps"][scored],
            }
        rows = Rows(mask, labels.tolist(), sums, columns)
        bounds = kwargs.get("reward_clip_range")
        config = config_of(name, kl=kl, reward=({"clip": bounds} if bounds else None))
        if name == "trl/gdpo":
            named = {str(k): torch.from_numpy(given[rows.order, k]) for k in range(given.shape[1])}
            rows.batch = replace(rows.batch, components=named)
            weights = {str(k): float(weight) for k, weight in enumerate(z["reward_weights"])}
            config = config_of(name, weights=weights)
        result = rows.run(config)
        assert result.advantages is not None
        got = np.zeros(len(scores))
        got[np.flatnonzero(scored)[rows.order]] = result.advantages.numpy()
        assert_close(got, want["advantages"], f"{name} {where}")
        compared += 1
    assert compared


def test_every_preset_of_a_peer_is_compared() -> None:
    roll = {*ROLL_RETURNS, "roll/gigpo", "roll/step_reinforce"}
    assert {name for name in preset_names() if "/" in name} == {*VERL, *roll, *TRL}
