"""Losses where batches are cut up, packed, awkward or empty. Their numbers are compared with peers in tests/golden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamadv import losses
from streamadv.errors import ArgumentError, OptionError
from streamadv.losses import AGGREGATIONS
from streamadv.trainer.microbatch import MicroBatch

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


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_tokens_have_no_effect(function: Callable[..., losses.Loss], garbage: float) -> None:
    batch = packed()
    masked = batch.response_mask == 0
    spoilt = {name: batch.columns[name].masked_fill(masked, garbage) for name in COLUMNS}
    spoilt_batch = MicroBatch({**batch.columns, **spoilt}, LENGTHS, [], {})
    results = []
    for mb in (batch, spoilt_batch):
        log_probs = mb.log_probs.clone().requires_grad_()
        loss = loss_of(function, mb, log_probs)
        loss.sum().backward()
        results.append((loss.detach(), log_probs.grad))
        assert not loss[masked].any()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


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
