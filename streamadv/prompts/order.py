"""The order of the prompts of a source in an epoch: a pure function of seed, epoch and place. Nothing is stored."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

ROUNDS: Final = 4
_WORD: Final = (1 << 64) - 1


def index_at(length: int, seed: int | None, epoch: int, place: int) -> int:
    """Which of `length` prompts comes at a place (from 0) of the epoch. seed: None = in order."""
    if seed is None:
        return place
    bits, mask, keys = _network(length, seed, epoch)
    while True:  # a permutation of a power of 4, repeated until the value is inside (cycle walking)
        left, right = place >> bits, place & mask
        for key in keys:  # a Feistel network, which any round function makes a permutation
            left, right = right, left ^ (_round(right, key) & mask)
        place = left << bits | right
        if place < length:
            return place


def place_of(length: int, seed: int | None, epoch: int, index: int) -> int:
    """Where a prompt comes in the epoch: the inverse of `index_at`."""
    if seed is None:
        return index
    bits, mask, keys = _network(length, seed, epoch)
    while True:
        right, left = index >> bits, index & mask
        for key in keys[::-1]:
            left, right = right, left ^ (_round(right, key) & mask)
        index = right << bits | left
        if index < length:
            return index


@lru_cache(64)
def _network(length: int, seed: int, epoch: int) -> tuple[int, int, list[int]]:
    """Bits of each half of the smallest power of 4 that has so many, the mask of a half, and the keys of the rounds."""
    bits = (max(1, (length - 1).bit_length()) + 1) // 2
    keys = [_mix(_mix(_mix(seed & _WORD) + epoch) + number) for number in range(ROUNDS)]
    return bits, (1 << bits) - 1, keys


@lru_cache(16384)  # all that 10^7 prompts need in an epoch
def _round(half: int, key: int) -> int:
    word = (half + key) * 0xBF58476D1CE4E5B9 & _WORD
    return (word ^ word >> 32) * 0x94D049BB133111EB >> 40


def _mix(word: int) -> int:
    """Spread the bits of a 64-bit word (the finalizer of splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
