"""Keys and values of the sequences that a stage serves: one cache for each sequence, in whole tiles, counted in bytes.

Legend: L layers of the stage, G key/value heads, E head width, P positions held.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

TILE = 64
"""Positions of one tile of keys. Capacity is a whole number of tiles, and what lies beyond the tokens seen is zero."""
MAX_REMEMBERED = 65536
"""Sequences that were dropped and must not come back with a step that was on its way."""

SequenceKey = tuple[str, int]
"""The gateway's session and its number for the sequence."""


def padded(num_positions: int) -> int:
    """`num_positions` up to whole tiles: what a cache of that many really takes."""
    return -(-num_positions // TILE) * TILE


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a stage keeps for each position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class SequenceCache:
    """Keys and values of one sequence at one stage, for at most `num_positions` of it; taken at once, so that none runs out."""

    def __init__(self, shape: CacheShape, num_positions: int) -> None:
        dims = (2, shape.num_layers, shape.num_kv_heads, padded(num_positions), shape.head_dim)
        self._both = torch.zeros(dims, dtype=shape.dtype, device="cpu")

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return int(self._both.shape[3])

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self._both.nbytes

    def layers(self, first: int, count: int) -> "SequenceCache":
        """The cache of some layers only, on the same memory."""
        part = copy.copy(self)
        part._both = self._both[:, first : first + count]
        return part

    def write(self, layer: int, start: int, keys_GRE: Tensor, values_GRE: Tensor) -> None:
        """Put R positions from `start` on."""
        stop = start + keys_GRE.shape[1]
        self._both[0, layer, :, start:stop] = keys_GRE
        self._both[1, layer, :, start:stop] = values_GRE

    def read(self, layer: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Keys and values (G, P, E) of the first P = `num_positions`."""
        return self._both[0, layer, :, :num_positions], self._both[1, layer, :, :num_positions]


@dataclass(slots=True)
class CacheBook:
    """Every sequence of a stage. `limit_tokens` bounds the positions held by all of them together."""

    shape: CacheShape
    limit_tokens: int
    caches: dict[SequenceKey, SequenceCache] = field(default_factory=dict)
    _dropped: OrderedDict[SequenceKey, None] = field(default_factory=OrderedDict)

    @property
    def size_bytes(self) -> int:
        """Memory held by all caches."""
        return sum(cache.size_bytes for cache in self.caches.values())

    @property
    def num_tokens(self) -> int:
        """Positions there is room for in all caches."""
        return sum(cache.capacity for cache in self.caches.values())

    def open(self, key: SequenceKey, *, start: int, stop: int, capacity: int) -> SequenceCache | None:
        """The cache for positions [start, stop) of a sequence that ends before `capacity`, made at the first of them.

        None when the sequence was dropped, its cache is not here, or there is no room for it.
        """
        cache = self.caches.get(key)
        if cache is not None:
            return cache if stop <= cache.capacity else None
        if start > 0 or key in self._dropped or stop > capacity:
            return None
        if self.num_tokens + padded(capacity) > self.limit_tokens:
            return None
        cache = self.caches[key] = SequenceCache(self.shape, capacity)
        return cache

    def drop(self, key: SequenceKey) -> None:
        """Free a sequence, and refuse what may still be on its way here."""
        self.caches.pop(key, None)
        self._dropped[key] = None
        while len(self._dropped) > MAX_REMEMBERED:
            self._dropped.popitem(last=False)

    def drop_session(self, session: str) -> int:
        """Free all sequences of a gateway that is gone; how many there were."""
        keys = [key for key in self.caches if key[0] == session]
        for key in keys:
            self.drop(key)
        return len(keys)
