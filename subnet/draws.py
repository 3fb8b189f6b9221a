"""Seeded draws from SHA-256 that every node can repeat, on any host, in any language.

A draw is named by the parts of its seed: `uniform(beacon, "audit", hotkey)`. Parts are joined with their lengths, so that
("ab", "c") and ("a", "bc") differ.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Part = str | int | bytes

_UNIFORM_BITS = 53


def seed_bytes(*parts: Part) -> bytes:
    """32 bytes that depend on every part, its type and its order."""
    hasher = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        kind = b"b" if isinstance(part, bytes) else b"i" if isinstance(part, int) else b"s"
        hasher.update(kind + len(raw).to_bytes(8, "little") + raw)
    return hasher.digest()


def _words(*parts: Part) -> Iterator[int]:
    """Endless stream of independent 64-bit integers."""
    seed = seed_bytes(*parts)
    counter = 0
    while True:
        block = hashlib.sha256(seed + counter.to_bytes(8, "little")).digest()
        for offset in range(0, 32, 8):
            yield int.from_bytes(block[offset : offset + 8], "little")
        counter += 1


def _below(words: Iterator[int], limit: int) -> int:
    """Unbiased integer in [0, limit) by rejection."""
    ceiling = (1 << 64) - (1 << 64) % limit
    for word in words:
        if word < ceiling:
            return word % limit
    raise AssertionError("the stream of words has no end")


def uniform(*parts: Part) -> float:
    """Number in [0, 1) with 53 bits."""
    return (next(_words(*parts)) >> (64 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)


def below(limit: int, *parts: Part) -> int:
    """Unbiased integer in [0, limit). Raises ValueError when limit < 1."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    return _below(_words(*parts), limit)


def shuffled(items: Sequence[T], *parts: Part) -> list[T]:
    """A uniformly drawn permutation of `items` (Fisher-Yates), the input untouched."""
    result = list(items)
    words = _words(*parts)
    for last in range(len(result) - 1, 0, -1):
        other = _below(words, last + 1)
        result[last], result[other] = result[other], result[last]
    return result


def chosen(items: Sequence[T], count: int, *parts: Part) -> list[T]:
    """`count` distinct items (all of them when there are fewer), in drawn order."""
    return shuffled(items, *parts)[:count]
