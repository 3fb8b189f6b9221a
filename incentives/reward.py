"""From credited work to scores: decay, trust, bans (trust.md 3, papers.md A4).

Uses + - x / and fsum only, in a fixed order, so that every validator and every auditor gets the same bits. A score belongs to
a hotkey and ages whenever it is read, also when its miner is gone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from incentives.config import Decay, IncentiveConfig
from subnet.errors import InvariantBroken
from subnet.types import Contribution, Epoch, Hotkey, Record

MAX_VOLUME = 1e30
"""No epoch holds more work than this, in any unit; sums of scores stay finite below it."""


class Rate(Record, frozen=True):
    """Volume an epoch of this miner can hold by its measured speed."""

    hotkey: Hotkey
    volume: float


class EpochOutcome(Record, frozen=True):
    """What the ledger says of one epoch.

    `failed` holds hotkeys with a confirmed failed audit of this epoch; `voided` those whose credit is void because they were
    absent from their challenge or their upload was not accepted. A hotkey without a `rates` entry is not capped.
    """

    epoch: Epoch
    contributions: tuple[Contribution, ...] = ()
    failed: tuple[Hotkey, ...] = ()
    voided: tuple[Hotkey, ...] = ()
    rates: tuple[Rate, ...] = ()


class Score(Record, frozen=True):
    """What one hotkey has earned. `score` times `trust` is its claim on the weights.

    `banned_until` is the first epoch after its ban, None when it is not banned. `reason` is the first condition that keeps it
    from being paid, empty when it is paid.
    """

    hotkey: Hotkey
    score: float
    trust: float
    clean_epochs: int
    banned_until: Epoch | None
    reason: str


@dataclass(slots=True)
class _Account:
    """One hotkey's books while epochs are folded in."""

    score: float = 0.0
    volumes: list[tuple[int, float]] = field(default_factory=list)
    """Epoch and volume of credited work within the window, for step decay."""
    clean_epochs: int = 0
    banned_until: int = 0
    failed_in: int | None = None
    voided_in: int | None = None
    credited_in: int | None = None

    def fail(self, epoch: int, ban_epochs: int) -> None:
        """A confirmed failed audit: everything is gone, and a ban begins."""
        self.score, self.volumes, self.clean_epochs = 0.0, [], 0
        self.failed_in, self.banned_until = epoch, epoch + 1 + ban_epochs

    def void(self, epoch: int) -> None:
        """Nothing is credited in this epoch, and the clean count starts anew."""
        self.voided_in, self.clean_epochs = epoch, 0

    def credit(self, epoch: int, volume: float, window_epochs: int) -> None:
        """Book one epoch's work, unless it is banned, void or nothing."""
        if volume <= 0.0 or epoch < self.banned_until or self.voided_in == epoch:
            return
        self.score = self.score + volume
        self.volumes = [(at, old) for at, old in self.volumes if epoch - at < window_epochs] + [(epoch, volume)]
        self.clean_epochs += 1
        self.credited_in = epoch


class Scoreboard:
    """Scores while epochs are added one after the other, oldest first."""

    def __init__(self, config: IncentiveConfig) -> None:
        self._config = config
        self._accounts: dict[Hotkey, _Account] = {}
        self._epoch: int | None = None

    def add(self, outcome: EpochOutcome) -> None:
        """Let time pass to the end of `outcome.epoch` and book it. Raises InvariantBroken when it is not newer than the last."""
        epoch = int(outcome.epoch)
        if self._epoch is not None:
            if epoch <= self._epoch:
                raise InvariantBroken(f"an outcome of epoch {epoch} follows one of epoch {self._epoch}")
            self._age(epoch - self._epoch)
        self._epoch = epoch
        for hotkey in outcome.failed:
            self._account(hotkey).fail(epoch, self._config.ban_epochs)
        for hotkey in outcome.voided:
            self._account(hotkey).void(epoch)
        for hotkey, volume in volumes(outcome, self._config).items():
            self._account(hotkey).credit(epoch, volume, self._config.window_epochs)

    def scores(self) -> dict[Hotkey, Score]:
        """Score of every hotkey ever named, at the end of the newest epoch; keys sorted."""
        now = self._epoch or 0
        return {hotkey: _score(hotkey, self._accounts[hotkey], now, self._config) for hotkey in sorted(self._accounts)}

    def _account(self, hotkey: Hotkey) -> _Account:
        return self._accounts.setdefault(hotkey, _Account())

    def _age(self, num_epochs: int) -> None:
        """By repeated products, because a power would come from libm."""
        kept = 1.0 - 1.0 / self._config.window_epochs
        for account in self._accounts.values():
            for _ in range(num_epochs):
                if account.score == 0.0:
                    break
                account.score = account.score * kept


def scores(outcomes: Sequence[EpochOutcome], config: IncentiveConfig) -> dict[Hotkey, Score]:
    """Score of every hotkey that any outcome names, at the end of the newest epoch; keys sorted.

    The order of `outcomes`, and of the records within one, does not matter. Raises InvariantBroken when an epoch comes twice,
    or holds a contribution of another epoch or one whose volume is no quantity of work.
    """
    board = Scoreboard(config)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.epoch):
        board.add(outcome)
    return board.scores()


def volumes(outcome: EpochOutcome, config: IncentiveConfig) -> dict[Hotkey, float]:
    """Volume of each hotkey in one epoch, capped by its measured rate; keys sorted. Raises InvariantBroken."""
    parts: dict[Hotkey, list[float]] = {}
    for contribution in outcome.contributions:
        if contribution.epoch != outcome.epoch:
            raise InvariantBroken(f"a contribution of epoch {contribution.epoch} in the outcome of {outcome.epoch}")
        if not 0.0 <= contribution.volume <= MAX_VOLUME:
            raise InvariantBroken(f"a contribution with volume {contribution.volume}")
        parts.setdefault(contribution.hotkey, []).append(contribution.volume)
    limits = {rate.hotkey: config.rate_cap * rate.volume for rate in outcome.rates}
    return {hotkey: min(math.fsum(parts[hotkey]), limits.get(hotkey, math.inf)) for hotkey in sorted(parts)}


def _score(hotkey: Hotkey, account: _Account, now: int, config: IncentiveConfig) -> Score:
    is_banned = now < account.banned_until
    value = _value(account, now, config)
    trust = config.trust_floor + (1.0 - config.trust_floor) * account.clean_epochs / config.ramp_epochs
    trust = 0.0 if is_banned else min(1.0, trust)
    return Score(
        hotkey=hotkey,
        score=value,
        trust=trust,
        clean_epochs=account.clean_epochs,
        banned_until=Epoch(account.banned_until) if is_banned else None,
        reason="" if value * trust > 0.0 else _reason(account, is_banned=is_banned, config=config),
    )


def _value(account: _Account, now: int, config: IncentiveConfig) -> float:
    if config.decay is Decay.EXPONENTIAL:
        return account.score
    # work that began `now - at + 1` epochs ago counts while that is at most gamma: W epochs at any time
    return math.fsum(volume for at, volume in account.volumes if now - at < config.window_epochs)


def _reason(account: _Account, *, is_banned: bool, config: IncentiveConfig) -> str:
    """First failing condition, in plain words."""
    if is_banned:
        return f"banned until epoch {account.banned_until}: its audit of epoch {account.failed_in} failed and was confirmed"
    if account.credited_in is None and account.voided_in is not None:
        return (
            f"credit of epoch {account.voided_in} is void: absent from its challenge or the merge, no upload of its own"
            " that could be merged, or a false shard"
        )
    if account.credited_in is None:
        return "no credited work yet"
    if config.trust_floor == 0.0 and account.clean_epochs == 0:
        return "no clean epoch since its credit was last void, and trust starts at 0"
    return f"no credited work within {config.window_epochs} epochs: the last was in epoch {account.credited_in}"
