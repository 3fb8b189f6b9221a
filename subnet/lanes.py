"""Which stages a sample passes: every one in a pipeline, a single one in a run whose stages train apart (papers.md B3).

A **lane** is what samples pass from its first stage to its last. A pipeline is one lane of all stages; a BlockTrain run has a
lane for each stage, side by side, and none waits for another. Who has to know which stage begins, ends or follows asks here.

Samples are dealt to the lanes by their number, so that `(epoch, sample) -> tokens` stays pure and every lane reads a text of
its own: sample `turn * num_lanes + lane` is the one that a lane passes at its `turn`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from subnet.config import RunConfig, RunKind
from subnet.types import Hotkey, Lease, SampleId, StageIndex


@dataclass(frozen=True, slots=True)
class Lanes:
    """`num_stages` stages in lanes of `length` each."""

    num_stages: int
    length: int

    def __iter__(self) -> Iterator[range]:
        """The stages of each lane, in order."""
        return (range(first, first + self.length) for first in range(0, self.num_stages, self.length))

    @property
    def count(self) -> int:
        """Lanes side by side."""
        return self.num_stages // self.length

    def of_stage(self, stage: StageIndex) -> range:
        """The lane that a stage lies in."""
        first = stage - stage % self.length
        return range(first, first + self.length)

    def of_sample(self, sample: SampleId) -> range:
        """The stages that a sample passes, first to last; `Lease.hops` names a miner for each."""
        first = sample % self.count * self.length
        return range(first, first + self.length)

    def turn(self, sample: SampleId) -> int:
        """The sample's place among those of its lane."""
        return sample // self.count

    def sample(self, lane: range, turn: int) -> SampleId:
        """Inverse of `of_sample` and `turn`."""
        return SampleId(turn * self.count + lane.start // self.length)


def lanes(config: RunConfig) -> Lanes:
    """The lanes of a run."""
    num_stages = config.training.num_stages
    return Lanes(num_stages=num_stages, length=1 if config.kind is RunKind.BLOCKTRAIN else num_stages)


def hop(config: RunConfig, lease: Lease, stage: int) -> Hotkey | None:
    """The miner that a lease names for a stage, None where the sample does not pass it or the lease is malformed."""
    lane = lanes(config).of_sample(lease.sample)
    return lease.hops[stage - lane.start] if stage in lane and len(lease.hops) == len(lane) else None
