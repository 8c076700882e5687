"""The order of the prompts of a source in an epoch: a pure function of seed, epoch and place. Nothing is stored."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

ROUNDS: Final = 4
_WORD: Final = (1 << 64) - 1


def index_at(length: int, seed: int | None, epoch: int, place: int) -> int:
    """Which of `length` prompts comes at a place (from 0) of the epoch. seed: None = in order."""
    return place if seed is None else _walk(length, seed, epoch, place, range(ROUNDS))


def place_of(length: int, seed: int | None, epoch: int, index: int) -> int:
    """Where a prompt comes in the epoch: the inverse of `index_at`."""
    return index if seed is None else _walk(length, seed, epoch, index, range(ROUNDS)[::-1])


def _walk(length: int, seed: int, epoch: int, value: int, rounds: range) -> int:
    """A permutation of [0, length): one of a power of 4, repeated until the value is inside (cycle walking)."""
    bits = (max(1, (length - 1).bit_length()) + 1) // 2
    mask, keys = (1 << bits) - 1, _keys(seed, epoch)
    is_back = rounds.step < 0
    while True:
        left, right = value >> bits, value & mask
        if is_back:
            left, right = right, left
        for number in rounds:  # a Feistel network, which any round function makes a permutation
            word = (right + keys[number]) * 0xBF58476D1CE4E5B9 & _WORD
            left, right = right, left ^ ((word ^ word >> 32) * 0x94D049BB133111EB >> 40 & mask)
        if is_back:
            left, right = right, left
        value = left << bits | right
        if value < length:
            return value


@lru_cache(64)
def _keys(seed: int, epoch: int) -> list[int]:
    return [_mix(_mix(_mix(seed & _WORD) + epoch) + number) for number in range(ROUNDS)]


def _mix(word: int) -> int:
    """Spread the bits of a 64-bit word (the finalizer of splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
