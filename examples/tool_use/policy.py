"""The policy: a Llama of 130,000 parameters from a config, and what it knows before reinforcement learning.

`python examples/tool_use/policy.py start.safetensors --seed 0` writes the weights to start with. They come from the
imitation of agents that choose most of their words well and the others at random: this policy knows the form of a turn
and is right in about a quarter of its episodes, as a pretrained model may be.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from directory import ANSWER, FIRST_NAME, LOOKUP, MAX_TURNS, PAD, WORDS, Question
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import streamadv as sa


def new_policy(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def log_probs_and_entropy(policy: LlamaForCausalLM, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token given those before it, and of the distribution it came from: both [B, T], 0 for the first token.

    input_ids: [B, T], padded on the right.
    """
    logits = policy(input_ids[:, :-1].long()).logits.float()
    distribution = torch.log_softmax(logits, -1)
    chosen = distribution.gather(-1, input_ids[:, 1:, None].long()).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.nn.functional.pad(chosen, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def demonstration(chance: random.Random, skill: float) -> tuple[list[int], list[int]]:
    """Tokens, and which of them the agent has written. skill: share of words it chooses well; others are random."""
    question = Question.draw(chance)
    tokens, mask = question.prompt, [0, 0, 0]
    for number in range(1, MAX_TURNS + 1):
        verb = ANSWER if number > question.levels else LOOKUP
        verb = verb if chance.random() < skill else chance.choice((LOOKUP, ANSWER))
        name = tokens[-1] if chance.random() < skill else chance.randrange(FIRST_NAME, len(WORDS))
        tokens, mask = [*tokens, verb, name], [*mask, 1, 1]
        if verb == ANSWER:
            break
        tokens, mask = tokens + question.reply(name, number), [*mask, 0, 0]
    return tokens, mask


def imitate(policy: LlamaForCausalLM, seed: int, steps: int, skill: float) -> None:
    """Train on demonstrations, 64 a step."""
    chance = random.Random(f"demonstrations/{seed}")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        shown = [demonstration(chance, skill) for _ in range(64)]
        tokens = pad_sequence([torch.tensor(tokens) for tokens, _ in shown], batch_first=True)
        mask = pad_sequence([torch.tensor(mask) for _, mask in shown], batch_first=True).bool()
        log_probs, _ = log_probs_and_entropy(policy, tokens)
        (-log_probs[mask].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the weights to start with.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--skill", type=float, default=0.6, help="share of words that the agents choose well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = new_policy(options.seed)
    imitate(policy, options.seed, options.steps, options.skill)
    sa.weights.save(options.file, policy.state_dict(), {"version": "0"})


if __name__ == "__main__":
    main()
