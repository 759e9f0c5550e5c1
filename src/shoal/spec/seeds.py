"""Derive seeds from numbers. Unlike Python's hash, the result is the same on every machine and version."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """A 64-bit number that depends on all the numbers and their order (splitmix64, chained)."""
    state = len(numbers)
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


# The use of a seed: the first number after the job's seed, so that no two uses share a stream.
MODEL, LANE, EVALUATION, ORDER, SPLIT, AUGMENT = range(1, 7)
