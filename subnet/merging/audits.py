"""What two agreeing copies do not show: colluders who corrupt only the shards they share, and copied uploads (trust.md 5)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from subnet import draws, wire
from subnet.types import Digest, Epoch, Hotkey, Record, StageIndex

COPIED_SHARE = 0.5
"""Chunks that nothing was learned in can be equal in honest uploads; half of all chunks never are."""


class Copied(Record, frozen=True):
    """Two uploads committed the same bytes in `share` of their chunks. One of the two was copied; this does not say which."""

    pair: tuple[Hotkey, Hotkey]
    share: float


def colluding_share(num_miners: int, num_colluders: int) -> float:
    """Fraction of shards whose two reducers both collude, k(k-1)/(N(N-1)): what they can corrupt without ever differing."""
    if not 0 <= num_colluders <= num_miners or num_miners < 2:
        raise ValueError(f"num_colluders must be in [0, num_miners], got {num_colluders} of {num_miners}")
    return num_colluders * (num_colluders - 1) / (num_miners * (num_miners - 1))


def audited_shards(
    plans: Iterable[wire.ShardPlan], fraction: float, *, beacon: str, stage: StageIndex, epoch: Epoch
) -> tuple[int, ...]:
    """Shards that a referee recomputes although both copies agree, each with probability `fraction`.

    The beacon must be younger than the copies: who can foresee the draw corrupts what is not drawn. A whole shard is
    recomputed, because norm clip and cosine gate need all of it.
    """
    return tuple(
        plan.shard
        for plan in plans
        if draws.uniform(beacon, "shard audit", int(epoch), int(stage), plan.shard) < fraction
    )


def detection_probability(num_corrupt: int, fraction: float) -> float:
    """Chance that at least one of `num_corrupt` agreeing shards is audited."""
    return 1.0 - (1.0 - fraction) ** num_corrupt


def copied_uploads(
    digests: Mapping[Hotkey, Sequence[Digest]], *, untouched: Collection[Digest] = ()
) -> tuple[Copied, ...]:
    """Pairs of uploads of one stage that are largely the same bytes, by the digests of their chunks; sorted.

    Chunks whose digest is in `untouched` (nothing was learned in them) count as different. Chunks are looked up by digest, not
    compared pair by pair: a stage may have hundreds of miners and thousands of chunks.
    """
    same: dict[tuple[Hotkey, Hotkey], int] = {}
    for place in range(max(map(len, digests.values()), default=0)):
        holders: dict[Digest, list[Hotkey]] = {}
        for hotkey in sorted(digests):
            if place < len(digests[hotkey]) and digests[hotkey][place] not in untouched:
                holders.setdefault(digests[hotkey][place], []).append(hotkey)
        for hotkeys in holders.values():
            for pair in combinations(hotkeys, 2):
                same[pair] = same.get(pair, 0) + 1
    shares = {pair: count / max(map(len, (digests[pair[0]], digests[pair[1]]))) for pair, count in same.items()}
    return tuple(Copied(pair=pair, share=share) for pair, share in sorted(shares.items()) if share > COPIED_SHARE)
