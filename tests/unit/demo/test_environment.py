"""Tokens, maps and episodes of the demo's environment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from streamadv.demo.environment import (
    BOS,
    CELLS,
    FIRST_ACTION,
    FIRST_POSITION,
    FIXED_MAP,
    MAX_LENGTH,
    NUM_ACTIONS,
    PROMPT_LENGTH,
    VOCABULARY,
    Episode,
    Lakes,
    Map,
    draw_map,
    prompt,
    write_tokenizer,
)
from streamadv.demo.policy import log_probs_and_entropy, play, seeded_policy
from streamadv.demo.settings import MAX_TURNS

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up


def neighbour(position: int, action: int) -> int:
    row, column = divmod(position, 4)
    down, right = MOVES[action]
    return min(max(row + down, 0), 3) * 4 + min(max(column + right, 0), 3)


def replayed(lake: Map, episode: Episode) -> tuple[float, bool, bool]:
    """Walk an episode's tokens over the map by hand: reward, terminated, truncated."""
    cells = "".join(lake)
    turns = episode.input_ids[PROMPT_LENGTH:]
    position = 0
    for turn in range(len(turns) // 2):
        assert turns[2 * turn] == FIRST_POSITION + position
        assert cells[position] in "SF"
        position = neighbour(position, turns[2 * turn + 1] - FIRST_ACTION)
    ended = cells[position] in "HG"
    return float(cells[position] == "G"), ended, not ended


def episodes_on(maps: list[Map], seed: int = 0) -> list[Episode]:
    return play(seeded_policy(seed), Lakes(), maps, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["fixed", "random"])
def test_episodes_follow_the_map(kind: str) -> None:
    chance = random.Random(5)
    maps = [draw_map(kind, chance) for _ in range(48)]
    episodes = episodes_on(maps)
    for lake, episode in zip(maps, episodes, strict=True):
        reward, terminated, truncated = replayed(lake, episode)
        turns = len(episode.state_keys)
        assert episode.reward == reward
        assert terminated or (truncated and turns == MAX_TURNS and episode.truncated)
        assert turns <= MAX_TURNS


def test_reaching_the_goal_pays() -> None:
    lake = ("SGHH", "HHHH", "HHHH", "HHHH")
    episodes = episodes_on([lake] * 24)
    assert {episode.reward for episode in episodes} == {0.0, 1.0}
    for episode in episodes:
        assert episode.reward == replayed(lake, episode)[0]


def test_prompt_names_the_map_and_only_actions_are_trained() -> None:
    (episode,) = episodes_on([FIXED_MAP])
    assert episode.input_ids[0] == BOS
    assert len(set(episode.input_ids[1:PROMPT_LENGTH])) == 4
    assert len(episode.input_ids) == len(episode.response_mask) == len(episode.log_probs) <= MAX_LENGTH
    for token, mask, log_prob in zip(
        episode.input_ids, episode.response_mask, episode.log_probs, strict=True
    ):
        is_action = FIRST_ACTION <= token < FIRST_ACTION + NUM_ACTIONS
        assert mask == is_action
        assert (log_prob < 0) == is_action


def test_state_keys_tell_maps_and_positions_apart() -> None:
    lakes = [FIXED_MAP, ("SFFF", "FFFF", "FFFF", "FFFG")]
    first, second = episodes_on(lakes)
    assert len(first.state_keys) == sum(first.response_mask)
    assert not set(first.state_keys) & set(second.state_keys)
    positions = [token for token in first.input_ids if FIRST_POSITION <= token < FIRST_POSITION + CELLS]
    assert len(set(first.state_keys)) == len(set(positions))


def test_random_maps_are_solvable() -> None:
    chance = random.Random(0)
    for _ in range(50):
        cells = "".join(draw_map("random", chance))
        reached, border = {0}, [0]
        while border:
            position = border.pop()
            new = {neighbour(position, action) for action in range(NUM_ACTIONS)} - reached
            new = {cell for cell in new if cells[cell] != "H"}
            reached |= new
            border += new
        assert CELLS - 1 in reached


def test_log_probs_of_the_cache_are_those_of_the_whole_sequence() -> None:
    """What the rollout recorded step by step is what the trainer computes in one pass."""
    policy = seeded_policy(3)
    torch.nn.init.normal_(policy.head.weight, std=0.5, generator=torch.Generator().manual_seed(3))
    episodes = play(policy, Lakes(), [FIXED_MAP] * 24, torch.Generator().manual_seed(4))
    assert len({len(episode.input_ids) for episode in episodes}) > 1  # some left the lock-step early
    for episode in episodes:
        with torch.no_grad():
            log_probs, _ = log_probs_and_entropy(policy, torch.tensor([episode.input_ids]))
        mask = torch.tensor(episode.response_mask, dtype=torch.bool)
        torch.testing.assert_close(
            log_probs[0][mask], torch.tensor(episode.log_probs)[mask], atol=1e-5, rtol=1e-4
        )


def test_first_policy_is_uniform_whatever_the_seed() -> None:
    for seed in (0, 1):
        logits = seeded_policy(seed)(torch.tensor([[BOS, 1, 2, FIRST_POSITION]]))
        assert torch.equal(logits, torch.zeros(1, 4, NUM_ACTIONS))


def test_the_tokenizer_says_what_is_played(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    episode = prompt(FIXED_MAP)
    episode.observe(FIXED_MAP, 5)
    episode.act(3, -1.0)
    tokenizer = tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path)))
    words = tokenizer.decode(episode.input_ids)
    assert words == f"map {' '.join(''.join(FIXED_MAP))} row1col1 up"
    assert tokenizer.get_vocab_size() == VOCABULARY
