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
    bits, mask = _halves(length)
    while True:  # a permutation of a power of 4, repeated until the value is inside (cycle walking)
        left, right = place >> bits, place & mask
        for key in _keys(seed, epoch):  # a Feistel network, which any round function makes a permutation
            word = (right + key) * 0xBF58476D1CE4E5B9 & _WORD
            left, right = right, left ^ ((word ^ word >> 32) * 0x94D049BB133111EB >> 40 & mask)
        place = left << bits | right
        if place < length:
            return place


def place_of(length: int, seed: int | None, epoch: int, index: int) -> int:
    """Where a prompt comes in the epoch: the inverse of `index_at`."""
    if seed is None:
        return index
    bits, mask = _halves(length)
    while True:
        right, left = index >> bits, index & mask
        for key in reversed(_keys(seed, epoch)):
            word = (right + key) * 0xBF58476D1CE4E5B9 & _WORD
            left, right = right, left ^ ((word ^ word >> 32) * 0x94D049BB133111EB >> 40 & mask)
        index = right << bits | left
        if index < length:
            return index


def _halves(length: int) -> tuple[int, int]:
    """Bits of each half of the smallest power of 4 that has so many, and the mask of a half."""
    bits = (max(1, (length - 1).bit_length()) + 1) // 2
    return bits, (1 << bits) - 1


@lru_cache(64)
def _keys(seed: int, epoch: int) -> list[int]:
    return [_mix(_mix(_mix(seed & _WORD) + epoch) + number) for number in range(ROUNDS)]


def _mix(word: int) -> int:
    """Spread the bits of a 64-bit word (the finalizer of splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
