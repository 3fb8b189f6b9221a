"""What a stage host does with one step, whichever kind of stage it holds: pieces and caches in, rows to send or tokens out."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from subnet.inference.cache import CacheShape, SequenceCache
from subnet.inference.decode import Span, StageRunner
from subnet.inference.denoise import DenoisingRunner, Targets
from subnet.inference.messages import AUTOREGRESSIVE, DENOISING, POOLED, Piece
from subnet.inference.pooled import PooledRunner
from subnet.inference.sampling import Choice, Sampling, choose
from subnet.inference.served import ServedModel

Choices = list[tuple[int, Choice]]
"""Tokens by the number of their sequence, in order."""
Item = tuple[Piece, SequenceCache]
Ahead = Mapping[int, Tensor | None]
"""By sequence: (S, V) logits of each of a host's pooled stages after its piece; None where no token is wanted."""
_Wanted = list[tuple[Piece, Sampling]]


class Engine(Protocol):
    """One stage. It holds no sequence's state."""

    served: ServedModel
    is_first: bool
    is_last: bool
    cache_shape: CacheShape

    def num_rows(self, piece: Piece) -> int:
        """Rows that a piece has on the wire."""
        ...

    def run(self, items: Sequence[Item], received: Tensor | None) -> tuple[Tensor | None, Choices]:
        """(R, K) rows as they came, None at the first stage -> rows to send on, or at the last stage the tokens chosen."""
        ...


class AutoregressiveEngine:
    """One token after the other."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self.served = runner.served
        self.is_first, self.is_last = runner.is_first, runner.is_last
        self.cache_shape = runner.cache_shape

    def num_rows(self, piece: Piece) -> int:
        """A row for each token."""
        return len(piece.ids)

    def run(self, items: Sequence[Item], received: Tensor | None) -> tuple[Tensor | None, Choices]:
        """As Engine says; a token is chosen after each piece that wants one."""
        rows = self._runner.run([Span(cache, piece.start, piece.ids) for piece, cache in items], received)
        if not self.is_last:
            return rows, []
        ends, wanted = _wanted_rows(items)
        if not ends:
            return None, []
        return None, _chosen(wanted, self._runner.logits(rows[ends]))


class PooledEngine:
    """Every stage reads all tokens; what crosses is the sum of logits so far, a row for each token that is wanted."""

    def __init__(self, runner: PooledRunner) -> None:
        self._runner = runner
        self.served = runner.served
        self.is_first, self.is_last = runner.is_first, runner.is_last
        self.cache_shape = runner.cache_shape

    def num_rows(self, piece: Piece) -> int:
        """One where a token is wanted after the piece; what a stage makes of the others stays in its cache."""
        return 0 if piece.sampling is None else 1

    def ahead(self, items: Sequence[Item]) -> Ahead:
        """What needs no row of the stages before; for each piece's sequence, and for `run` of the same pieces or some of them."""
        ends, wanted = _wanted_rows(items)
        own_SRV = self._runner.own([Span(cache, piece.start, piece.ids) for piece, cache in items], ends)
        rows = {piece.sequence: own_SRV[:, at] for at, (piece, _) in enumerate(wanted)}
        return {piece.sequence: rows.get(piece.sequence) for piece, _ in items}

    def run(
        self, items: Sequence[Item], received: Tensor | None, ahead: Ahead | None = None
    ) -> tuple[Tensor | None, Choices]:
        """As Engine says. What `ahead` does not hold is computed now: it comes to the same bits."""
        found = dict(ahead or {})
        missing = [item for item in items if item[0].sequence not in found]
        if missing:
            found |= self.ahead(missing)
        _, wanted = _wanted_rows(items)
        own = [row for piece, _ in wanted if (row := found[piece.sequence]) is not None]
        if not own:
            return (None if self.is_last else torch.empty(0, self.served.wire_width)), []
        sums = self._runner.add(received, torch.stack(own, dim=1))
        return (None, _chosen(wanted, self._runner.mean(sums))) if self.is_last else (sums, [])


class DenoisingEngine:
    """Coming tokens out of noise: one at a time, or all of an answer at once."""

    def __init__(self, runner: DenoisingRunner) -> None:
        self._runner = runner
        self.served = runner.served
        self.is_first, self.is_last = runner.is_first, runner.is_last
        self.cache_shape = runner.cache_shape

    def num_rows(self, piece: Piece) -> int:
        """A row for each coming token, or for each clean one that carries a coming one's noise."""
        return len(piece.ids) if self._runner.is_single else piece.num_targets

    def run(self, items: Sequence[Item], received: Tensor | None) -> tuple[Tensor | None, Choices]:
        """As Engine says; a token is chosen for every coming one of the pieces that want any."""
        targets = [
            Targets(Span(cache, piece.start, piece.ids), piece.num_targets, piece.noise_seed) for piece, cache in items
        ]
        rows, logits = self._runner.run(targets, received)
        if not self.is_last:
            return rows, []
        choices: Choices = []
        at = 0
        for piece, _ in items:
            at += self.num_rows(piece)
            if piece.sampling is None:
                continue
            position = piece.start + len(piece.ids)
            for ahead, row in enumerate(logits[at - piece.num_targets : at]):
                choices.append((piece.sequence, choose(row, piece.sampling, position + ahead)))
        return None, choices


def _wanted_rows(items: Sequence[Item]) -> tuple[list[int], _Wanted]:
    """Among the rows of all pieces, the last of each that wants a token; and those pieces, with how they choose."""
    ends: list[int] = []
    wanted: _Wanted = []
    at = 0
    for piece, _ in items:
        at += len(piece.ids)
        if piece.sampling is not None:
            ends.append(at - 1)
            wanted.append((piece, piece.sampling))
    return ends, wanted


def _chosen(wanted: _Wanted, logits: Tensor) -> Choices:
    """A token after each of the pieces, from its row of (R, V) logits."""
    return [
        (piece.sequence, choose(row, sampling, piece.start + len(piece.ids)))
        for (piece, sampling), row in zip(wanted, logits, strict=True)
    ]


def mode_of(served: ServedModel) -> str:
    """AUTOREGRESSIVE, DENOISING or POOLED."""
    return DENOISING if served.is_denoising else POOLED if served.is_pooled else AUTOREGRESSIVE


def make_engine(
    served: ServedModel, stage: int, num_stages: int, params: Mapping[str, Tensor], *, max_positions: int
) -> tuple[Engine, Sequence[StageRunner]]:
    """The stage, and the runners whose independence of rows is to be measured. Raises InvalidConfig."""
    if served.is_denoising:
        return DenoisingEngine(DenoisingRunner(served, stage, num_stages, params, max_positions=max_positions)), ()
    if served.is_pooled:
        pooled = PooledRunner(served, stage, num_stages, params, max_positions=max_positions)
        return PooledEngine(pooled), pooled.runners
    runner = StageRunner(served, stage, num_stages, params, max_positions=max_positions)
    return AutoregressiveEngine(runner), (runner,)
