"""Knobs of pay: how credited work becomes weights (trust.md 3). Numbers of the run's protocol live in `subnet.config`."""

import enum
import math
from typing import Annotated

from msgspec import Meta

from subnet.errors import InvalidConfig
from subnet.types import Record

Fraction = Annotated[float, Meta(ge=0, le=1)]


class Decay(enum.StrEnum):
    """How work ages: ours, or the paper's window (papers.md A4)."""

    EXPONENTIAL = "exponential"
    STEP = "step"


class OnNoCredit(enum.StrEnum):
    """What a validator posts when nobody has earned anything."""

    NONE = "none"
    BURN = "burn"


class ClaspConfig(Record, frozen=True):
    """When a miner's effect on the loss is called harmful (trust.md 4). A flag only raises the odds of an audit."""

    alpha: Annotated[float, Meta(gt=0, lt=0.5)] = 1e-4
    """Chance that an honest miner is flagged in one window if `sequential`, in one look otherwise."""
    framing_alpha: Annotated[float, Meta(gt=0, le=0.5)] = 0.02
    """Level of the second test, over the miners of the last stage: none of them alone can frame somebody."""
    max_condition: Annotated[float, Meta(ge=1)] = 100.0
    """Largest condition number of a design that verdicts are drawn from; balanced pathways have 1."""
    min_samples: Annotated[int, Meta(ge=2)] = 12
    """Samples below which a miner is not judged."""
    effect: Annotated[float, Meta(gt=0)] = 0.2
    """Harm, in nats a token, that the sequential test finds soonest. An epoch's few samples tell no smaller one: at an error of
    .04 the limit is 4.6 errors, with .05 here 5.5; at an error of .003 it costs 5 %."""
    wander: Annotated[float, Meta(ge=0)] = 0.02
    """Nats a token by which honest miners of a stage usually differ within an epoch, until the record says more (LOG)."""
    sequential: bool = True
    """Windows follow each other, each looked at after every epoch by a test that allows for it; else they slide, and every
    epoch's look has `alpha` of its own."""
    window_epochs: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Published epochs whose samples are looked at together."""


class IncentiveConfig(Record, frozen=True):
    """How contributions become scores, and scores weights."""

    decay: Decay = Decay.EXPONENTIAL
    """Exponential: a score loses 1/W an epoch. Step: work of the last W epochs counts in full, older not at all."""
    gamma_hours: Annotated[float, Meta(gt=0, le=24 * 365)] = 10.0
    """How long work is paid for."""
    sync_period_minutes: Annotated[float, Meta(gt=0, le=60 * 24 * 7)] = 20.0
    """T_s, the usual length of an epoch; with `gamma_hours` it gives W."""
    trust_floor: Fraction = 0.25
    """Trust of a miner with no clean epoch; it grows to 1 in a straight line."""
    probation_epochs: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Clean epochs until trust is 1; 0 takes W."""
    ban_epochs: Annotated[int, Meta(ge=0, le=10_000_000)] = 216
    """Epochs without pay after a confirmed failed audit."""
    rate_cap: Annotated[float, Meta(ge=1, le=1000)] = 1.5
    """Largest volume of an epoch, over what the miner's measured speed promises."""
    burn_share: Fraction = 0.0
    """Share of the weights that goes to the burn hotkey."""
    on_no_credit: OnNoCredit = OnNoCredit.NONE
    """`none` sets no weights, `burn` gives all of them to the burn hotkey."""
    clasp: ClaspConfig = ClaspConfig()

    def __post_init__(self) -> None:
        if self.gamma_hours * 60.0 < self.sync_period_minutes:
            raise InvalidConfig(
                f"incentives.gamma_hours must be at least incentives.sync_period_minutes = {self.sync_period_minutes} "
                f"minutes, got {self.gamma_hours} hours"
            )

    @property
    def window_epochs(self) -> int:
        """W: epochs of work that are paid for at one time, gamma / T_s."""
        return max(1, math.floor(self.gamma_hours * 60.0 / self.sync_period_minutes + 0.5))

    @property
    def ramp_epochs(self) -> int:
        """Clean epochs until trust is 1."""
        return self.probation_epochs or self.window_epochs
