"""The subnet's economy in simulation: what each strategy is paid over days, by the real scoring code and Yuma (trust.md 3, 7).

Time runs in epochs, and each epoch ends with one round of consensus. Nothing here is part of a score: it is what an owner looks
at before changing a knob.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from msgspec import Meta

from incentives.config import IncentiveConfig
from incentives.reward import EpochOutcome, Rate, Score, Scoreboard
from incentives.strategies import HONEST, Share, Strategy, ValidatorKind
from incentives.weights import to_u16, weights
from subnet import draws
from subnet.types import Contribution, Epoch, Hotkey, Outcome, Record, StageIndex
from subnet.yuma import YumaInput, YumaParams, without_bonds_to, yuma_epoch

_ABSENCES_TO_FAIL = 2


class Population(Record, frozen=True):
    """How many machines follow one strategy."""

    strategy: Strategy
    count: Annotated[int, Meta(ge=1)]


class Stake(Record, frozen=True):
    """One validator."""

    kind: ValidatorKind
    stake: Annotated[float, Meta(gt=0)]


class Economy(Record, frozen=True):
    """Everything a simulation depends on."""

    miners: tuple[Population, ...]
    validators: tuple[Stake, ...]
    incentives: IncentiveConfig = IncentiveConfig()
    num_epochs: Annotated[int, Meta(ge=1)] = 720
    audit_probability: Share = 0.1
    probation_audit_probability: Share = 0.5
    """Of hotkeys whose trust is not yet full."""
    false_alarm: Share = 0.0
    """Chance that one honest validator fails an honest miner."""
    is_tracked: bool = False
    """The paper's way: only work that was audited and passed is credited."""
    volume_noise: Annotated[float, Meta(ge=0, le=0.3)] = 0.13
    """Spread of one machine's volume from epoch to epoch, over its mean."""
    speed_spread: Annotated[float, Meta(ge=0, le=2)] = 0.4
    """Spread of the logarithm of machines' speeds."""
    registration_cost: Annotated[float, Meta(ge=0)] = 30.0
    """Price of a hotkey, in epochs of an average honest miner's pay."""


class StrategyPay(Record, frozen=True):
    """How one strategy fared, against honest miners of the same speed.

    `pay` and `net_pay` (after registrations beyond the first) are means over rounds, with 95 % intervals of half width
    `pay_error`. `epochs_to_detection` is the median over its machines, None when most were never convicted.
    """

    name: str
    pay: float
    pay_error: float
    net_pay: float
    cost: float
    convictions: float
    """Confirmed failed audits for each machine."""
    epochs_to_detection: float | None


class EconomyReport(Record, frozen=True):
    """Result of a simulation.

    `dividends` are by kind of validator, for each unit of stake, over the honest ones' where there are any.
    """

    strategies: tuple[StrategyPay, ...]
    false_convictions: int
    honest_audits: int
    honest_variation: float
    """Coefficient of variation of honest miners' pay for a unit of speed, over the whole time."""
    dividends: dict[str, float]


@dataclass(slots=True)
class _Machine:
    """One miner's machine in one round."""

    strategy: Strategy
    speed: float
    uids: list[int]
    hotkeys: list[Hotkey]
    pay: float = 0.0
    num_registrations: int = 0
    num_convictions: int = 0
    convicted_in: int | None = None
    absences: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Findings:
    """What one epoch's audits and merge found."""

    contributions: list[Contribution] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    failed: list[Hotkey] = field(default_factory=list)
    voided: list[Hotkey] = field(default_factory=list)


class _Round:
    """One run of the economy from one seed."""

    def __init__(self, economy: Economy, rng: np.random.Generator) -> None:
        self.economy = economy
        self._rng = rng
        self._board = Scoreboard(economy.incentives)
        self._scores: dict[Hotkey, Score] = {}
        self._posted: dict[Hotkey, int] = {}
        self._num_named = 0
        self.honest_audits = 0
        self.machines = self._built()
        self._registered = np.full(len(economy.validators) + sum(len(one.uids) for one in self.machines), -1, np.int64)
        self._bonds = np.zeros((len(self._registered), len(self._registered)))
        self.dividends = np.zeros(len(economy.validators))

    def run(self) -> None:
        """Live through every epoch."""
        for epoch in range(self.economy.num_epochs):
            findings = _Findings()
            for machine in self.machines:
                self._work(machine, epoch, findings)
            self._board.add(
                EpochOutcome(
                    epoch=Epoch(epoch),
                    contributions=tuple(findings.contributions),
                    failed=tuple(findings.failed),
                    voided=tuple(findings.voided),
                    rates=tuple(findings.rates),
                )
            )
            self._scores = self._board.scores()
            self._consensus(epoch)

    def _built(self) -> list[_Machine]:
        machines: list[_Machine] = []
        uid = len(self.economy.validators)
        for population in self.economy.miners:
            for _ in range(population.count):
                speed = math.exp(self.economy.speed_spread * float(self._rng.standard_normal()))
                count = population.strategy.num_hotkeys
                hotkeys = [self._new_hotkey() for _ in range(count)]
                machines.append(_Machine(population.strategy, speed, list(range(uid, uid + count)), hotkeys))
                uid += count
        return machines

    def _new_hotkey(self) -> Hotkey:
        self._num_named += 1
        return Hotkey(f"5{self._num_named:06d}")

    def _work(self, machine: _Machine, epoch: int, findings: _Findings) -> None:
        """One machine's epoch under each of its hotkeys."""
        strategy = machine.strategy
        if not strategy.is_present(epoch):
            return
        for at in range(len(machine.hotkeys)):
            if self._is_banned(machine.hotkeys[at], epoch):
                if not strategy.is_returning:
                    continue
                self._register_anew(machine, at, epoch)
            hotkey, rate = machine.hotkeys[at], machine.speed / len(machine.hotkeys)
            is_cheating = self._happens(strategy.cheating)
            noise = max(0.0, 1.0 + self.economy.volume_noise * float(self._rng.standard_normal()))
            volume = rate * noise * (strategy.claimed if is_cheating else 1.0)
            is_audited = self._happens(self._audit_probability(hotkey))
            if is_cheating and self._happens(strategy.rejection):
                findings.voided.append(hotkey)
            if is_cheating and strategy.exposure > 0.0 and self._happens(strategy.exposure):
                self._convict(machine, hotkey, epoch, findings)
            if is_audited:
                self._audit(machine, hotkey, epoch, is_cheating=is_cheating, findings=findings)
            if is_audited or not self.economy.is_tracked:
                findings.contributions.append(
                    Contribution(hotkey=hotkey, epoch=Epoch(epoch), stage=StageIndex(0), units=1, volume=volume)
                )
            findings.rates.append(Rate(hotkey=hotkey, volume=rate))

    def _audit(self, machine: _Machine, hotkey: Hotkey, epoch: int, *, is_cheating: bool, findings: _Findings) -> None:
        strategy = machine.strategy
        if self._happens(strategy.absence):
            window = self.economy.incentives.window_epochs
            machine.absences = [then for then in machine.absences if epoch - then < window] + [epoch]
            is_failed = len(machine.absences) >= _ABSENCES_TO_FAIL
            findings.voided.append(hotkey)
        else:
            is_found = is_cheating and self._happens(strategy.detection)
            is_failed = self._judged(is_found=is_found) is Outcome.FAIL
            self.honest_audits += strategy.cheating == 0.0
        if is_failed:
            machine.absences = []
            self._convict(machine, hotkey, epoch, findings)

    @staticmethod
    def _convict(machine: _Machine, hotkey: Hotkey, epoch: int, findings: _Findings) -> None:
        findings.failed.append(hotkey)
        machine.num_convictions += 1
        machine.convicted_in = epoch if machine.convicted_in is None else machine.convicted_in

    def _judged(self, *, is_found: bool) -> Outcome:
        """Verdict of auditor and confirmer, a third deciding a split; copiers do not answer and are drawn over."""
        kinds = [one.kind for one in self.economy.validators if one.kind is not ValidatorKind.COPIER]
        order = self._rng.permutation(len(kinds))
        votes: list[bool] = []
        for at in order[:3]:
            votes.append(self._fails(kinds[at], is_found=is_found))
            if votes.count(True) == 2:
                return Outcome.FAIL
            if votes.count(False) == 2:
                return Outcome.PASS
        return Outcome.INCONCLUSIVE

    def _fails(self, kind: ValidatorKind, *, is_found: bool) -> bool:
        if kind is ValidatorKind.HONEST:
            return is_found or self._happens(self.economy.false_alarm)
        return kind is ValidatorKind.FAILING

    def _consensus(self, epoch: int) -> None:
        """Validators post, Yuma pays."""
        fresh = to_u16(weights(self._scores, self.economy.incentives, burn_hotkey=None))
        place = {hotkey: uid for one in self.machines for hotkey, uid in zip(one.hotkeys, one.uids, strict=True)}
        total, num_validators = len(self._registered), len(self.economy.validators)
        matrix = np.zeros((total, total))
        for uid, validator in enumerate(self.economy.validators):
            posted = self._posted if validator.kind is ValidatorKind.COPIER else fresh
            for hotkey, value in posted.items():
                matrix[uid, place[hotkey]] = value
        is_original = any(validator.kind is not ValidatorKind.COPIER for validator in self.economy.validators)
        self._posted = fresh if is_original else {}
        stake = np.zeros(total)
        stake[:num_validators] = [validator.stake for validator in self.economy.validators]
        result = yuma_epoch(
            YumaInput(
                stake_n=stake,
                weights_nn=matrix,
                bonds_nn=self._bonds,
                permits_n=stake > 0,
                active_n=np.ones(total, np.bool_),
                last_update_n=np.full(total, epoch + 1, np.int64),
                registered_n=self._registered,
            ),
            YumaParams(),
        )
        self._bonds = result.bonds_nn
        self.dividends += result.dividends_n[:num_validators]
        for machine in self.machines:
            machine.pay += math.fsum(float(result.incentive_n[uid]) for uid in machine.uids)

    def _register_anew(self, machine: _Machine, at: int, epoch: int) -> None:
        machine.hotkeys[at] = self._new_hotkey()
        machine.num_registrations += 1
        self._registered[machine.uids[at]] = epoch
        is_replaced = np.arange(len(self._registered)) == machine.uids[at]
        self._bonds = without_bonds_to(self._bonds, is_replaced)

    def _is_banned(self, hotkey: Hotkey, epoch: int) -> bool:
        score = self._scores.get(hotkey)
        return score is not None and score.banned_until is not None and epoch < score.banned_until

    def _audit_probability(self, hotkey: Hotkey) -> float:
        score = self._scores.get(hotkey)
        is_trusted = score is not None and score.clean_epochs >= self.economy.incentives.ramp_epochs
        return self.economy.audit_probability if is_trusted else self.economy.probation_audit_probability

    def _happens(self, chance: float) -> bool:
        return float(self._rng.random()) < chance


def simulate(economy: Economy, *, seed: int = 0, num_rounds: int = 5) -> EconomyReport:
    """Run the economy from `num_rounds` seeds. Raises ValueError when no honest miner is there to compare with."""
    if not any(population.strategy == HONEST for population in economy.miners):
        raise ValueError("an economy needs honest miners: every result is relative to theirs")
    rounds: list[_Round] = []
    for number in range(num_rounds):
        entropy = int.from_bytes(draws.seed_bytes("economy", seed, number)[:16], "little")
        one = _Round(economy, np.random.default_rng(entropy))
        one.run()
        rounds.append(one)
    names = list(dict.fromkeys(population.strategy.name for population in economy.miners))
    spread = [np.array(_relative_pay(one, HONEST.name)) for one in rounds]
    return EconomyReport(
        strategies=tuple(_strategy_pay(rounds, name) for name in names),
        false_convictions=sum(
            machine.num_convictions for one in rounds for machine in one.machines if machine.strategy.cheating == 0.0
        ),
        honest_audits=sum(one.honest_audits for one in rounds),
        honest_variation=float(np.mean([pays.std() for pays in spread])),
        dividends=_dividends(rounds),
    )


def deterrence(audit_probability: float, detection: float, *, window_epochs: int, ban_epochs: int) -> float:
    """Income of an always-cheater over full revenue (trust.md 3): F = (1-pd)(1-(1-pd)^W) / (pdW(1+pdB))."""
    caught = audit_probability * detection
    if caught <= 0.0:
        return 1.0
    free = 1.0 - caught
    return free * (1.0 - free**window_epochs) / (caught * window_epochs * (1.0 + caught * ban_epochs))


def epochs_to_detect(audit_probability: float, detection: float, *, confidence: float = 0.95) -> float:
    """Epochs until an always-cheater is caught with this confidence: ln(1 - confidence) / ln(1 - pd), at least 1."""
    caught = audit_probability * detection
    if caught <= 0.0:
        return math.inf
    return max(1.0, math.log(1.0 - confidence) / math.log(1.0 - caught)) if caught < 1.0 else 1.0


def _honest_pay(one: _Round) -> float:
    """Pay of honest miners for a unit of speed."""
    honest = [machine for machine in one.machines if machine.strategy == HONEST]
    return math.fsum(machine.pay for machine in honest) / math.fsum(machine.speed for machine in honest)


def _relative_pay(one: _Round, name: str, *, is_net: bool = False) -> list[float]:
    """Pay of each machine of a strategy over what an honest one of its speed got."""
    unit = _honest_pay(one)
    price = one.economy.registration_cost * unit / one.economy.num_epochs if is_net else 0.0
    return [
        (machine.pay - price * machine.num_registrations) / (machine.speed * unit) if unit > 0.0 else 0.0
        for machine in one.machines
        if machine.strategy.name == name
    ]


def _strategy_pay(rounds: Sequence[_Round], name: str) -> StrategyPay:
    machines = [machine for one in rounds for machine in one.machines if machine.strategy.name == name]
    pays = np.array([np.mean(_relative_pay(one, name)) for one in rounds])
    caught = sorted(math.inf if machine.convicted_in is None else machine.convicted_in + 1 for machine in machines)
    middle = caught[(len(caught) - 1) // 2]
    strategy = machines[0].strategy
    return StrategyPay(
        name=name,
        pay=float(pays.mean()),
        pay_error=float(1.96 * pays.std(ddof=1) / math.sqrt(len(pays))) if len(pays) > 1 else 0.0,
        net_pay=float(np.mean([np.mean(_relative_pay(one, name, is_net=True)) for one in rounds])),
        cost=1.0 + strategy.cheating * (strategy.cost - 1.0),
        convictions=sum(machine.num_convictions for machine in machines) / len(machines),
        epochs_to_detection=None if math.isinf(middle) else float(middle),
    )


def _dividends(rounds: Sequence[_Round]) -> dict[str, float]:
    validators = rounds[0].economy.validators
    total = np.sum([one.dividends for one in rounds], axis=0)
    by_kind = {
        kind.value: math.fsum(float(total[at]) for at, one in enumerate(validators) if one.kind is kind)
        / math.fsum(one.stake for one in validators if one.kind is kind)
        for kind in ValidatorKind
        if any(one.kind is kind for one in validators)
    }
    unit = by_kind.get(ValidatorKind.HONEST.value, 1.0)
    return {kind: value / unit for kind, value in by_kind.items()}
