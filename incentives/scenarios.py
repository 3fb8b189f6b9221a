"""Synthetic pathways and losses, to see what CLASP finds and whom it blames: the paper's toy and its harder relatives.

Legend as in `incentives.clasp`.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from incentives.clasp import Batch, Floats, Ints

_STICKINESS = 0.8
"""Chance that a sticky sample goes on to the usual next miner."""
_HEAVY_FREEDOM = 4
_TIME_BLOCKS, _BLOCKS_PER_EPOCH = 32, 4


class Routing(enum.StrEnum):
    """How pathways are drawn: in rounds, as a run draws them; each hop by itself; mostly where the last one went; by shares."""

    BALANCED = "balanced"
    RANDOM = "random"
    STICKY = "sticky"
    UNBALANCED = "unbalanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One network. Losses in nats a token; `harm` maps (stage, miner) to the factor on mean and spread of its samples.

    `framing` is (reporter in the last stage, stage, victim, nats added): a liar who makes a victim look bad.
    """

    num_stages: int = 5
    num_miners: int = 5
    loss: float = 4.5
    sigma: float = 0.2
    routing: Routing = Routing.BALANCED
    is_heavy_tailed: bool = False
    trend: float = 0.0
    """Nats by which the loss falls from the first to the last sample."""
    harm: Mapping[tuple[int, int], float] = field(default_factory=dict)
    framing: tuple[int, int, int, float] | None = None
    wander: float = 0.0
    """Deviation in nats of a miner's effect from one epoch to the next, between merges."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Factors of a drawn batch: the stages, and blocks of time when anything changes with it."""
        return (self.num_miners,) * self.num_stages + ((_TIME_BLOCKS,) if self.has_time else ())

    @property
    def has_time(self) -> bool:
        """Whether a sample's time matters."""
        return self.trend != 0.0 or self.wander != 0.0

    @property
    def epoch_of_block(self) -> tuple[int, ...]:
        """Epoch of each block of time; none where time does not matter."""
        return tuple(block // _BLOCKS_PER_EPOCH for block in range(_TIME_BLOCKS)) if self.has_time else ()

    def draw(self, num_samples: int, rng: np.random.Generator) -> Batch:
        """Samples of this network."""
        members_kf = self._pathways(num_samples, rng)
        factor_k = np.ones(num_samples)
        for (stage, miner), factor in self.harm.items():
            factor_k = np.where(members_kf[:, stage] == miner, factor_k * factor, factor_k)
        loss_k = factor_k * (self.loss + self.sigma * self._noise(num_samples, rng))
        loss_k -= self.trend * np.arange(num_samples) / num_samples
        if self.framing is not None:
            reporter, stage, victim, added = self.framing
            loss_k += added * ((members_kf[:, -1] == reporter) & (members_kf[:, stage] == victim))
        if self.has_time:
            times_k = np.arange(num_samples) * _TIME_BLOCKS // num_samples
            loss_k += self._wandered(members_kf, times_k // _BLOCKS_PER_EPOCH, rng)
            members_kf = np.column_stack([members_kf, times_k])
        return Batch(members_kf=members_kf, loss_k=loss_k)

    def _wandered(self, members_kf: Ints, epochs_k: Ints, rng: np.random.Generator) -> Floats:
        """What each miner's params of the moment add."""
        num_epochs = _TIME_BLOCKS // _BLOCKS_PER_EPOCH
        effects_esm = self.wander * rng.standard_normal((num_epochs, self.num_stages, self.num_miners))
        added_ks = effects_esm[epochs_k[:, None], np.arange(self.num_stages), members_kf]
        return np.asarray(added_ks.sum(axis=1), dtype=np.float64)

    def _noise(self, num_samples: int, rng: np.random.Generator) -> Floats:
        """Unit variance; heavy tails by Student's t."""
        if not self.is_heavy_tailed:
            return rng.standard_normal(num_samples)
        unit = math.sqrt((_HEAVY_FREEDOM - 2) / _HEAVY_FREEDOM)
        return np.asarray(unit * rng.standard_t(_HEAVY_FREEDOM, num_samples), dtype=np.float64)

    def _pathways(self, num_samples: int, rng: np.random.Generator) -> Ints:
        shape = (num_samples, self.num_stages)
        if self.routing is Routing.UNBALANCED:
            shares = np.arange(1.0, self.num_miners + 1.0)
            return rng.choice(self.num_miners, size=shape, p=shares / shares.sum()).astype(np.int64)
        if self.routing is Routing.BALANCED:
            return np.column_stack([self._rounds(num_samples, rng) for _ in range(self.num_stages)])
        drawn: Ints = rng.integers(0, self.num_miners, size=shape)
        if self.routing is Routing.STICKY:
            stays = rng.random(shape) < _STICKINESS
            for stage in range(1, self.num_stages):
                drawn[:, stage] = np.where(stays[:, stage], drawn[:, stage - 1], drawn[:, stage])
        return drawn

    def _rounds(self, num_samples: int, rng: np.random.Generator) -> Ints:
        """One stage's miners: each once in every round, in an order of that round (subnet.orchestration.pathways)."""
        num_rounds = -(-num_samples // self.num_miners)
        order = np.tile(np.arange(self.num_miners), (num_rounds, 1))
        return rng.permuted(order, axis=1).ravel()[:num_samples]
