"""Drawing audits, and what the verdicts of an audit come to (trust.md 1.4 to 1.6, 3).

A case is a segment under audit. Its auditor is drawn from the beacon; a fail needs a second validator's fail to convict, a
split is decided by a third, and validators that do not answer are replaced until none is left. With `audit.mode = "full"`
the segments of a drawn miner's epoch are audited one after the other.
"""

from bisect import bisect_right

import msgspec

from subnet import draws, wire
from subnet.config import AuditConfig, AuditMode
from subnet.errors import Refused
from subnet.orchestration import calibration
from subnet.orchestration.events import Wake
from subnet.orchestration.ledger import (
    Absent,
    Answered,
    CaseClosed,
    Challenged,
    Evaluated,
    ScoresPosted,
    VerdictRecorded,
)
from subnet.orchestration.state import Case, Evaluation, Member, Turn
from subnet.orchestration.work import drop_through
from subnet.types import NO_DIGEST, Direction, Epoch, Hotkey, Outcome

PROBATION_PROBABILITY = 0.5
"""Lowest audit probability of a miner on probation (trust.md 3)."""
FAILS_TO_CONVICT = 2
"""Validators that must find the same segment to fail."""
END_SHARE = 0.25
"""Chance that the last segment of an epoch is drawn outright, and as much for the first: only there does it show whether a
miner uploads what it trained, and whether it trained from what was published."""


def draw_audits(turn: Turn) -> None:
    """Draw, from the epoch's beacon, who is audited on which segment and by whom."""
    current = turn.state.current
    for hotkey, commit in sorted(current.commits.items()):
        member = turn.state.members[hotkey]
        num_segments = len(commit.checkpoints) - 1
        if num_segments < 1 or not _is_drawn(turn, member):
            continue
        auditor = _next_validator(turn, hotkey, current.next_beacon, asked=[])
        if auditor is None:
            continue
        if turn.config.audit.mode is AuditMode.FULL:
            segments = range(num_segments)
        else:
            drawn = _drawn_segment(turn, hotkey, commit)
            segments = range(drawn, drawn + 1)
        _open(turn, tuple(_challenge(turn, member, commit, segment) for segment in segments), auditor)
    turn.ask(Wake())


def _challenge(turn: Turn, member: Member, commit: wire.CommitEpoch, segment: int) -> wire.Challenge:
    is_last = segment == len(commit.checkpoints) - 2
    return wire.Challenge(
        epoch=turn.state.epoch,
        hotkey=member.hotkey,
        stage=member.stage,
        segment=segment,
        start_checkpoint=commit.checkpoints[segment],
        end_checkpoint=commit.checkpoints[segment + 1],
        deadline_s=0.0,
        mode=member.mode,
        anchor=turn.state.snapshots[member.stage],
        neighbours=turn.state.neighbour_snapshots(member.stage),
        upload_digest=commit.upload_digest if is_last else NO_DIGEST,
    )


def _open(turn: Turn, challenges: tuple[wire.Challenge, ...], auditor: Hotkey) -> None:
    """Challenge the first; the others wait for it to pass."""
    first, *rest = challenges
    first = msgspec.structs.replace(
        first,
        deadline_s=turn.now_s + turn.config.deadlines.challenge_s,
        max_rel_d=calibration.max_rel_d(turn),
    )
    turn.state.cases[first.epoch, first.hotkey] = Case(
        challenge=first, asked=[auditor], due_s=first.deadline_s, rest=tuple(rest)
    )
    turn.record(
        Challenged(
            epoch=first.epoch,
            hotkey=first.hotkey,
            stage=first.stage,
            segment=first.segment,
            auditor=auditor,
            mode=first.mode,
            max_rel_d=first.max_rel_d,
        )
    )


def _drawn_segment(turn: Turn, hotkey: Hotkey, commit: wire.CommitEpoch) -> int:
    """The segment of a drawn unit of paid work, or one of the epoch's ends.

    Drawn over units, so that a chain padded with segments of no work hides nothing.
    """
    current, num_segments = turn.state.current, len(commit.checkpoints) - 1
    seed = (current.next_beacon, "segment", current.epoch, hotkey)
    work = current.work.get(hotkey)
    end = draws.uniform(*seed, "end")
    if work is None or not work.credited or end < END_SHARE:
        return num_segments - 1
    if end < 2 * END_SHARE:
        return 0
    sample = list(work.credited)[draws.below(len(work.credited), *seed)]
    place = next(
        place
        for place, receipt in enumerate(work.receipts)
        if receipt.sample == sample and receipt.direction is Direction.BACKWARD
    )
    starts = [checkpoint.num_receipts for checkpoint in commit.checkpoints]
    return min(bisect_right(starts, place), num_segments) - 1


def _is_drawn(turn: Turn, member: Member) -> bool:
    current = turn.state.current
    probability = audit_probability(
        turn.config.audit,
        epochs_credited=member.epochs_credited,
        is_flagged=member.flagged_until >= current.epoch,
    )
    return is_drawn(member.hotkey, probability, beacon=current.next_beacon, epoch=current.epoch)


def audit_probability(audit: AuditConfig, *, epochs_credited: int, is_flagged: bool) -> float:
    """Chance that a miner is audited: certain when it is flagged, higher on probation (trust.md 3, 4)."""
    if is_flagged:
        return 1.0
    is_on_probation = epochs_credited <= audit.probation_epochs
    return max(audit.probability, PROBATION_PROBABILITY) if is_on_probation else audit.probability


def is_drawn(hotkey: Hotkey, probability: float, *, beacon: str, epoch: Epoch) -> bool:
    """Whether the beacon draws a miner for audit; anyone can repeat it."""
    return draws.uniform(beacon, "audit", epoch, hotkey) < probability


def _next_validator(turn: Turn, hotkey: Hotkey, beacon: str, *, asked: list[Hotkey]) -> Hotkey | None:
    """Drawn among those not asked yet; one that is not live comes only when no other is left, a noisy one never."""
    limit = calibration.max_rel_d(turn)
    able = [validator for validator in turn.state.validators if calibration.may_audit(turn.state, validator, limit)]
    left = [validator for validator in able if validator != hotkey and validator not in asked]
    order = draws.shuffled(left, beacon, "auditor", hotkey)
    live = [validator for validator in order if turn.state.auditors[validator]]
    return next(iter([*live, *order]), None)


def answer_challenge(turn: Turn, sender: Hotkey, request: wire.AnswerChallenge) -> wire.Response:
    """A challenged miner presented its segment. Raises Refused when it is not the one asked for, or too late."""
    case = turn.state.cases.get((request.epoch, sender))
    if case is None or case.challenge.segment != request.segment or case.outcome is not None:
        raise Refused(
            "challenge", f"no challenge of segment {request.segment} of epoch {request.epoch} is open for you"
        )
    if case.challenge.start is not None:
        return wire.Done()
    expected = (case.challenge.start_checkpoint.digest, case.challenge.end_checkpoint.digest)
    if (request.start.digest, request.end.digest) != expected:
        raise Refused("challenge", "the checkpoints presented are not the ones committed")
    case.challenge = msgspec.structs.replace(
        case.challenge, start=request.start, end=request.end, evidence=request.evidence
    )
    case.due_s = turn.now_s + turn.config.deadlines.verdict_s
    turn.keep(request.epoch, request.start, request.end, request.evidence)
    turn.record(
        Answered(
            epoch=request.epoch,
            hotkey=sender,
            segment=request.segment,
            start=request.start,
            end=request.end,
            evidence=request.evidence,
        )
    )
    turn.ask(Wake())
    return wire.Done()


def post_verdict(turn: Turn, sender: Hotkey, request: wire.PostVerdict) -> wire.Response:
    """Record a verdict (its signature was checked at the edge) and see what the case comes to."""
    verdict = request.verdict
    case = turn.state.cases.get((verdict.epoch, verdict.hotkey))
    if verdict.validator != sender or verdict.run_id != turn.state.run_id:
        raise Refused("verdict", "a verdict is posted by the validator that signed it, for this run")
    if case is None or case.challenge.segment != verdict.segment:
        raise Refused("verdict", f"segment {verdict.segment} of epoch {verdict.epoch} of this miner is not under audit")
    if sender in [known.validator for known in case.verdicts]:
        return wire.Done()
    if case.outcome is not None or sender not in case.asked:
        raise Refused("verdict", "other validators were drawn for this audit, or it is closed")
    case.verdicts.append(verdict)
    turn.record(VerdictRecorded(verdict=verdict))
    _settle(turn, case)
    turn.ask(Wake())
    return wire.Done()


def _settle(turn: Turn, case: Case) -> None:
    outcomes = [verdict.outcome for verdict in case.verdicts]
    num_fails, num_passes = outcomes.count(Outcome.FAIL), outcomes.count(Outcome.PASS)
    if num_fails >= FAILS_TO_CONVICT:
        _close(turn, case, Outcome.FAIL)
    elif num_passes > num_fails:
        _close(turn, case, Outcome.PASS)
    else:
        _ask_another(turn, case)


def _ask_another(turn: Turn, case: Case) -> None:
    challenge = case.challenge
    validator = _next_validator(turn, challenge.hotkey, f"{challenge.epoch}", asked=case.asked)
    if validator is None:
        _close(turn, case, Outcome.INCONCLUSIVE)
        return
    case.asked.append(validator)
    case.due_s = turn.now_s + turn.config.deadlines.verdict_s


def _close(turn: Turn, case: Case, outcome: Outcome) -> None:
    state, challenge = turn.state, case.challenge
    case.outcome = outcome
    member = state.members[challenge.hotkey]
    banned_until = Epoch(-1)
    if outcome is Outcome.FAIL:
        banned_until = Epoch(state.epoch + turn.config.audit.ban_epochs)
        member.banned_until = banned_until
        drop_through(turn, challenge.hotkey)
    turn.record(
        CaseClosed(
            epoch=challenge.epoch,
            hotkey=challenge.hotkey,
            segment=challenge.segment,
            outcome=outcome,
            banned_until=banned_until,
            at_epoch=state.epoch,
        )
    )
    if outcome is Outcome.PASS and case.rest:
        _open(turn, case.rest, case.asked[0])
    turn.ask(Wake())


def expire_cases(turn: Turn) -> None:
    """Miners that presented nothing are absent; validators that did not answer are replaced."""
    for case in [case for case in turn.state.cases.values() if case.outcome is None and case.due_s <= turn.now_s]:
        if case.challenge.start is None:
            _absent(turn, case)
        else:
            _ask_another(turn, case)
        turn.ask(Wake())


def _absent(turn: Turn, case: Case) -> None:
    """First absence voids the epoch, a further one within the window is a fail."""
    audit, challenge = turn.config.audit, case.challenge
    member = turn.state.members[challenge.hotkey]
    turn.record(Absent(epoch=challenge.epoch, hotkey=challenge.hotkey, segment=challenge.segment))
    recent = [epoch for epoch in member.absences if epoch > challenge.epoch - audit.absence_window_epochs]
    member.absences = [*recent, int(challenge.epoch)]
    is_fail = len(member.absences) >= audit.absences_to_fail
    _close(turn, case, Outcome.FAIL if is_fail else Outcome.INCONCLUSIVE)


def defer(turn: Turn, seconds: float) -> None:
    """Open cases are due later: the orchestrator was away."""
    for case in turn.state.cases.values():
        if case.outcome is None:
            case.due_s += seconds


def next_due_s(turn: Turn) -> float:
    """When the next open case runs out, or infinity."""
    return min((case.due_s for case in turn.state.cases.values() if case.outcome is None), default=float("inf"))


def all_closed(turn: Turn) -> bool:
    """Whether no audit is open."""
    return all(case.outcome is not None for case in turn.state.cases.values())


def forget_old_cases(turn: Turn) -> None:
    """Closed cases older than the previous epoch are in the ledger; they need no place here."""
    cases = turn.state.cases
    for key in [key for key, case in cases.items() if case.outcome is not None and key[0] < turn.state.epoch - 1]:
        del cases[key]


def draw_evaluator(turn: Turn, epoch: Epoch, beacon: str) -> None:
    """One validator, drawn, measures the held-out loss of a published epoch."""
    live = turn.state.live_validators
    if live:
        validator = draws.chosen(live, 1, beacon, "evaluator", epoch)[0]
        turn.state.evaluations[epoch] = Evaluation(validator=validator, snapshots=turn.state.snapshots)


def forget_evaluations(turn: Turn, *, before: Epoch) -> None:
    """Whose loss was not measured while its snapshots were there has none: the drawn validator would ask for them for ever."""
    evaluations = turn.state.evaluations
    for epoch in [epoch for epoch, found in evaluations.items() if epoch < before and found.loss is None]:
        del evaluations[epoch]


def post_evaluation(turn: Turn, sender: Hotkey, request: wire.PostEvaluation) -> wire.Response:
    """Record a held-out loss. Raises Refused when the sender was not drawn for it."""
    evaluation = turn.state.evaluations.get(request.epoch)
    if evaluation is None or evaluation.validator != sender:
        raise Refused("evaluation", f"another validator was drawn to evaluate epoch {request.epoch}")
    if evaluation.loss is None:
        evaluation.loss, evaluation.loss_wires_zeroed = request.loss, request.loss_wires_zeroed
        evaluation.snapshots = ()  # nobody loads them any more, and the losses of all epochs stay in the state
        turn.record(
            Evaluated(
                epoch=request.epoch,
                validator=sender,
                loss=request.loss,
                loss_wires_zeroed=request.loss_wires_zeroed,
            )
        )
        turn.ask(Wake())
    return wire.Done()


def post_scores(turn: Turn, sender: Hotkey, request: wire.PostScores) -> wire.Response:
    """Record what a validator computed from a sealed segment, so that anyone can compare."""
    if sender not in turn.state.validators:
        raise Refused("permit", "only a permit holder posts scores")
    if not 0 <= request.segment < turn.state.ledger.num_segments:
        raise Refused("segment", f"segment {request.segment} is not sealed")
    known = turn.state.posted.get(sender)
    if known is None or known.segment < request.segment:
        turn.state.posted[sender] = request
        turn.record(
            ScoresPosted(
                validator=sender,
                segment=request.segment,
                ledger_head=request.ledger_head,
                scores=request.scores,
                weights=request.weights,
            )
        )
    return wire.Done()
