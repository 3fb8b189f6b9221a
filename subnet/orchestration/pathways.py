"""Which miners a sample passes through: a function of the epoch's beacon and roster that anyone can repeat (trust.md 1.2, 4).

Every stage goes through its miners in rounds; a round is a fresh permutation, so each miner of a stage gets exactly one of
any `len(stage)` consecutive samples of a round, and pairs of miners meet about equally often. A sample's `turn` is its place
among the samples of its lane.
"""

from collections.abc import Sequence
from functools import lru_cache

from subnet import draws
from subnet.types import Epoch, Hotkey, SampleId, StageIndex

Roster = Sequence[Sequence[Hotkey]]
"""Miners of each stage of the run."""


@lru_cache(maxsize=1 << 14)
def _drawn(miners: tuple[Hotkey, ...], beacon: str, epoch: Epoch, stage: int, cycle: int) -> tuple[Hotkey, ...]:
    """A fresh permutation; kept, for a round is asked for once by every sample in it."""
    return tuple(draws.shuffled(miners, beacon, "pathway", epoch, stage, cycle))


def _round(roster: Roster, lane: range, *, beacon: str, epoch: Epoch, stage: int, cycle: int) -> Sequence[Hotkey]:
    """The order in which a stage's miners take the samples of a round.

    Who passes a sample alone has no partner to choose. There it is the roster's own order: what a miner trains on then follows
    from who is there, not from a chain's blocks, and a run can be repeated to the bit (papers.md B3).
    """
    if len(lane) == 1:
        return roster[stage]
    return _drawn(tuple(roster[stage]), beacon, epoch, stage, cycle)


def pathway(roster: Roster, lane: range, *, beacon: str, epoch: Epoch, turn: int) -> tuple[Hotkey, ...]:
    """One miner for each stage of the lane, first stage first."""
    hops = []
    for stage in lane:
        cycle, place = divmod(turn, len(roster[stage]))
        hops.append(_round(roster, lane, beacon=beacon, epoch=epoch, stage=stage, cycle=cycle)[place])
    return tuple(hops)


def turn_of(roster: Roster, lane: range, *, beacon: str, epoch: Epoch, hotkey: Hotkey, cycle: int) -> int:
    """The turn in round `cycle` of the lane whose first hop is `hotkey`."""
    order = _round(roster, lane, beacon=beacon, epoch=epoch, stage=lane.start, cycle=cycle)
    return cycle * len(order) + order.index(hotkey)


def substitute(
    candidates: Sequence[Hotkey], *, beacon: str, epoch: Epoch, sample: SampleId, stage: StageIndex, attempt: int
) -> Hotkey:
    """Who takes over a hop that cannot be reached, drawn among sorted live candidates."""
    index = draws.below(len(candidates), beacon, "substitute", epoch, int(sample), stage, attempt)
    return candidates[index]
