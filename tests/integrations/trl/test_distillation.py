"""`losses.distill_top_k` over a whole vocabulary is TRL's generalised Jensen-Shannon divergence."""

from __future__ import annotations

import pytest
import torch

from streamadv import losses


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_of_gold(beta: float, temperature: float) -> None:
    from trl.experimental.gold.gold_trainer import GOLDTrainer

    generator = torch.Generator().manual_seed(0)
    teacher = 2 * torch.randn(3, 8, 11, generator=generator)
    mask = (torch.rand(3, 8, generator=generator) < 0.7).long()
    labels = torch.where(mask != 0, 1, -100)
    found = []
    for peer in (True, False):
        logits = torch.randn(3, 8, 11, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if peer:
            loss = GOLDTrainer.generalized_jsd_loss(
                logits, teacher, labels=labels, beta=beta, temperature=temperature, reduction="sum"
            )
        else:
            log_probs = (teacher / temperature).log_softmax(-1)
            ids = torch.arange(11).expand(teacher.shape)
            tokens, _ = losses.distill_top_k(
                logits, log_probs, ids, mask, beta=beta, temperature=temperature, least=None
            )
            loss = losses.aggregate(tokens, mask, "token-sum")
        loss.backward()
        found.append((loss.detach(), logits.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
