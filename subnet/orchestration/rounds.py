"""An epoch as a round of each stage: how many took part of those who were asked, and what they learned (papers.md B3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from subnet.lanes import Lanes
from subnet.orchestration.accounts import EpochAccount
from subnet.types import StageIndex


@dataclass(frozen=True, slots=True)
class Participation:
    """One stage in one published epoch: miners in its roster, those whose update it merged, and updates of earlier epochs."""

    stage: StageIndex
    assigned: int
    accepted: int
    late: int = 0

    @property
    def share(self) -> float | None:
        """Accepted of assigned; None where nobody was assigned."""
        return self.accepted / self.assigned if self.assigned else None


def participation(account: EpochAccount) -> tuple[Participation, ...]:
    """Every stage of a published epoch, in order; nothing of one that is not."""
    if account.snapshots is None:
        return ()
    assigned = list(account.stage_of.values())
    return tuple(
        Participation(
            stage=StageIndex(stage),
            assigned=assigned.count(StageIndex(stage)),
            accepted=sum(hotkey not in account.rejected for hotkey in hotkeys),
            late=sum(update.stage == stage for update in account.merged_late),
        )
        for stage, hotkeys in enumerate(account.snapshots.participants)
    )


def mean_losses(account: EpochAccount, lanes: Lanes) -> tuple[float | None, ...]:
    """Mean loss of the completed samples of each lane, by its last stage; None where there was none."""
    by_lane: dict[range, list[float]] = {lane: [] for lane in lanes}
    for sample, loss in account.losses.items():
        by_lane[lanes.of_sample(sample)].append(loss)
    return tuple(_mean(losses) for losses in by_lane.values())


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
