"""Which miners a sample passes through: a function of the epoch's beacon and roster that anyone can repeat (trust.md 1.2, 4).

Every stage goes through its miners in rounds; a round is a fresh permutation, so each miner of a stage gets exactly one of
any `len(stage)` consecutive samples of a round, and pairs of miners meet about equally often.
"""

from collections.abc import Sequence

from subnet import draws
from subnet.types import Epoch, Hotkey, SampleId, StageIndex


def hop(roster: Sequence[Hotkey], *, beacon: str, epoch: Epoch, sample: SampleId, stage: StageIndex) -> Hotkey:
    """The miner of `stage` for `sample`."""
    cycle, place = divmod(int(sample), len(roster))
    return draws.shuffled(roster, beacon, "pathway", epoch, stage, cycle)[place]


def pathway(roster: Sequence[Sequence[Hotkey]], *, beacon: str, epoch: Epoch, sample: SampleId) -> tuple[Hotkey, ...]:
    """One miner for each stage, first stage first."""
    return tuple(
        hop(stage_roster, beacon=beacon, epoch=epoch, sample=sample, stage=StageIndex(stage))
        for stage, stage_roster in enumerate(roster)
    )


def sample_of(roster: Sequence[Hotkey], *, beacon: str, epoch: Epoch, hotkey: Hotkey, cycle: int) -> SampleId:
    """The sample of round `cycle` whose first hop is `hotkey`."""
    order = draws.shuffled(roster, beacon, "pathway", epoch, 0, cycle)
    return SampleId(cycle * len(roster) + order.index(hotkey))


def substitute(
    candidates: Sequence[Hotkey], *, beacon: str, epoch: Epoch, sample: SampleId, stage: StageIndex, attempt: int
) -> Hotkey:
    """Who takes over a hop that cannot be reached, drawn among sorted live candidates."""
    index = draws.below(len(candidates), beacon, "substitute", epoch, int(sample), stage, attempt)
    return candidates[index]
