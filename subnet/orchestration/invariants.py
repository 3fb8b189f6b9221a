"""What must hold at every moment, checked in production too (trust.md 8). A breach stops the orchestrator."""

from collections.abc import Iterable

from subnet.config import AuditConfig
from subnet.errors import InvariantBroken
from subnet.lanes import Lanes
from subnet.orchestration.audits import FAILS_TO_CONVICT
from subnet.orchestration.ledger import (
    Absent,
    CaseClosed,
    Credited,
    Entry,
    EpochPublished,
    EpochStarted,
    Leased,
    VerdictRecorded,
    Voided,
)
from subnet.orchestration.state import State
from subnet.types import Hotkey, Outcome, SampleId, Verdict


def check_state(state: State) -> None:
    """One stage a hotkey, no lease in a banned hand, no unit credited twice. Raises InvariantBroken."""
    current = state.current
    _check_roster(current.epoch, current.roster)
    banned = {hotkey for hotkey, member in state.members.items() if member.banned_until >= state.epoch}
    for number in current.open_samples:
        held = banned.intersection(current.samples[number].lease.hops)
        if held:
            raise InvariantBroken(f"epoch {current.epoch}, sample {number}: banned {sorted(held)[0]} holds a lease")
    for hotkey, work in current.work.items():
        for sample in work.credited:
            if hotkey not in current.samples[sample].lease.hops:
                raise InvariantBroken(f"epoch {current.epoch}, sample {sample}: credited to {hotkey} without a lease")


def _check_roster(epoch: int, roster: tuple[tuple[Hotkey, ...], ...]) -> None:
    rostered = [hotkey for stage in roster for hotkey in stage]
    if len(rostered) != len(set(rostered)):
        raise InvariantBroken(f"epoch {epoch}: a hotkey is in two stages")


def check_record(entries: Iterable[Entry], lanes: Lanes) -> None:
    """Over a whole record: leases within the roster, one credit for each unit, each under its lease; epochs in order and
    whole. Raises InvariantBroken.
    """
    rosters: dict[int, tuple[tuple[Hotkey, ...], ...]] = {}
    leases: dict[tuple[int, SampleId], tuple[Hotkey, ...]] = {}
    credited: dict[tuple[int, SampleId, int], Hotkey] = {}
    published = -1
    for entry in entries:
        fact = entry.fact
        match fact:
            case EpochStarted():
                _check_roster(fact.epoch, fact.roster)
                rosters[fact.epoch] = fact.roster
            case Leased():
                _check_lease(entry.seq, fact, rosters.get(fact.epoch, ()), lanes)
                leases[fact.epoch, fact.sample] = fact.hops
            case Credited():
                _check_credit(entry.seq, fact, leases, credited, lanes)
            case Voided():
                _check_void(entry.seq, fact, credited, lanes)
            case EpochPublished():
                if fact.epoch != published + 1 or len(fact.snapshots) != lanes.num_stages:
                    raise InvariantBroken(
                        f"event {entry.seq}: epoch {fact.epoch} follows {published}, or misses a stage"
                    )
                published = fact.epoch
            case _:
                pass


def _check_lease(seq: int, fact: Leased, roster: tuple[tuple[Hotkey, ...], ...], lanes: Lanes) -> None:
    lane = lanes.of_sample(fact.sample)
    stages = roster[lane.start : lane.stop]
    if not len(fact.hops) == len(stages) == len(lane) or any(map(_is_absent, fact.hops, stages)):
        raise InvariantBroken(f"event {seq}: sample {fact.sample} of epoch {fact.epoch} is leased outside the roster")


def _is_absent(hop: Hotkey, stage: tuple[Hotkey, ...]) -> bool:
    return hop not in stage


def _check_credit(
    seq: int,
    fact: Credited,
    leases: dict[tuple[int, SampleId], tuple[Hotkey, ...]],
    credited: dict[tuple[int, SampleId, int], Hotkey],
    lanes: Lanes,
) -> None:
    unit = (fact.epoch, fact.sample, int(fact.stage))
    if unit in credited:
        raise InvariantBroken(f"event {seq}: unit {unit} is credited twice")
    hops, lane = leases.get((fact.epoch, fact.sample)), lanes.of_sample(fact.sample)
    if hops is None or fact.stage not in lane or hops[fact.stage - lane.start] != fact.hotkey:
        raise InvariantBroken(f"event {seq}: unit {unit} is credited without a lease")
    credited[unit] = fact.hotkey


def _check_void(seq: int, fact: Voided, credited: dict[tuple[int, SampleId, int], Hotkey], lanes: Lanes) -> None:
    for sample in fact.samples:
        holders = [credited.get((fact.epoch, sample, stage)) for stage in lanes.of_sample(sample)]
        if fact.hotkey not in holders:
            raise InvariantBroken(f"event {seq}: sample {sample} is voided but was never credited")


class _Cases:
    """What verdicts and absences on record come to, as far as it was read."""

    def __init__(self, audit: AuditConfig) -> None:
        self._audit = audit
        self._verdicts: dict[tuple[int, Hotkey, int], dict[Hotkey, Outcome]] = {}
        self._absent_in: dict[Hotkey, list[int]] = {}
        self._failed_by_absence: dict[tuple[int, Hotkey, int], bool] = {}

    def add_verdict(self, verdict: Verdict) -> None:
        if verdict.validator != verdict.hotkey:  # nobody audits itself
            key = verdict.epoch, verdict.hotkey, verdict.segment
            self._verdicts.setdefault(key, {}).setdefault(verdict.validator, verdict.outcome)

    def add_absence(self, fact: Absent) -> None:
        window = self._audit.absence_window_epochs
        recent = [epoch for epoch in self._absent_in.get(fact.hotkey, []) if epoch > fact.epoch - window]
        self._absent_in[fact.hotkey] = [*recent, int(fact.epoch)]
        is_fail = len(recent) + 1 >= self._audit.absences_to_fail
        self._failed_by_absence[fact.epoch, fact.hotkey, fact.segment] = is_fail

    def follows(self, fact: CaseClosed) -> bool:
        key = fact.epoch, fact.hotkey, fact.segment
        outcomes = list(self._verdicts.get(key, {}).values())
        num_fails, num_passes = outcomes.count(Outcome.FAIL), outcomes.count(Outcome.PASS)
        match Outcome(fact.outcome):
            case Outcome.FAIL:
                return num_fails >= FAILS_TO_CONVICT or self._failed_by_absence.get(key, False)
            case Outcome.PASS:
                return num_passes > num_fails
            case Outcome.INCONCLUSIVE:
                return num_fails < FAILS_TO_CONVICT and num_passes <= num_fails


def check_cases(entries: Iterable[Entry], audit: AuditConfig) -> int:
    """Every audit was closed as its verdicts and absences on record say; returns how many were. Raises InvariantBroken.

    The orchestrator writes down what a case comes to, and is not believed: a ban needs two validators, or absences.
    """
    cases, num_closed = _Cases(audit), 0
    for entry in entries:
        match entry.fact:
            case VerdictRecorded():
                cases.add_verdict(entry.fact.verdict)
            case Absent():
                cases.add_absence(entry.fact)
            case CaseClosed():
                num_closed += 1
                if not cases.follows(entry.fact):
                    raise InvariantBroken(
                        f"event {entry.seq}: the audit of {entry.fact.hotkey} in epoch {entry.fact.epoch} is closed with"
                        f" {entry.fact.outcome}, which its verdicts and absences do not come to"
                    )
            case _:
                pass
    return num_closed


def check_weights(weights: dict[Hotkey, float]) -> None:
    """No NaN, no negative, sum 1 or empty. Raises InvariantBroken."""
    if not all(0.0 <= weight <= 1.0 for weight in weights.values()):
        raise InvariantBroken("a weight is negative, above 1 or not a number")
    if weights and abs(sum(weights[hotkey] for hotkey in sorted(weights)) - 1.0) > 1e-9:
        raise InvariantBroken("weights do not sum to 1")
