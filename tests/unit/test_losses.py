"""Losses where batches are cut up, packed, awkward or empty. Their numbers are compared with peers in tests/golden."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamadv import losses
from streamadv.algorithms.kl import KL_PENALTIES
from streamadv.errors import ArgumentError, OptionError
from streamadv.losses import AGGREGATIONS
from streamadv.trainer.microbatch import MicroBatch
from tests.shares import examples

LENGTHS = [5, 2, 7, 3, 6]
COLUMNS = ("log_probs", "old_log_probs", "advantages", "weights")
BY_ROW: list[Callable[..., losses.Loss]] = [losses.gspo, losses.row_clip, losses.gmpo, losses.vespo]
LOSSES: list[Callable[..., losses.Loss]] = [
    losses.ppo_clip, losses.cispo, losses.reinforce, losses.icepop, losses.sapo, losses.dppo, *BY_ROW
]  # fmt: skip


def packed(lengths: list[int] = LENGTHS, seed: int = 0) -> MicroBatch:
    """Rows with a masked prompt token and observations; the second row has no trainable token."""
    torch.manual_seed(seed)
    total = sum(lengths)
    mask = (torch.rand(total) < 0.7).to(torch.uint8)
    columns = {name: 0.5 * torch.randn(total) for name in COLUMNS}
    columns["old_log_probs"] = columns["log_probs"] + 0.4 * torch.randn(total)
    columns["weights"] = torch.rand(total) + 0.5
    batch = MicroBatch({**columns, "response_mask": mask}, lengths, [], {})
    if len(lengths) > 1:
        mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = 0
    return batch


def part(batch: MicroBatch, first: int, stop: int) -> MicroBatch:
    span = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[stop]))
    columns = {name: values[span] for name, values in batch.columns.items()}
    return MicroBatch(columns, batch.row_lengths[first:stop], [], {})


def loss_of(function: Callable[..., losses.Loss], mb: Any, log_probs: Tensor, **options: Any) -> Tensor:
    if function in BY_ROW:
        options["cu_seqlens"] = getattr(mb, "cu_seqlens", None)
    arguments = (log_probs, mb.old_log_probs, mb.advantages, mb.response_mask)
    return function(*arguments, weights=mb.weights, **options)[0]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("function", LOSSES)
def test_micro_batches_of_ranks_add_up_to_the_whole_batch(
    function: Callable[..., losses.Loss], mode: losses.Aggregation
) -> None:
    """Two ranks with two micro-batches each, the last one empty; gradients are averaged over ranks, as DDP does."""
    batch = packed()
    trainable = batch.response_mask != 0
    counts = {"num_tokens": int(trainable.sum()), "num_rows": batch.num_rows, "loss_scale_factor": 7}
    whole = batch.log_probs.clone().requires_grad_()
    tokens = loss_of(function, batch, whole)
    expected = losses.aggregate(tokens, batch.response_mask, mode, cu_seqlens=batch.cu_seqlens, **counts)  # type: ignore[arg-type]
    expected.backward()
    log_probs, total = batch.log_probs.clone().requires_grad_(), torch.zeros(())
    pieces = MicroBatch({**batch.columns, "log_probs": log_probs}, batch.row_lengths, [], {})
    for first, stop in ((0, 2), (2, 3), (3, 5), (5, 5)):
        mb = part(pieces, first, stop)
        loss = losses.aggregate(
            loss_of(function, mb, mb.log_probs),
            mb.response_mask,
            mode,
            cu_seqlens=mb.cu_seqlens,
            world_size=2,
            **counts,  # type: ignore[arg-type]
        )
        (loss / 2).backward()
        total = total + loss.detach() / 2
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(log_probs.grad, whole.grad)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("function", LOSSES)
def test_packed_and_padded_tokens_have_one_loss(
    function: Callable[..., losses.Loss], mode: losses.Aggregation
) -> None:
    batch = packed()
    padded = batch.padded()
    tokens = loss_of(function, batch, batch.log_probs)
    rows = loss_of(function, padded, padded.log_probs)
    torch.testing.assert_close(rows[padded.attention_mask != 0], tokens)
    torch.testing.assert_close(
        losses.aggregate(tokens, batch.response_mask, mode, cu_seqlens=batch.cu_seqlens, loss_scale_factor=7),
        losses.aggregate(rows, padded.response_mask, mode),
    )


#: Every loss with the options that change which of its inputs are read.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("cispo", {}),
    ("cispo", {"unified_mask": True}),
    ("clip_cov", {"share": 0.3, "band": (-9.0, 9.0)}),
    *[
        ("distill", {"penalty": penalty, "bound": bound})
        for penalty in KL_PENALTIES
        for bound in (10.0, None)
    ],
    *[
        ("distill_top_k", {"beta": beta, "tail": tail, "least": least, "temperature": temperature})
        for beta, tail, least, temperature in itertools.product(
            (0.0, 0.4, 1.0), (False, True), (-10.0, None), (1.0, 0.7)
        )
    ],
    ("dppo", {"divergence": "tv"}),
    ("dppo", {"divergence": "kl"}),
    ("dro", {"beta": 0.3}),
    ("entropy", {}),
    ("gmpo", {}),
    ("gspo", {}),
    ("high_entropy_mask", {"top": 0.4}),
    ("icepop", {}),
    ("icepop", {"unified_mask": True}),
    ("kl_cov", {"share": 0.3}),
    ("ppo_clip", {}),
    ("ppo_clip", {"dual_clip": None}),
    ("reinforce", {}),
    ("row_clip", {}),
    ("sapo", {}),
    ("sft", {}),
    ("topr", {}),
    ("value_clip", {"clip": 0.2}),
    ("value_clip", {"clip": None}),
    ("vespo", {}),
]
GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -3e38]


def test_every_loss_has_a_case_of_masked_tokens() -> None:
    losses_of_tokens = {name for name in losses.__all__ if "response_mask" in parameters_of(name)}
    assert {name for name, _ in CASES} | {"aggregate"} == losses_of_tokens


def parameters_of(name: str) -> set[str]:
    value = getattr(losses, name)
    return set(inspect.signature(value).parameters) if inspect.isfunction(value) else set()


def drawn_inputs(seed: int) -> dict[str, Tensor]:
    """Three rows of seven tokens with holes, the last row without a token; all that a loss may ask for."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(3, 7, *shape, generator=random, dtype=torch.float64)

    mask = (torch.rand(3, 7, generator=random) < 0.6).long()
    mask[2] = 0
    log_probs = -normal().abs()
    teacher, ids = normal(9).log_softmax(-1).topk(4)
    return {
        "response_mask": mask,
        "log_probs": log_probs,
        "old_log_probs": log_probs + 0.5 * normal(),
        "advantages": normal(),
        "weights": normal().abs(),
        "scores": normal(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "entropies": normal().abs(),
        "logits": normal(9),
        "teacher_log_probs": -normal().abs(),
        "top_log_probs": teacher,
        "teacher_ids": ids,
    }


def results_of(name: str, options: dict[str, Any], inputs: dict[str, Tensor]) -> list[Tensor]:
    """Values, metrics and gradients of a loss."""
    given = {each: inputs[each] for each in parameters_of(name) & inputs.keys()}
    if name == "distill_top_k":
        given["teacher_log_probs"] = inputs["top_log_probs"]
    if name == "clip_cov":
        options = {**options, "generator": torch.Generator().manual_seed(0)}
    trained = {
        each: given[each].clone().requires_grad_()
        for each in ("log_probs", "logits", "values")
        if each in given
    }
    found = getattr(losses, name)(**given | trained, **options)
    loss, metrics = found if isinstance(found, tuple) else (found, {})
    gradients = []
    if loss.requires_grad:
        losses.aggregate(loss, inputs["response_mask"], "seq-mean-token-sum").backward()
        gradients = [values.grad for values in trained.values() if values.grad is not None]
        assert len(gradients) == len(trained)
    return [loss.detach(), *metrics.values(), *gradients]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 2**32), garbage=st.sampled_from(GARBAGE), data=st.data())
def test_masked_tokens_have_no_effect(
    name: str, options: dict[str, Any], seed: int, garbage: float, data: st.DataObject
) -> None:
    """Whatever stands there, in one input or in several: value, metrics and gradient keep their bits."""
    inputs = drawn_inputs(seed)
    masked = inputs["response_mask"] == 0
    spoilt = data.draw(st.sets(st.sampled_from(sorted(inputs.keys() - {"response_mask"})), min_size=8))
    dirty = dict(inputs)
    for each in spoilt:
        values = inputs[each].clone()
        values[masked] = (
            garbage if values.is_floating_point() else data.draw(st.sampled_from([-1, -100, 2**40]))
        )
        dirty[each] = values
    clean = results_of(name, options, inputs)
    assert all(values.isfinite().all() for values in clean)
    assert not clean[0][masked].any()
    torch.testing.assert_close(results_of(name, options, dirty), clean, rtol=0, atol=0)


@pytest.mark.parametrize("function", LOSSES)
def test_of_no_tokens_everything_is_zero(function: Callable[..., losses.Loss]) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    options = {"cu_seqlens": torch.zeros(1, dtype=torch.int32)} if function in BY_ROW else {}
    mask = torch.zeros(0, dtype=torch.uint8)
    tokens, metrics = function(nothing, nothing, nothing, mask, **options)
    assert all(value == 0 for value in metrics.values())
    for mode in AGGREGATIONS:
        offsets = torch.zeros(1, dtype=torch.int32)
        loss = losses.aggregate(tokens, mask, mode, cu_seqlens=offsets, loss_scale_factor=1)  # type: ignore[arg-type]
        assert loss == 0
        loss.backward(retain_graph=True)


def test_losses_by_hand() -> None:
    """Ratios 2, 0.5, 2 and 4 with advantages 1, 1, -1 and -1."""
    log_probs = torch.tensor([2.0, 0.5, 2.0, 4.0]).log().requires_grad_()
    old, advantages, mask = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4)
    loss, metrics = losses.ppo_clip(log_probs, old, advantages, mask, clip_high=0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.28, -0.5, 2.0, 3.0]))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, -0.5, 2.0, 0.0]))
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.25
    torch.testing.assert_close(metrics["actor/ppo_kl"], -torch.log(torch.tensor(8.0)) / 4)
    loss, _ = losses.ppo_clip(log_probs, old, advantages, mask, dual_clip=None)
    assert loss[3].item() == pytest.approx(4.0)
    loss, _ = losses.gspo(
        log_probs[None], old[None], advantages[None], mask[None], clip_low=0.2, clip_high=0.5
    )
    geometric = 8**0.25  # of the ratios
    torch.testing.assert_close(loss, torch.tensor([[-1.5, -1.5, geometric, geometric]]))
    loss, _ = losses.cispo(log_probs, old, advantages, mask)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.8, 1.2, 1.2]) * log_probs)


@pytest.mark.parametrize(("function", "bound"), [(losses.ppo_clip, 20.0), (losses.gspo, 10.0)])
def test_ratios_are_bounded(function: Callable[..., losses.Loss], bound: float) -> None:
    """The ratio of a token whose log-ratio is 30, where the advantage is negative; it has no gradient."""
    log_probs = torch.full((1, 1), 30.0, requires_grad=True)
    options = {"dual_clip": None} if function is losses.ppo_clip else {}
    loss, metrics = function(log_probs, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), **options)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.exp(bound))
    assert log_probs.grad == 0
    assert metrics["actor/ppo_kl"] == (-30 if function in BY_ROW else -20)


def test_half_precision_is_computed_in_float32() -> None:
    log_probs = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    old, advantages = torch.tensor([-1.001]), torch.tensor([1.0], dtype=torch.bfloat16)
    loss, metrics = losses.ppo_clip(log_probs, old, advantages, torch.ones(1))
    assert loss.dtype == metrics["actor/ppo_kl"].dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(0.001))
    negative = torch.tensor([-1.1015625], dtype=torch.bfloat16)  # three times that is no bfloat16
    loss, _ = losses.ppo_clip(log_probs, torch.tensor([-3.0]), negative, torch.ones(1))
    assert loss.item() == 3 * 1.1015625


def test_what_does_not_fit_is_named() -> None:
    mb = packed()
    arguments = (mb.log_probs, mb.old_log_probs, mb.advantages, mb.response_mask)
    with pytest.raises(ArgumentError, match=r"advantages has shape \[22\], needs that of log_probs, \[23\]"):
        losses.ppo_clip(mb.log_probs, mb.old_log_probs, mb.advantages[1:], mb.response_mask)
    with pytest.raises(ArgumentError, match="weights has shape"):
        losses.reinforce(*arguments, weights=mb.weights[:, None])
    with pytest.raises(ArgumentError, match="response_mask has shape"):
        losses.aggregate(mb.log_probs, mb.response_mask[1:])
    with pytest.raises(OptionError, match=r"dual_clip is 1\.0"):
        losses.ppo_clip(*arguments, dual_clip=1.0)
    with pytest.raises(OptionError, match="mode is 'mean': choose one of token-mean"):
        losses.aggregate(mb.log_probs, mb.response_mask, "mean")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"cu_seqlens is None: tokens of shape \[23\]"):
        losses.aggregate(mb.log_probs, mb.response_mask, "seq-mean-token-mean")
    with pytest.raises(ArgumentError, match="cu_seqlens is None"):
        losses.gspo(*arguments)
    with pytest.raises(OptionError, match="num_rows is None, world_size 2"):
        losses.aggregate(mb.log_probs, mb.response_mask, "seq-mean-token-sum", num_tokens=9, world_size=2)
    with pytest.raises(OptionError, match="loss_scale_factor is None"):
        losses.aggregate(mb.log_probs, mb.response_mask, "seq-mean-token-sum-norm", cu_seqlens=mb.cu_seqlens)


def test_a_mask_of_other_numbers_weighs() -> None:
    """As in verl: 0.5 counts half, in the sum and in the count; a NaN in a mask is a NaN in the loss."""
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, math.nan, 3.0]])
    mask = torch.tensor([[1.0, 0.5, 0.0], [2.0, 0.0, 0.5]])
    sums, counts = torch.tensor([2.0, 17.5]), torch.tensor([1.5, 2.5])
    assert losses.aggregate(values, mask) == pytest.approx(float(sums.sum() / counts.sum()))
    assert losses.aggregate(values, mask, "seq-mean-token-mean") == pytest.approx(
        float((sums / counts).mean())
    )
    loss, metrics = losses.sft(-values.nan_to_num(), mask)
    assert metrics["actor/sft"] == pytest.approx(float(sums.sum() / counts.sum()))
    assert not torch.equal(losses.aggregate(loss, mask), losses.aggregate(loss, (mask != 0).float()))
    assert losses.aggregate(values, mask * math.nan).isnan()


def test_tokens_far_from_their_policy_by_hand() -> None:
    """Ratios 4, 1/4, 4 and 1/4 with advantages 1, 1, -1 and -1: PPO clips the first and the last."""
    ratios, advantages, mask = (
        torch.tensor([4.0, 0.25, 4.0, 0.25]),
        torch.tensor([1.0, 1.0, -1.0, -1.0]),
        torch.ones(4),
    )
    call = (ratios.log(), torch.zeros(4), advantages, mask)
    gives_nothing = {
        "both": losses.icepop(*call, low=0.5, high=3.0),
        "unified": losses.icepop(*call, low=0.5, high=3.0, unified_mask=True),
        "cispo": losses.cispo(*call, clip_low=0.5, clip_high=2.0, unified_mask=True),
    }
    dropped = {name: (loss == 0).tolist() for name, (loss, _) in gives_nothing.items()}
    assert dropped == {
        "both": [True] * 4,
        "unified": [True, False, False, True],
        "cispo": [True, False, False, True],
    }
    assert gives_nothing["both"][1]["actor/pg_clipfrac"] == 1
    torch.testing.assert_close(
        gives_nothing["unified"][0], -ratios * advantages * ratios.log() * torch.tensor([0, 1, 1, 0])
    )


def test_a_weighed_row_is_left_to_its_mean() -> None:
    """GMPO's weights are one number for a row, their geometric mean; VESPO's are part of the row's ratio."""
    batch = packed()
    padded = batch.padded()
    ones = torch.ones_like(batch.weights)
    for function in (losses.gmpo, losses.vespo):
        arguments = (batch.log_probs, batch.old_log_probs, batch.advantages, batch.response_mask)
        plain, _ = function(*arguments, cu_seqlens=batch.cu_seqlens)
        weighed, _ = function(*arguments, cu_seqlens=batch.cu_seqlens, weights=ones)
        torch.testing.assert_close(plain, weighed, rtol=1e-5, atol=1e-6)
    loss, _ = losses.gmpo(padded.log_probs, padded.old_log_probs, padded.advantages, padded.response_mask,
                          weights=torch.full_like(padded.log_probs, 0.5))  # fmt: skip
    plain, _ = losses.gmpo(padded.log_probs, padded.old_log_probs, padded.advantages, padded.response_mask)
    torch.testing.assert_close(loss, plain / 2)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", [False, True])
def test_distillation_by_top_k_against_the_whole_distribution(beta: float, tail: bool) -> None:
    """Over all tokens there is no rest; over some, the rest is one token. Masked positions have no effect."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7).log_softmax(-1)
    mask = torch.tensor([1, 1, 0, 1, 1])
    p, q = logits.log_softmax(-1), teacher
    middle = (beta * q.exp() + (1 - beta) * p.exp()).log()
    want = {
        0.0: (q.exp() * (q - p)).sum(-1),
        1.0: (p.exp() * (p - q)).sum(-1),
        0.3: 0.3 * (q.exp() * (q - middle)).sum(-1) + 0.7 * (p.exp() * (p - middle)).sum(-1),
    }[beta] * mask
    spoilt = teacher.masked_fill(mask[:, None] == 0, math.nan)
    ids = torch.arange(7).expand(5, 7)
    found, metrics = losses.distill_top_k(logits, spoilt, ids, mask, beta=beta, least=None)
    torch.testing.assert_close(found, want)
    assert metrics["distillation/student_mass"] == pytest.approx(1.0)
    own, own_ids = logits.detach().log_softmax(-1).topk(3)
    nothing, _ = losses.distill_top_k(logits, own, own_ids, mask, beta=beta, tail=tail)
    torch.testing.assert_close(nothing, torch.zeros(5), rtol=0, atol=1e-6)
    likely, likely_ids = teacher.topk(3)
    some, metrics = losses.distill_top_k(logits, likely, likely_ids, mask, beta=beta, tail=True)
    assert (some[mask != 0] > 0).all()
    assert 0 < metrics["distillation/teacher_mass"] < 1
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad[2].eq(0).all()


def test_covariances_move_no_more_than_their_share() -> None:
    torch.manual_seed(0)
    log_probs, old = torch.randn(4, 25), torch.randn(4, 25)
    advantages, mask = torch.randn(4, 25), (torch.rand(4, 25) < 0.8).long()
    tokens, _ = losses.kl_cov(log_probs, old, advantages, mask, share=0.1, coefficient=5.0)
    plain, _ = losses.kl_cov(log_probs, old, advantages, mask, share=0.1, coefficient=0.0)
    assert (tokens != plain).sum() == int(0.1 * mask.sum())
    generator = torch.Generator().manual_seed(1)
    _, metrics = losses.clip_cov(
        log_probs, old, advantages, mask, share=0.1, band=(-9.0, 9.0), generator=generator
    )
    assert metrics["actor/pg_clipfrac"] == pytest.approx(int(0.1 * mask.sum()) / int(mask.sum()))


def test_wrong_options_of_losses_are_named() -> None:
    mb = packed()
    arguments = (mb.log_probs, mb.old_log_probs, mb.advantages, mb.response_mask)
    for call, words in (
        (lambda: losses.dro(*arguments, beta=0.0), r"beta is 0\.0, needs a number above 0"),
        (lambda: losses.dppo(*arguments, divergence="js"), "divergence is 'js': choose tv or kl"),  # type: ignore[arg-type]
        (lambda: losses.kl_cov(*arguments, share=0.0), r"share is 0\.0"),
        (lambda: losses.high_entropy_mask(mb.log_probs, mb.response_mask, 1.5), r"top is 1\.5, needs a number in"),
        (lambda: losses.distill_top_k(*[torch.zeros(2, 3)] * 3, torch.ones(2), beta=2.0), r"beta is 2\.0"),
        (lambda: losses.distill_top_k(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2)),
         r"teacher_ids has shape \[2, 2\], needs that of teacher_log_probs, \[2, 3\]"),
    ):  # fmt: skip
        with pytest.raises((ArgumentError, OptionError), match=words):
            call()
