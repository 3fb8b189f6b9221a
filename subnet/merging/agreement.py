"""Agreement matrix: how often the two copies of the shards that i and j share were equal (papers.md A6).

A miner that corrupts its copies on its own disagrees with everyone, the honest only with it: a row out of consensus.
Colluders agree with each other and differ from the rest, which still fills their rows while they are a minority.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from subnet.types import Hotkey, Record

MAX_DISAGREEING = 0.5
"""A row is out of consensus when it disagrees with more than this fraction of its partners."""
MIN_PARTNERS = 2
"""With one partner a disagreement says that one of two is wrong, not which: the referee decides."""


class Comparison(Record, frozen=True):
    """Two copies of one shard were compared."""

    pair: tuple[Hotkey, Hotkey]
    is_equal: bool


@dataclass(frozen=True, slots=True)
class AgreementMatrix:
    """Comparisons counted by pair. `hotkeys` are the rows, sorted; cells are (equal, compared)."""

    hotkeys: tuple[Hotkey, ...]
    cells: dict[tuple[Hotkey, Hotkey], tuple[int, int]]

    def agreement(self, one: Hotkey, other: Hotkey) -> float | None:
        """Fraction of equal comparisons, or None when the two never shared a shard."""
        equal, compared = self.cells.get(_ordered(one, other), (0, 0))
        return equal / compared if compared else None

    def rows(self) -> list[list[float | None]]:
        """The matrix in order of `hotkeys`; None on the diagonal and where nothing was compared."""
        return [[self.agreement(one, other) for other in self.hotkeys] for one in self.hotkeys]

    def disagreeing(self, hotkey: Hotkey) -> float:
        """Fraction of a miner's partners with which its copies differed at least once."""
        partners = self._partners(hotkey)
        differing = [other for other in partners if self.agreement(hotkey, other) != 1.0]
        return len(differing) / len(partners) if partners else 0.0

    def out_of_consensus(self) -> tuple[Hotkey, ...]:
        """Miners whose rows disagree with most of their partners."""
        return tuple(
            hotkey
            for hotkey in self.hotkeys
            if len(self._partners(hotkey)) >= MIN_PARTNERS and self.disagreeing(hotkey) > MAX_DISAGREEING
        )

    def _partners(self, hotkey: Hotkey) -> Sequence[Hotkey]:
        return [other for other in self.hotkeys if self.agreement(hotkey, other) is not None]


def agreement_matrix(comparisons: Iterable[Comparison]) -> AgreementMatrix:
    """Matrix over everything that was compared; the order of the records does not matter."""
    cells: dict[tuple[Hotkey, Hotkey], tuple[int, int]] = {}
    for comparison in comparisons:
        pair = _ordered(*comparison.pair)
        equal, compared = cells.get(pair, (0, 0))
        cells[pair] = (equal + comparison.is_equal, compared + 1)
    hotkeys = tuple(sorted({hotkey for pair in cells for hotkey in pair}))
    return AgreementMatrix(hotkeys=hotkeys, cells=cells)


def _ordered(one: Hotkey, other: Hotkey) -> tuple[Hotkey, Hotkey]:
    return (one, other) if one <= other else (other, one)
