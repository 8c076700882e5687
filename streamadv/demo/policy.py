"""The policy: a small causal transformer over tokens, with a key-value cache for playing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .environment import FIRST_ACTION, MAX_LENGTH, NUM_ACTIONS, VOCABULARY, Episode, Lakes, Map, prompt

WIDTH = 64
HEADS = 4
LAYERS = 2


class Cache:
    """Keys and values of the tokens seen so far, for B sequences of equal length.

    `entries[layer]` is (keys, values), each [B, HEADS, MAX_LENGTH, WIDTH / HEADS]; `length` tokens are filled.
    """

    def __init__(self, batch: int) -> None:
        shape = (batch, HEADS, MAX_LENGTH, WIDTH // HEADS)
        self.entries = [(torch.empty(shape), torch.empty(shape)) for _ in range(LAYERS)]
        self.length = 0

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but `rows` ([K] int64): the others have ended."""
        self.entries = [(keys[rows], values[rows]) for keys, values in self.entries]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None, offset: int) -> Tensor:
        """x [B, T, WIDTH] are the tokens from position `offset` on; `past` is this layer's cache entry."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, keys, values = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            end = offset + length
            past[0][:, :, offset:end] = keys
            past[1][:, :, offset:end] = values
            keys, values = past[0][:, :, :end], past[1][:, :, :end]
        if offset == 0:
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        else:
            visible = torch.ones(length, offset + length, dtype=torch.bool).tril(offset)
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class Policy(nn.Module):
    """Logits over the actions after every token. About 104,000 parameters.

    The head starts at zero, so the first policy plays uniformly at random whatever the seed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_ACTIONS)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, cache: Cache | None = None) -> Tensor:
        """input_ids [B, T] int -> logits [B, T, NUM_ACTIONS] of the action that would follow each token.

        With a cache, input_ids are the tokens after those already in it. Padding on the right needs no
        mask: attention is causal.
        """
        offset = cache.length if cache is not None else 0
        length = input_ids.shape[1]
        x = self.token(input_ids.long()) + self.position.weight[offset : offset + length]
        for layer, block in enumerate(self.blocks):
            x = block(x, cache.entries[layer] if cache is not None else None, offset)
        if cache is not None:
            cache.length += length
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def log_probs_and_entropy(policy: Policy, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of the distribution it was drawn from, both [B, T] float32.

    Position t describes token t itself; what is no action (map, positions, padding, the first token) gets
    a log-probability that means nothing and is masked out by `response_mask`.
    """
    all_log_probs = F.log_softmax(policy(input_ids[:, :-1]), dim=-1)
    actions = (input_ids[:, 1:].long() - FIRST_ACTION).clamp(0, NUM_ACTIONS - 1)
    log_probs = all_log_probs.gather(-1, actions[..., None]).squeeze(-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return F.pad(log_probs, (1, 0)), F.pad(entropy, (1, 0))


def seeded_policy(seed: int) -> Policy:
    """A fresh policy whose weights depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy()


@torch.no_grad()
def play(policy: Policy, lakes: Lakes, maps: Sequence[Map], generator: torch.Generator) -> list[Episode]:
    """One sampled episode on each of `maps`, in their order. An episode that has ended leaves the lock-step."""
    episodes = [prompt(lake) for lake in maps]
    for episode, lake, position in zip(episodes, maps, lakes.reset(maps), strict=True):
        episode.observe(lake, position)
    running = list(range(len(episodes)))
    cache = Cache(len(episodes))
    seen = 0
    while running:
        tokens = torch.tensor([episodes[index].input_ids[seen:] for index in running])
        seen += tokens.shape[1]
        log_probs = F.log_softmax(policy(tokens, cache)[:, -1], dim=-1)
        actions = torch.multinomial(log_probs.exp(), 1, generator=generator)
        decisions = zip(
            actions.squeeze(1).tolist(), log_probs.gather(1, actions).squeeze(1).tolist(), strict=True
        )
        going_on: list[int] = []
        for row, (index, (action, log_prob)) in enumerate(zip(running, decisions, strict=True)):
            episode = episodes[index]
            episode.act(action, log_prob)
            position, reward, terminated, episode.truncated = lakes.step(index, action)
            episode.reward += reward
            if not (terminated or episode.truncated):
                episode.observe(maps[index], position)
                going_on.append(row)
        if len(going_on) < len(running):
            cache.keep(torch.tensor(going_on, dtype=torch.int64))
            running = [running[row] for row in going_on]
    return episodes
