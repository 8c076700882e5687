"""Right and wrong calls of every public function of `streamadv.padded`, made in a process of their own.

`python -m tests.unit.algorithms.door_cases` reads one JSON line per question and answers each with one: what was
wrong with the outcome of each case, [] if nothing. A call that reads foreign memory ends this process, not pytest.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamadv import padded
from streamadv.algorithms import RunningMoments
from streamadv.errors import StreamadvError

from . import packed_door_cases

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """How a function is called rightly.

    Letters of a shape: B rows, T tokens, W = T + 1, K kinds, V words; behind them m mask, i whole numbers, l labels.
    """

    arrays: Mapping[str, str]  # argument -> shape, e.g. "BT", "BTm", "Bl"
    results: Sequence[str | None] = ("BT", "BT")  # shapes; None: numbers by name
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)  # of the mapping `batch`
    added: Mapping[str, str] = field(default_factory=dict)  # columns that come back in it
    free: Sequence[str] = ()  # options of which any number, or any text, is right
    differentiable: bool = False
    elementwise: bool = False  # NaN stays where it is
    nan_is_unknown: bool = False


OUTCOME = {"token_level_rewards": "BT", "response_mask": "BTm", "index": "Bl"}
BASELINE = {**OUTCOME, "old_log_probs": "BT", "sum_pi_squared": "BT"}
MASKED = {"values": "BT", "mask": "BTm"}
RATIO = {"log_ratio": "BT", "response_mask": "BTm"}
LOG_PROBS = {"old_log_prob": "BT", "rollout_log_prob": "BT", "response_mask": "BTm"}
ADVANTAGE = {"token_level_rewards": "BT", "response_mask": "BTm"}
ADDED = dict.fromkeys(("advantages", "returns", "raw_advantages", "token_level_rewards"), "BT")
GROUPED = {"norm_mean_type": "group", "norm_std_type": "group"}
TEACHER = {"rollout_log_probs": "BT", "teacher_log_probs": "BT"}
REWARDED = {
    "response_mask": "BTm",
    "response_level_rewards": "B",
    "old_log_probs": "BT",
    "ref_log_probs": "BT",
}
SHIFTED = {**REWARDED, "response_mask": "BWm", "attention_mask": "BWm", "position_ids": "BWi"}


def _in_batch(columns: Mapping[str, str], added: Mapping[str, str], **options: Any) -> Entry:
    return Entry({}, (), options, columns, added)


ENTRIES: dict[str, Entry] = {
    "adapted_coefficient": Entry(
        {}, ("",), {"coefficient": 0.1, "current_kl": 0.2, "target": 0.1, "horizon": 10.0, "n_steps": 8},
        free=("current_kl",),
    ),
    "agentic_reward_norm": Entry({"scores": "B", "index": "Bl"}, ("B",), GROUPED),
    "agg_loss": Entry({"loss": "BT", "mask": "BTm", "weights": "B"}, ("",), differentiable=True),
    "agg_loss:rows": Entry({"loss": "BT", "mask": "BTm"}, ("",), {"mode": "seq-mean-token-mean"}, differentiable=True),
    "apply_kl_penalty": Entry(
        {"token_level_scores": "BT", "response_mask": "BTm", "old_log_probs": "BT", "ref_log_probs": "BT"},
        ("BT", None), {"kl_coef": 0.1, "kl_penalty": "k3"},
    ),
    "approx_kl": Entry({"log_probs": "BT", "ref_log_probs": "BT"}, ("BT",), differentiable=True, elementwise=True),
    "approx_kl:k3": Entry(
        {"log_probs": "BT", "ref_log_probs": "BT"}, ("BT",), {"penalty": "k3"}, differentiable=True, elementwise=True
    ),
    "clip_fraction": Entry({**MASKED}, ("",), {"clip_max": 1.0, "clip_min": -1.0}),
    "compute_advantage": _in_batch({**ADVANTAGE, "values": "BT"}, ADDED, advantage_clip=1.0),
    "compute_advantage:shifted": _in_batch(
        {**ADVANTAGE, "response_mask": "BWm", "values": "BT"}, ADDED, whiten_rewards=True, whiten_advantages=True
    ),
    "compute_advantage:agentic": _in_batch(ADVANTAGE, ADDED, adv_estimator="agentic_reinforce", gamma=0.9),
    "compute_advantage:return": _in_batch({**ADVANTAGE}, ADDED, adv_estimator="grpo"),
    "compute_advantage:distill": _in_batch(
        {**ADVANTAGE, **TEACHER}, ADDED, adv_estimator="reinforce", distill_coef=0.5, distill_penalty="k3"
    ),
    "compute_advantage:only": _in_batch({**ADVANTAGE, **TEACHER}, ADDED, distill_coef=0.5, distill_only=True),
    "compute_advantage:teachers": _in_batch(
        {
            **ADVANTAGE, "rollout_log_probs": "BT", "teacher_log_probs_a": "BT", "teacher_log_probs_b": "BT"
        },
        ADDED, adv_estimator="reinforce", distill_teachers={"a": 0.5, "b": 2.0},
    ),
    "compute_agentic_reinforce_return": Entry({"token_level_rewards": "BT", "mask": "BTm"}),
    "compute_discounted_returns": Entry({"step_scores": "B", "traj_id": "Bl", "step": "Bi"}, ("B",), {"gamma": 0.9}),
    "compute_gae_advantage_return": Entry({"token_level_rewards": "BT", "values": "BT", "response_mask": "BTm"}),
    "compute_gdpo_outcome_advantage": Entry(OUTCOME),
    "compute_gdpo_outcome_advantage:verl": Entry(OUTCOME, options={"peer_quirks": "verl"}),
    "compute_gpg_outcome_advantage": Entry(OUTCOME),
    "compute_grpo_outcome_advantage": Entry(OUTCOME),
    "compute_grpo_passk_outcome_advantage": Entry(OUTCOME),
    "compute_grpo_vectorized_outcome_advantage": Entry(OUTCOME),
    "compute_grpo_vectorized_outcome_advantage:verl": Entry(OUTCOME, options={"peer_quirks": "verl"}),
    "compute_grpo_vectorized_outcome_advantage:verl-2026-01": Entry(
        OUTCOME, options={"peer_quirks": "verl-2026-01"}
    ),
    "compute_hierarchical_grpo_advantage": Entry(
        {"rewards": "B", "index": "Bl", "agents": "Bl", "episodes": "Bl"}, ("B",), {"episode_agents": {0, 1}}
    ),
    "compute_maxrl_outcome_advantage": Entry(OUTCOME),
    "compute_offpolicy_metrics": Entry(LOG_PROBS, (None,)),
    "compute_multi_trajectory_grpo_advantage": Entry({**OUTCOME, "sessions": "Bl", "numbers": "Bi"}),
    "compute_normalize_then_sum_advantage": Entry(
        {"rewards": "BK", "index": "Bl", "weights": "K"}, ("B",), nan_is_unknown=True
    ),
    "compute_opo_outcome_advantage": Entry(OUTCOME),
    "compute_optimal_token_baseline_advantage": Entry(
        {**BASELINE, "rollout_is_weights": "BT"}, options={"handle_zero_tail": False}
    ),
    "compute_rae_advantage": Entry({"rewards": "B", "agents": "Bl"}, ("B", None)),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": Entry(OUTCOME),
    "compute_reinforce_plus_plus_outcome_advantage": Entry(ADVANTAGE),
    "compute_remax_outcome_advantage": Entry(
        {"token_level_rewards": "BT", "reward_baselines": "B", "response_mask": "BTm"}
    ),
    "compute_response_level_rewards": _in_batch(
        {"scores": "BT"}, {"response_level_rewards": "B"},
        adv_estimator="reinforce", norm_mean_type="batch", reward_clip=1.0,
    ),
    "compute_response_level_rewards:gigpo": Entry(
        {"traj_group_id": "Bl", "state_hash": "Bl"}, (),
        {"adv_estimator": "gigpo", "norm_mean_type": "group", "step_norm_std_type": "group"},
        {"episode_scores": "B", "step_rewards": "B"},
        dict.fromkeys(("response_level_rewards", "episode_rewards_norm", "step_rewards_norm"), "B"),
    ),
    "compute_rloo_outcome_advantage": Entry(OUTCOME),
    "compute_rollout_correction_and_rejection_mask": Entry(
        LOG_PROBS, ("BT", "BT", None),
        {"rollout_is": "sequence", "rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "2.0,3.0"},
    ),
    "compute_rollout_correction_and_rejection_mask:neither": Entry(LOG_PROBS, ("none", "BT", None)),
    "compute_rollout_correction_weights": Entry(RATIO, ("BT", None)),
    "compute_rollout_correction_weights:segment": Entry(
        RATIO, ("BT", None), {"rollout_is": "segment", "mode": "mask", "rollout_is_lower": 0.5}
    ),
    "compute_rollout_correction_weights:sequence": Entry(
        RATIO, ("BT", None), {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    ),
    "compute_rollout_rejection_mask": Entry(
        RATIO, ("BT", None), {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1}
    ),
    "compute_step_grpo_advantage": Entry({"rewards": "B", "index": "Bl", "step_index": "Bl"}, ("B",)),
    "compute_tir_optimal_token_baseline_advantage": Entry(BASELINE),
    "compute_token_reward": _in_batch(
        REWARDED, {"token_level_rewards": "BT"}, add_token_level_kl=True, kl_coef=0.1, reward_clip=1.0
    ),
    "compute_token_reward:shifted": _in_batch(
        SHIFTED, {"token_level_rewards": "BT"}, add_token_level_kl=True, kl_coef=0.1, peer_quirks="roll"
    ),
    "compute_train_infer_correction": Entry(
        {"old_log_probs": "BT", "rollout_log_probs": "BT", "response_mask": "BTm"}, ("BT", "BT", None),
        {"weight_level": "segment", "filters": [padded.RatioFilter(), padded.RatioFilter("sequence")]},
    ),
    "cost_penalty": Entry({"rewards": "B", "index": "Bl"}, ("B",), {"costs": [], "weights": []}),
    "dapo_filter_groups": Entry({"rewards": "B", "index": "Bl"}, ("B",)),
    "difficulty_mask": Entry({"scores": "B", "index": "Bl"}, ("B",)),
    "expand_to_token_level": Entry(
        {"response_level_rewards": "B", "attention_mask": "BWm", "position_ids": "BWi"}, ("BT",)
    ),
    "full_kl": Entry({"logits": "BTV", "ref_logits": "BTV"}, ("BT",), differentiable=True, elementwise=True),
    "group_mean_std": Entry({"scores": "B", "index": "Bl"}, ("B", "B", "B")),
    "m2po_mask": Entry({"log_ratio": "BT", "mask": "BTm"}, ("BT",), {"threshold": 0.04}),
    "masked_mean": Entry(MASKED, ("",), differentiable=True),
    "masked_mean:rows": Entry(MASKED, ("B",), {"dim": 1}, differentiable=True),
    "masked_normalize": Entry(MASKED, ("BT",)),
    "masked_sum": Entry(MASKED, ("",), differentiable=True),
    "masked_var": Entry(MASKED, ("",), differentiable=True),
    "masked_whiten": Entry(MASKED, ("BT",)),
    "off_policy_sequence_mask": Entry(
        {"advantages": "BT", "log_probs": "BT", "behaviour_log_probs": "BT", "mask": "BTm"}, ("BT",), {"threshold": 0.1}
    ),
    "off_policy_sequence_mask:rows": Entry(
        {"advantages": "B1", "log_probs": "BT", "behaviour_log_probs": "BT", "mask": "BTm"}, ("BT",), {"threshold": 0.1}
    ),
    "overlong_penalty": Entry({"rewards": "B", "lengths": "Bi"}, ("B",), {"max_length": 8, "buffer": 2}),
    "pf_ppo_weights": Entry({"scores": "B"}, ("B",)),
    "pf_ppo_weights:max_random": Entry({"scores": "B"}, ("B",), {"reweight_method": "max_random"}),
    "proximal_log_probs": Entry(
        {"behaviour_log_probs": "BT", "log_probs": "BT", "versions": "BTi"}, ("BT",), {"current_version": 3},
        elementwise=True,
    ),
    "proximal_log_probs:rollout": Entry(
        {"behaviour_log_probs": "BT", "log_probs": "BT", "versions": "BTi"}, ("BT",),
        {"current_version": 3, "method": "rollout"}, elementwise=True,
    ),
    "reward_norm": Entry({"rewards": "B", "index": "Bl"}, ("B",), GROUPED),
    "reward_norm:identity": Entry({"rewards": "B"}, ("B",), {"norm_mean_type": None, "norm_std_type": None}),
    "reward_norm:running": Entry(
        {"rewards": "B"}, ("B",),
        {"norm_mean_type": "running", "norm_std_type": "running", "running": RunningMoments(4.0, 0.5, 2.0)},
    ),
    "reward_postprocess": Entry(
        {"index": "Bl"}, (), {"adv_estimator": "grpo"}, {"response_level_rewards": "B"}, {"response_level_rewards": "B"}
    ),
    "reward_postprocess:identity": _in_batch({"response_level_rewards": "B"}, {"response_level_rewards": "B"}),
    "sample_level_mask": Entry(
        {"response_mask": "BTm", "scores": "B", "index": "Bl"}, ("BT", None),
        {"max_response_length": 4, "max_len_mask": True, "use_difficulty_mask": True, "error_max_len_clip": True},
    ),
    "sample_level_mask:none": Entry({"response_mask": "BTm", "scores": "B"}, ("BT", None), {"max_response_length": 4}),
    "sample_weights": Entry({"response_mask": "BTm", "difficulty": "B"}, ("B",), {"by_length": True}),
    "truncation_penalty": Entry({"rewards": "B", "truncated": "Bm"}, ("B",), {"coefficient": -1.0}),
    "version_staleness": Entry({"versions": "BTi", "mask": "BTm"}, (None,), {"current_version": 3}),
}  # fmt: skip

#: In place of a function's name: all that `packed_door_cases` has.
PACKED_DOOR = "packed batches"

#: Public names that take no arrays, so that there is nothing to get wrong in their shapes.
RECORDS = {"RatioFilter"}


@dataclass
class Case:
    """A call: arguments, whether it must be refused, and what a result must equal."""

    name: str
    arguments: Arguments
    columns: Arguments
    refused: bool = False
    equal: bool = False  # to the plain call, bit by bit
    finite: bool = True
    works: bool = False  # must not be refused
    sizes: Mapping[str, int] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Any:
        batch = {"batch": self.columns} if self.columns else {}
        return function(**batch, **self.arguments)


def sizes_of(rows: int, tokens: int) -> dict[str, int]:
    return {"B": rows, "T": tokens, "W": tokens + 1, "K": 3, "V": 5, "1": 1}


def array_of(shape: str, sizes: Mapping[str, int], rng: np.random.Generator, filled: float) -> Any:
    """Numbers for `shape`: log-probs and rewards alike around 0, masks with `filled` of their places set."""
    kind = shape[-1] if shape[-1] in "mil" else ""
    dims = [sizes[letter] for letter in shape.removesuffix(kind)]
    if kind == "m":
        mask = torch.from_numpy((rng.random(dims) < filled).astype(np.int64))
        mask.view(-1)[:1] = int(filled > 0)
        return mask
    if kind == "i":
        return torch.from_numpy(rng.integers(0, 8, dims))
    if kind == "l":
        return [int(label) for label in rng.integers(0, 2, dims)]
    return torch.from_numpy(rng.normal(0, 0.5, dims).astype(np.float32))


def plain(entry: Entry, rows: int, tokens: int, seed: int, filled: float = 0.6) -> Case:
    rng, sizes = np.random.default_rng(seed), sizes_of(rows, tokens)
    arguments = {name: array_of(shape, sizes, rng, filled) for name, shape in entry.arrays.items()}
    columns = {name: array_of(shape, sizes, rng, filled) for name, shape in entry.columns.items()}
    return Case("plain", {**arguments, **entry.options}, columns, sizes=sizes)


def changed(case: Case, name: str, argument: str, value: Any, **how: Any) -> Case:
    arguments, columns = dict(case.arguments), dict(case.columns)
    (columns if argument in columns else arguments)[argument] = value
    return Case(f"{argument}: {name}", arguments, columns, sizes=case.sizes, **how)


def odd_layouts(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """The same numbers, laid out in other ways."""
    yield "numpy", tensor.numpy()
    frozen = tensor.numpy().copy()
    frozen.flags.writeable = False
    yield "read-only numpy", frozen
    yield "other byte order", tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">"))
    if tensor.dim():
        yield "backwards numpy", tensor.numpy()[::-1].copy()[::-1]
        yield "every second", torch.stack([tensor, tensor + 1], -1)[..., 0]
        yield "Fortran order", np.asfortranarray(tensor.numpy())
        yield "inside a larger one", torch.cat([tensor, tensor])[: len(tensor)]
    if tensor.dim() == 2:
        yield "transposed", tensor.t().contiguous().t()


def wrong_shapes(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "0-d", torch.zeros((), dtype=tensor.dtype)
    yield "flat", tensor.reshape(-1) if tensor.dim() > 1 else tensor[None]
    yield "one more dimension", tensor[None]
    yield "no rows", tensor[:0]
    yield "one row", tensor[:1]
    yield "a row less", tensor[:-1]
    yield "a row more", torch.cat([tensor, tensor[:1]])
    if tensor.dim() > 1:
        yield "no columns", tensor[:, :0]
        yield "one column", tensor[:, :1]
        yield "a column less", tensor[:, :-1]
        yield "a column more", torch.cat([tensor, tensor[:, :1]], 1)
        yield "transposed", tensor.transpose(0, 1)


def fits_too(function: str, argument: str, shape: Sequence[int], case: Case) -> bool:
    """Whether `shape` is right though it is not the plain one: its letters stand for one size each all the same."""
    entry = ENTRIES[function]
    arrays = {**entry.arrays, **entry.columns}
    kinds = {name: letters.rstrip("mil") for name, letters in arrays.items()}
    if function.startswith(
        ("compute_advantage", "compute_token_reward")
    ):  # a mask one wider than the token columns
        mask = case.columns["response_mask"].shape if argument != "response_mask" else shape
        width = {len(mask) == 2 and mask[1], len(mask) == 2 and mask[1] - 1}
        others = {
            name
            for name, letters in kinds.items()
            if letters == "BT" and name not in ("response_mask", argument)
        }
        if argument == "response_mask":
            return (
                len(mask) == 2
                and mask[0] == case.sizes["B"]
                and case.sizes["T"] in width
                and "W" not in kinds.values()
            )
        return not others and len(shape) == 2 and shape[0] == case.sizes["B"] and shape[1] in width
    if argument == "advantages":
        return tuple(shape) in {(case.sizes["B"], 1), (case.sizes["B"], case.sizes["T"])}
    if len(shape) != len(kinds[argument]):
        return False
    elsewhere = set("".join(letters for name, letters in kinds.items() if name != argument))
    return all(
        size == case.sizes[letter] or letter not in elsewhere
        for size, letter in zip(shape, kinds[argument], strict=True)
    )


def array_cases(function: str, entry: Entry, case: Case) -> Iterator[Case]:
    """Every array of the call in odd and in wrong forms."""
    for argument, shape in {**entry.arrays, **entry.columns}.items():
        value = case.columns.get(argument, case.arguments.get(argument))
        optional = (
            argument in entry.arrays
            and inspect.signature(_function(function)).parameters[argument].default is None
        )
        if shape.endswith("l"):
            yield from label_cases(argument, value, case)
            continue
        for name, other in odd_layouts(value):
            yield changed(case, name, argument, other, equal=True)
        for name, other in wrong_shapes(value):
            if other.shape != value.shape:
                refused = not fits_too(function, argument, other.shape, case)
                yield changed(case, name, argument, other, refused=refused)
        for wrong in ("abc", 1.5, [[1.0]], object(), {"a": 1}):
            yield changed(case, f"a {type(wrong).__name__}", argument, wrong, refused=True)
        yield changed(case, "a list", argument, value.tolist(), refused=True)
        nothing_else = argument in entry.arrays or argument not in ("old_log_probs", "ref_log_probs")
        if (
            not optional
            and nothing_else
            and "None" not in str(inspect.signature(_function(function)).parameters.get(argument))
        ):
            yield changed(case, "None", argument, None, refused=True)
        yield changed(case, "complex", argument, value.to(torch.complex64), refused=True)
        yield changed(case, "objects", argument, value.numpy().astype(object), refused=True)
        yield changed(case, "sparse", argument, value.to_sparse(), refused=True)
        yield changed(case, "without data", argument, value.to("meta"), refused=True)
        if shape.endswith("m"):
            yield from mask_cases(argument, value, case)
        elif not shape.endswith("i"):
            yield from number_cases(argument, value, case, entry)


def label_cases(argument: str, labels: list[Any], case: Case) -> Iterator[Case]:
    yield changed(case, "a tensor", argument, torch.tensor(labels), equal=True)
    yield changed(case, "numpy", argument, np.asarray(labels), equal=True)
    yield changed(case, "a tuple", argument, tuple(labels), equal=True)
    yield changed(case, "negative", argument, [label - 7 for label in labels], equal=False)
    yield changed(case, "huge", argument, [label + 2**70 for label in labels])
    yield changed(case, "text", argument, [f"prompt {label}" for label in labels])
    yield changed(case, "too few", argument, labels[:-1], refused=True)
    yield changed(case, "too many", argument, [*labels, 0], refused=True)
    yield changed(case, "none", argument, [], refused=True)
    yield changed(case, "2-d", argument, np.asarray(labels)[:, None], refused=True)
    yield changed(case, "lists", argument, [[label] for label in labels], refused=True)
    yield changed(case, "tensors", argument, list(torch.tensor(labels)), refused=True)
    yield changed(case, "NaN", argument, [float("nan")] * len(labels), refused=True)
    yield changed(case, "one word", argument, "x" * len(labels), refused=True)
    yield changed(case, "a number", argument, 3, refused=True)


def mask_cases(argument: str, mask: Tensor, case: Case) -> Iterator[Case]:
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    ):
        yield changed(case, str(dtype), argument, mask.to(dtype), equal=True)
    for wrong in (2, -1, 0.5, float("nan"), float("inf"), 256):
        other = mask.to(torch.float32)
        other[(0,) * other.dim()] = wrong
        yield changed(case, f"a {wrong}", argument, other, refused=True)
    full = mask.to(torch.uint8)
    full[(0,) * full.dim()] = 255
    yield changed(case, "a 255 in uint8", argument, full, refused=True)
    yield changed(case, "all ones", argument, torch.ones_like(mask))
    yield changed(case, "all zeros", argument, torch.zeros_like(mask))


def number_cases(argument: str, values: Tensor, case: Case, entry: Entry) -> Iterator[Case]:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield changed(case, str(dtype), argument, values.to(dtype))
    yield changed(case, "float64", argument, values.double(), equal=True)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
        yield changed(case, str(dtype), argument, (values > 0).to(dtype))
    yield changed(
        case, "same everywhere", argument, torch.full((1,) * values.dim(), 0.25).expand(values.shape)
    )
    yield changed(case, "with gradient", argument, values.clone().requires_grad_(), equal=True)
    mask = mask_of(values, case, entry)
    for wrong in (float("nan"), float("inf"), -float("inf"), 1e300):
        other = values.clone().double()
        counting = torch.ones_like(values) if mask is None else mask
        for counted in counting.nonzero()[:1].tolist():
            other[tuple(counted)] = wrong
            own = entry.elementwise or (entry.nan_is_unknown and wrong != wrong)
            yield changed(
                case,
                f"a {wrong} that counts",
                argument,
                other,
                refused=not own and not entry.nan_is_unknown,
                finite=False,
            )
        if mask is not None:
            other = torch.where(mask != 0, values.double(), wrong)
            yield changed(case, f"{wrong} outside", argument, other, works=wrong != wrong)


def mask_of(values: Tensor, case: Case, entry: Entry) -> Tensor | None:
    """The mask that says which of `values` count, without its first column where it is one wider."""
    for name, shape in {**entry.arrays, **entry.columns}.items():
        if "mask" in name and shape.endswith("m"):
            mask: Tensor = case.columns.get(name, case.arguments.get(name))
            fitting = mask[:, 1:] if shape == "BWm" else mask
            return fitting if fitting.shape == values.shape else None
    return None


def option_cases(function: str, entry: Entry, case: Case) -> Iterator[Case]:
    """Every other argument with wrong types and values."""
    for name, parameter in inspect.signature(_function(function)).parameters.items():
        if (
            name in entry.arrays
            or name == "batch"
            or "Tensor" in str(parameter.annotation)
            or str(parameter.annotation) in ANNOTATED
        ):
            continue
        given = entry.options.get(name, parameter.default)
        for wrong in ("vrel", b"x", [1], {"a": [2]}, object(), 1j):
            refused = not (name == "episode_agents" and wrong == [1])
            yield changed(case, f"a {type(wrong).__name__}", name, wrong, refused=refused)
        if not isinstance(given, bool):
            yield changed(case, "True", name, True, refused=True)
        for number in (-1, -0.5, 0, 1e-30, 2, 1e30, float("inf"), -float("inf")):
            yield changed(case, f"{number}", name, number, finite=abs(number) < 1e9 or None)
        if name not in entry.free:
            yield changed(case, "NaN", name, float("nan"), refused=True)
        yield changed(case, "None", name, None)


#: Arrays that an entry leaves out.
ANNOTATED = {"Labels | None", "Rows | None", "Tokens | None", "AnyMask | None", "Mask | None"}


def cases(function: str, rows: int = 4, tokens: int = 6, seed: int = 0) -> Iterator[Case]:
    entry = ENTRIES[function]
    base = plain(entry, rows, tokens, seed)
    yield base
    yield from array_cases(function, entry, base)
    yield from option_cases(function, entry, base)
    for name in entry.columns:
        if len(base.columns) > 1:
            others = {other: column for other, column in base.columns.items() if other != name}
            # as ROLL: no KL
            without = name == "ref_log_probs" and base.arguments.get("peer_quirks") == "roll"
            yield Case(f"without {name}", base.arguments, others, refused=not without, sizes=base.sizes)
    for some_rows, some_tokens, filled in (
        (0, 6, 0.6),
        (4, 0, 0.6),
        (0, 0, 0.6),
        (1, 1, 1.0),
        (1, 6, 0.6),
        (4, 1, 1.0),
        (4, 6, 0.0),
    ):
        small = plain(entry, some_rows, some_tokens, seed, filled)
        small.name = f"{some_rows} rows of {some_tokens}, {filled} of the mask"
        yield small


def outcome(function: str, case: Case, wanted: Any) -> list[str]:
    """What is wrong with the outcome of a case; `wanted`: that of the plain call."""
    entry, called = ENTRIES[function], _function(function)
    inputs = [
        value
        for value in (*case.arguments.values(), *case.columns.values())
        if isinstance(value, Tensor | np.ndarray)
    ]
    before = [_bits(value) for value in inputs]
    try:
        result = case.call(called)
    except StreamadvError as error:
        text = str(error)
        problems = [] if isinstance(error, ValueError) else [f"{type(error).__name__} is no ValueError"]
        if "\n" in text or not 10 < len(text) < 500:
            problems.append(f"not one line: {text!r}")
        if not case.refused and _must_work(case):
            problems.append(f"refused: {text}")
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]}"]
    else:
        problems = [*_wrong_result(entry, case, result, inputs), *(["not refused"] if case.refused else [])]
        if case.equal and not problems:
            problems += _differs(result, wanted, 1e-4 if "float64" in case.name else 0.0)
    if [_bits(value) for value in inputs] != before:
        problems.append("an input was changed")
    return problems


def _must_work(case: Case) -> bool:
    return (
        case.equal
        or case.name == "plain"
        or " rows of " in case.name
        or case.works
        or "all " in case.name
        or "torch." in case.name
    )


def _wrong_result(entry: Entry, case: Case, result: Any, inputs: list[Any]) -> list[str]:
    if entry.columns:
        columns, metrics = result
        problems = [f"{name} is missing" for name in entry.added if name not in columns]
        problems += [
            f"{name} is another object"
            for name, column in case.columns.items()
            if name not in entry.added and columns[name] is not column
        ]
        named = {name: (columns[name], shape) for name, shape in entry.added.items() if name in columns}
        others = [metrics]
    else:
        items = result if isinstance(result, tuple) else (result,)
        if len(items) != len(entry.results):
            return [f"{len(items)} results"]
        named = {
            str(place): (item, shape)
            for place, (item, shape) in enumerate(zip(items, entry.results, strict=True))
            if shape is not None and isinstance(item, Tensor)
        }
        others = [item for item in items if not isinstance(item, Tensor)]
        problems = []
    memory = {_address(value) for value in inputs} - {0}
    for name, (tensor, shape) in named.items():
        wanted = tuple(case.sizes[letter] for letter in shape)
        if tuple(tensor.shape) != wanted and not _free_shape(case):
            problems.append(f"result {name} has shape {tuple(tensor.shape)}, not {wanted}")
        if tensor.dtype != torch.float32:
            problems.append(f"result {name} is {tensor.dtype}")
        if tensor.requires_grad and not entry.differentiable:
            problems.append(f"result {name} has a gradient")
        if not tensor.is_contiguous():
            problems.append(f"result {name} is not contiguous")
        if case.finite is True and not bool(tensor.isfinite().all()):
            problems.append(f"result {name} is not finite")
        address = tensor.untyped_storage().data_ptr()
        if address in memory:
            problems.append(f"result {name} shares memory")
        memory |= {address} - {0}
    for other in others:
        numbers = other.values() if isinstance(other, Mapping) else [other]
        if case.finite is True and not all(number is None or np.isfinite(number) for number in numbers):
            problems.append(f"not finite: {other}")
    return problems


def _free_shape(case: Case) -> bool:
    return not case.name.startswith("plain") and (
        " row" in case.name
        or "column" in case.name
        or "dim:" in case.name
        or "transposed" in case.name
        or "flat" in case.name
    )


def _differs(result: Any, wanted: Any, tolerance: float) -> list[str]:
    if isinstance(result, Mapping):
        names = [name for name in result if name in wanted]
        return [problem for name in names for problem in _differs(result[name], wanted[name], tolerance)]
    if isinstance(result, tuple):
        pairs = zip(result, wanted, strict=True)
        return [problem for one, other in pairs for problem in _differs(one, other, tolerance)]
    if not isinstance(result, Tensor) or result.dtype != torch.float32 or wanted.dtype != torch.float32:
        return []
    equal = torch.allclose(result, wanted, tolerance, tolerance)
    return [] if equal else [f"differs from the plain call by {(result - wanted).abs().max()}"]


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return str(value.shape)
        return (
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if value.numel()
            else b""
        )
    return value.tobytes() if value.dtype != object else str(value)


def _address(value: Any) -> int:
    if isinstance(value, Tensor):
        return (
            0
            if value.layout is not torch.strided or value.is_meta
            else int(value.untyped_storage().data_ptr())
        )
    return int(value.ctypes.data)


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(padded, name.split(":")[0])
    return found


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["function"] == PACKED_DOOR:
            print(json.dumps({"wrong": dict(packed_door_cases.wrong_cases())}), flush=True)
            continue
        function, sizes = asked["function"], (asked["rows"], asked["tokens"], asked["seed"])
        wrong = {}
        wanted = plain(ENTRIES[function], *sizes).call(_function(function))
        for case in cases(function, *sizes):
            print(json.dumps({"tried": case.name}), flush=True)
            if problems := outcome(function, case, wanted):
                wrong[case.name] = problems
        print(json.dumps({"wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
