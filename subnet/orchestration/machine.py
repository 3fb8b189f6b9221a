"""The orchestrator's state machine: `step(state, event, config) -> effects`, pure but for the state it owns.

Everything it decides follows from the journal of events, so it can be killed at any step, rebuilt, and run in virtual time.
"""

from collections.abc import Callable
from typing import Any, assert_never

from subnet import wire
from subnet.config import RunConfig
from subnet.errors import ProtocolViolation, Refused
from subnet.model.partition import neighbours_of
from subnet.orchestration import (
    audits,
    calibration,
    flags,
    late,
    membership,
    merge,
    merge_trust,
    quorum,
    retention,
    work,
)
from subnet.orchestration.events import (
    Answer,
    AnyEffect,
    AnyEvent,
    AwaitBlock,
    BlockSeen,
    ChainSeen,
    CommitRoot,
    Created,
    HeardFrom,
    ObjectsDeleted,
    OuterRefereed,
    RefereeShard,
    Requested,
    Returned,
    RootIncluded,
    ShardRecomputed,
    ShardRefereed,
    StoreSegment,
    Ticked,
    Wake,
)
from subnet.orchestration.ledger import BeaconSeen, EpochPublished, EpochStarted, RootCommitted, RunCreated
from subnet.orchestration.state import ANSWERS_KEPT, EpochState, State, Turn
from subnet.types import Epoch, Hotkey, Phase, StageIndex

BEACON_DELAY_BLOCKS = 2
"""Blocks after the root's inclusion and its finality before the beacon's block (trust.md 1.4)."""
IDLE_TICK_S = 5.0

_QUIET = (wire.LeaseSamples, wire.PostReceipts, wire.Reroute)
"""Most of all requests, and none that ends a phase; the receipt that completes a miner's epoch says so itself."""


def step(state: State, event: AnyEvent, config: RunConfig) -> list[AnyEffect]:
    """Apply one event. Deterministic: same state and event, same changes and effects. Never raises on a peer's account."""
    turn = Turn(state=state, config=config, now_s=max(event.at_s, state.now_s))
    away_s, state.now_s = turn.now_s - state.now_s, turn.now_s
    turn.may_advance = not _is_quiet(event)
    match event:
        case Requested():
            _requested(turn, event)
        case Ticked():
            _expire(turn)
        case Returned():
            _forgive(turn, away_s)
        case Created():
            _created(turn, event)
        case ChainSeen():
            membership.chain_seen(turn, event)
        case HeardFrom():
            membership.heard_from(turn, event)
        case RootIncluded():
            _root_included(turn, event)
        case BlockSeen():
            _block_seen(turn, event)
        case ShardRefereed() | OuterRefereed() | ShardRecomputed() | ObjectsDeleted():
            _carried_out(turn, event)
        case _:
            assert_never(event)
    _advance(turn)
    return turn.effects


def _is_quiet(event: AnyEvent) -> bool:
    return isinstance(event, Requested) and isinstance(event.request, _QUIET)


def next_tick_s(state: State, config: RunConfig) -> float:
    """When time alone will next change something; the edge then sends Ticked."""
    turn = Turn(state=state, config=config, now_s=state.now_s)
    due = [state.now_s + IDLE_TICK_S, audits.next_due_s(turn)]
    if state.phase in (Phase.TRAINING, Phase.COMMITTING):
        due += [state.current.samples[number].lease.deadline_s for number in state.current.open_samples]
    half = state.phase_since_s + (state.phase_deadline_s - state.phase_since_s) / 2
    due += [moment for moment in (half, state.phase_deadline_s) if moment > state.now_s]
    return min(due)


def outstanding(state: State, config: RunConfig) -> list[AnyEffect]:
    """Effects that a crash may have swallowed after their event was journaled; carrying one out twice is harmless."""
    current, effects = state.current, list[AnyEffect]()
    if state.phase is Phase.COMMITTING and current.commit_root:
        if current.root_at_block < 0:
            effects.append(CommitRoot(epoch=current.epoch, root=current.commit_root))
        else:
            effects.append(_await_beacon(state, current.root_at_block))
    if state.phase is Phase.MERGING:
        turn = Turn(state=state, config=config, now_s=state.now_s)
        for stage_merge in current.merges:
            if stage_merge.plan is None:
                continue
            pending = [shard for shard in stage_merge.referee_asked if shard not in stage_merge.accepted]
            effects += [RefereeShard(plan=stage_merge.plan, shard=shard) for shard in pending]
            if stage_merge.is_outer_refereed and stage_merge.snapshot is None:
                stage_merge.is_outer_refereed = False
                merge.ask_outer_referee(turn, stage_merge)
        effects += turn.effects
    return [*effects, *merge_trust.pending(state), *state.deletions.values()]


def _created(turn: Turn, event: Created) -> None:
    state = turn.state
    state.run_id, state.kind = event.run_id, turn.config.kind
    state.config_json, state.incentives_json = event.config_json, event.incentives_json
    state.corpus_digest, state.snapshots = event.corpus_digest, event.snapshots
    state.num_elements, state.stage_flops = event.num_elements, event.stage_flops
    stages = range(turn.config.training.num_stages)
    state.neighbours = tuple(neighbours_of(turn.config, StageIndex(stage)) for stage in stages)
    state.current = EpochState(epoch=Epoch(0), beacon=event.beacon)
    turn.keep(Epoch(0), *event.snapshots)
    turn.record(
        RunCreated(
            run_id=event.run_id,
            config_json=event.config_json,
            incentives_json=event.incentives_json,
            corpus_digest=event.corpus_digest,
            snapshots=event.snapshots,
            num_elements=event.num_elements,
            stage_flops=event.stage_flops,
            beacon=event.beacon,
        )
    )
    _enter(turn, Phase.GATHERING, turn.config.deadlines.gathering_s)


def _requested(turn: Turn, event: Requested) -> None:
    """Answer a request, or repeat the stored answer of one that was seen before."""
    answers = turn.state.answers.setdefault(event.sender, {})
    response = answers.get(event.request_id)
    if response is None:
        try:
            response = _handle(turn, event.sender, event.request)
        except Refused as error:
            response = wire.ErrorBody(code=error.code, reason=error.reason)
        answers[event.request_id] = response
        if len(answers) > ANSWERS_KEPT:
            del answers[next(iter(answers))]
    turn.ask(Answer(sender=event.sender, request_id=event.request_id, response=response))


def _carried_out(turn: Turn, event: ShardRefereed | OuterRefereed | ShardRecomputed | ObjectsDeleted) -> None:
    match event:
        case ObjectsDeleted():
            retention.deleted(turn, event)
        case ShardRefereed():
            merge.shard_refereed(turn, event)
        case OuterRefereed():
            merge.outer_refereed(turn, event)
        case ShardRecomputed():
            merge_trust.shard_recomputed(turn, event)
        case _:
            assert_never(event)


def _handle(turn: Turn, sender: Hotkey, request: wire.Request) -> wire.Response:
    handler = _HANDLERS.get(type(request))
    if handler is None:
        raise ProtocolViolation(f"{type(request).__name__} changes nothing and is not journaled")
    return handler(turn, sender, request)


_HANDLERS: dict[type, Callable[[Turn, Hotkey, Any], wire.Response]] = {
    wire.Join: membership.join,
    wire.Enlist: membership.enlist,
    wire.Ready: membership.ready,
    wire.Leave: membership.leave,
    wire.Resume: work.resume,
    wire.LeaseSamples: work.lease_samples,
    wire.Reroute: work.reroute,
    wire.PostReceipts: work.post_receipts,
    wire.CommitEpoch: merge.commit_epoch,
    wire.UploadDone: late.upload_done,
    wire.ReportReduced: merge.report_reduced,
    wire.ReportOuter: merge.report_outer,
    wire.SnapshotDone: merge.snapshot_done,
    wire.AnswerChallenge: audits.answer_challenge,
    wire.PostNoise: calibration.post_noise,
    wire.PostVerdict: audits.post_verdict,
    wire.PostFlags: flags.post_flags,
    wire.PostEvaluation: audits.post_evaluation,
    wire.PostScores: audits.post_scores,
}


def _expire(turn: Turn) -> None:
    if turn.state.phase in (Phase.TRAINING, Phase.COMMITTING):
        work.drop_expired(turn)
    audits.expire_cases(turn)
    if turn.state.phase is Phase.MERGING:
        is_late = turn.now_s >= turn.state.phase_since_s + turn.config.deadlines.merging_s / 2
        if is_late:
            merge_trust.note_missing(turn)
        merge.hurry_merges(turn, is_late=is_late)


def _forgive(turn: Turn, away_s: float) -> None:
    """Time in which nobody could reach this orchestrator counts against nobody: what is owed is due later by as much."""
    turn.state.phase_since_s += away_s
    turn.state.phase_deadline_s += away_s
    audits.defer(turn, away_s)


def _advance(turn: Turn) -> None:
    """Leave the phase when what it waits for is complete, or its deadline has passed."""
    if turn.may_advance or quorum.is_late(turn):
        _LEAVING[turn.state.phase](turn)


def _leave_training(turn: Turn) -> None:
    if quorum.training_is_over(turn):
        _enter(turn, Phase.COMMITTING, turn.config.deadlines.committing_s)


def _leave_committing(turn: Turn) -> None:
    if not turn.state.current.commit_root and quorum.commits_are_in(turn):
        merge_trust.note_copies(turn)
        merge.close_commits(turn)


def _leave_uploading(turn: Turn) -> None:
    if _uploads_are_in(turn):
        _enter(turn, Phase.MERGING, turn.config.deadlines.merging_s)
        merge.open_merges(turn, late.take(turn))
        merge.hurry_merges(turn, is_late=False)
        _maybe_publish(turn)


def _leave_merging(turn: Turn) -> None:
    if turn.has_lost_miners:
        merge.hurry_merges(turn, is_late=False)
    _maybe_publish(turn)


def _leave_closing(turn: Turn) -> None:
    if audits.all_closed(turn) and _is_evaluated(turn) and not turn.state.shard_audits:
        _seal(turn)
        _enter(turn, Phase.FINISHED, turn.config.deadlines.gathering_s)


def _stay(turn: Turn) -> None:
    """A finished run only answers."""


def _enter(turn: Turn, phase: Phase, lasts_s: float) -> None:
    state = turn.state
    state.phase, state.phase_since_s, state.phase_deadline_s = phase, turn.now_s, turn.now_s + lasts_s
    turn.ask(Wake())


def _maybe_start_epoch(turn: Turn) -> None:
    roster = quorum.roster(turn)
    if roster:
        current = turn.state.current
        current.roster = roster
        turn.record(EpochStarted(epoch=current.epoch, beacon=current.beacon, roster=roster))
        _enter(turn, Phase.TRAINING, turn.config.deadlines.training_s)


def _root_included(turn: Turn, event: RootIncluded) -> None:
    current = turn.state.current
    if event.epoch != current.epoch or current.root_at_block >= 0 or turn.state.phase is not Phase.COMMITTING:
        return
    current.root_at_block = event.at_block
    turn.record(RootCommitted(epoch=event.epoch, root=current.commit_root, at_block=event.at_block))
    turn.ask(_await_beacon(turn.state, event.at_block))


def _await_beacon(state: State, root_at_block: int) -> AwaitBlock:
    return AwaitBlock(epoch=state.epoch, at_block=root_at_block + BEACON_DELAY_BLOCKS)


def _block_seen(turn: Turn, event: BlockSeen) -> None:
    current = turn.state.current
    if event.epoch != current.epoch or current.next_beacon or turn.state.phase is not Phase.COMMITTING:
        return
    current.next_beacon = event.block_hash
    turn.record(BeaconSeen(epoch=event.epoch, at_block=event.at_block, beacon=event.block_hash))
    audits.draw_audits(turn)
    merge_trust.draw_shard_audits(turn, turn.state.previous, beacon=event.block_hash)
    _enter(turn, Phase.UPLOADING, turn.config.deadlines.uploading_s)


def _uploads_are_in(turn: Turn) -> bool:
    current = turn.state.current
    return quorum.is_late(turn) or all(hotkey in current.uploaded for hotkey in current.commits)


def _maybe_publish(turn: Turn) -> None:
    state, current = turn.state, turn.state.current
    snapshots = [stage_merge.snapshot for stage_merge in current.merges]
    published = tuple(snapshot for snapshot in snapshots if snapshot is not None)
    if len(published) < turn.config.training.num_stages:
        return
    late.keep(turn)
    state.snapshots = published
    takers = tuple(map(merge.merged_in_time, current.merges))
    turn.record(EpochPublished(epoch=current.epoch, snapshots=published, participants=takers))
    audits.draw_evaluator(turn, current.epoch, current.next_beacon)
    state.previous = current.published()
    state.current = EpochState(epoch=Epoch(current.epoch + 1), beacon=current.next_beacon)
    audits.forget_old_cases(turn)
    flags.forget_old_flags(turn)
    retention.delete_old(turn, current.epoch)
    audits.forget_evaluations(turn, before=Epoch(state.epoch - retention.EPOCHS_KEPT + 1))
    num_epochs = turn.config.training.num_epochs
    if num_epochs and state.epoch >= num_epochs:
        # no beacon follows the last epoch; the record's head holds what nobody could foresee, the times of all events
        merge_trust.draw_shard_audits(turn, state.previous, beacon=state.ledger.head)
        _enter(turn, Phase.CLOSING, turn.config.deadlines.challenge_s + 3 * turn.config.deadlines.verdict_s)
        return
    _seal(turn)
    membership.move_to_empty_stages(turn)
    _enter(turn, Phase.PUBLISHED, turn.config.deadlines.ready_s)


def _seal(turn: Turn) -> None:
    turn.ask(StoreSegment(segment=turn.state.ledger.seal()))


def _is_evaluated(turn: Turn) -> bool:
    return quorum.is_late(turn) or all(evaluation.loss is not None for evaluation in turn.state.evaluations.values())


_LEAVING = {
    Phase.GATHERING: _maybe_start_epoch,
    Phase.TRAINING: _leave_training,
    Phase.COMMITTING: _leave_committing,
    Phase.UPLOADING: _leave_uploading,
    Phase.MERGING: _leave_merging,
    Phase.PUBLISHED: _maybe_start_epoch,
    Phase.CLOSING: _leave_closing,
    Phase.FINISHED: _stay,
}
