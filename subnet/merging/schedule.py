"""Butterfly all-reduce: which two miners reduce which shard (papers.md A6).

N miners of a stage form N(N-1)/2 pairs. The stage's flat vector is cut into as many shards, and a permutation drawn from the
beacon hands one shard to each pair, so nobody can know before committing whom it will be checked against (trust.md 5).
"""

from collections.abc import Sequence
from itertools import combinations

from subnet import draws, wire
from subnet.types import Epoch, Hotkey, StageIndex

ITEM_BYTES = 4
"""A pseudo-gradient travels as float32."""


def num_chunks(num_elements: int, chunk_bytes: int) -> int:
    """Chunks that hold `num_elements` float32 values; the last may be shorter than `chunk_bytes`."""
    return -(-num_elements * ITEM_BYTES // chunk_bytes)


def shard_plans(
    num_elements: int,
    miners: Sequence[Hotkey],
    *,
    beacon: str,
    stage: StageIndex,
    epoch: Epoch,
    chunk_bytes: int,
) -> tuple[wire.ShardPlan, ...]:
    """One shard for each pair of `miners`, in order of position; together they tile [0, num_elements).

    Edges fall on chunk edges and sizes differ by at most one chunk; with fewer chunks than pairs as many drawn pairs get one
    each. A lone miner reduces one shard alone. The result does not depend on the order of `miners`. Raises
    ValueError when there is nothing to merge or a miner is named twice.
    """
    names = sorted(miners)
    if not names or num_elements < 1:
        raise ValueError(f"a merge needs miners and elements, got {len(names)} and {num_elements}")
    if len(set(names)) < len(names):
        raise ValueError("a miner is named twice in one merge")
    pairs: list[tuple[Hotkey, ...]] = [*combinations(names, 2)] or [(names[0],)]
    pairs = draws.chosen(pairs, num_chunks(num_elements, chunk_bytes), beacon, "shards", int(epoch), int(stage))
    edges = _edges(num_elements, len(pairs), chunk_bytes)
    return tuple(
        wire.ShardPlan(shard=shard, start=edges[shard], stop=edges[shard + 1], reducers=pair)
        for shard, pair in enumerate(pairs)
    )


def _edges(num_elements: int, num_shards: int, chunk_bytes: int) -> list[int]:
    """Positions of the num_shards + 1 shard edges, all but the last a multiple of the chunk."""
    chunks = num_chunks(num_elements, chunk_bytes)
    chunk_elements = chunk_bytes // ITEM_BYTES
    return [min(num_elements, shard * chunks // num_shards * chunk_elements) for shard in range(num_shards + 1)]


def p_valid(num_miners: int, num_failed: int) -> float:
    """Fraction of shards that keep a reducer when `num_failed` miners fail: 1 - k(k-1)/(N(N-1)), rounded once.

    The paper prints the complement (papers.md A6). A lone miner's only shard lives as long as the miner.
    """
    if not 0 <= num_failed <= num_miners or num_miners < 1:
        raise ValueError(f"num_failed must be in [0, num_miners], got {num_failed} of {num_miners}")
    if num_miners == 1:
        return float(1 - num_failed)
    ordered_pairs = num_miners * (num_miners - 1)
    return (ordered_pairs - num_failed * (num_failed - 1)) / ordered_pairs
