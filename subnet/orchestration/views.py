"""What each node is told, as a pure function of the state: a node that restarts needs nothing else."""

import msgspec

from subnet import wire
from subnet.errors import Refused
from subnet.frames import digest
from subnet.orchestration.merge import merged_shards
from subnet.orchestration.state import Member, State
from subnet.types import Hotkey, Phase

_MERGE_PHASES = (Phase.COMMITTING, Phase.UPLOADING, Phase.MERGING)


def directive(state: State, hotkey: Hotkey, *, has_frames: bool = False) -> wire.Directive:
    """What `hotkey` should do now; `version` is a digest of the rest. Raises Refused for a stranger.

    Frames that take the detour are no part of the state, so whether any wait is told.
    """
    member = state.members.get(hotkey)
    if hotkey not in state.registered:
        raise Refused("not-registered", f"{hotkey} is not registered on the subnet")
    if member is not None:
        view = _for_miner(state, member)
    elif hotkey in state.auditors:
        view = _for_validator(state, hotkey)
    else:
        raise Refused("not-joined", "join as a miner, or enlist as a validator, first")
    view = msgspec.structs.replace(view, has_frames=has_frames)
    version = int(digest(wire.encode(view))[:12], 16)
    return msgspec.structs.replace(view, version=version)


def _common(state: State) -> wire.Directive:
    return wire.Directive(
        version=0,
        epoch=state.epoch,
        phase=state.phase,
        phase_deadline_s=state.phase_deadline_s,
        sealed_segments=state.ledger.num_segments,
        is_settled=not state.current.open_samples,
    )


def _for_miner(state: State, member: Member) -> wire.Directive:
    current, hotkey = state.current, member.hotkey
    view = _common(state)
    challenges = tuple(
        case.challenge
        for (_, challenged), case in sorted(state.cases.items())
        if challenged == hotkey and case.outcome is None and case.challenge.start is None
    )
    is_in_roster = any(hotkey in stage for stage in current.roster)
    merge = current.merges[member.stage] if state.phase is Phase.MERGING and current.merges else None
    return msgspec.structs.replace(
        view,
        stage=member.stage,
        is_in_roster=is_in_roster,
        snapshot=state.snapshots[member.stage] if state.snapshots else None,
        snapshots=state.neighbour_snapshots(member.stage) if state.snapshots else (),
        has_committed=hotkey in current.commits,
        has_uploaded=hotkey in current.uploaded,
        is_merging=merge is not None and merge.plan is not None,
        merged=merged_shards(merge) if merge else (),
        must_upload_snapshot=bool(merge and hotkey in merge.uploaders),
        challenges=challenges,
        note=_note(state, member, is_in_roster=is_in_roster),
    )


def _note(state: State, member: Member, *, is_in_roster: bool) -> str:
    if member.banned_until >= state.epoch:
        return f"banned until epoch {member.banned_until}: an audit of its work failed"
    if not is_in_roster and state.current.roster:
        return f"waits for epoch {state.epoch + 1}: the roster of epoch {state.epoch} was fixed when it began"
    if state.phase is Phase.GATHERING:
        return "waits for the first epoch: miners are being gathered"
    return ""


def _for_validator(state: State, hotkey: Hotkey) -> wire.Directive:
    challenges = tuple(
        case.challenge
        for _, case in sorted(state.cases.items())
        if case.challenge.start is not None and case.awaits(hotkey)
    )
    mine = [epoch for epoch, found in state.evaluations.items() if found.loss is None and found.validator == hotkey]
    evaluate = min(mine, default=None)
    return msgspec.structs.replace(
        _common(state),
        snapshots=state.evaluations[evaluate].snapshots if evaluate is not None else (),
        challenges=challenges,
        evaluate_epoch=evaluate,
    )


def stage_peers(state: State, hotkey: Hotkey, request: wire.GetPeers) -> wire.StagePeers:
    """Where the miners of a stage are. Not part of a directive: it would be most of it, and few ever need it anew.

    Raises Refused.
    """
    if hotkey not in state.members:
        raise Refused("not-joined", "join first: this orchestrator does not know your key")
    if not 0 <= request.stage < len(state.current.roster):
        raise Refused("stage", f"epoch {state.epoch} has no stage {request.stage} at work")
    live = (state.members[found] for found in state.live_roster(request.stage))
    return wire.StagePeers(
        peers=tuple(wire.StagePeer(hotkey=member.hotkey, endpoint=member.endpoint) for member in live)
    )


def merge_plan(state: State, hotkey: Hotkey, request: wire.GetMergePlan) -> wire.MergePlan:
    """The merge of the caller's stage. Raises Refused when there is none."""
    member = state.members.get(hotkey)
    if member is None:
        raise Refused("not-joined", "join first: this orchestrator does not know your key")
    if request.epoch != state.epoch or state.phase is not Phase.MERGING:
        raise Refused("phase", f"epoch {state.epoch} is in phase {state.phase}")
    plan = state.current.merges[member.stage].plan
    if plan is None:
        raise Refused("merge", "nobody takes part in this stage's merge")
    return plan
