"""Joining, staying and leaving: who holds which stage (system.md 3, users.md 3, 5, 9)."""

from subnet import wire
from subnet.errors import Refused
from subnet.orchestration.events import ChainSeen, HeardFrom, Wake
from subnet.orchestration.ledger import Assigned, Enlisted
from subnet.orchestration.state import Member, Turn
from subnet.types import Epoch, Hotkey, Phase, StageIndex

WAITING = (Phase.GATHERING, Phase.PUBLISHED)
"""Phases in which a miner that becomes ready is still in time for the epoch about to start."""


def emptiest_stage(turn: Turn) -> StageIndex:
    """Where the next joiner goes: the stage with the fewest live miners, the later one on a tie (it works hardest)."""
    epoch, num_live = turn.state.epoch, [0] * turn.config.training.num_stages
    for member in turn.state.members.values():
        num_live[member.stage] += member.is_live and member.banned_until < epoch
    return StageIndex(min(range(len(num_live)), key=lambda stage: (num_live[stage], -stage)))


def join(turn: Turn, sender: Hotkey, request: wire.Join) -> wire.Response:
    """Give a miner a stage, or the one it already has. Raises Refused with the rule that stands against it."""
    state = turn.state
    _check_may_join(turn, sender, request)
    member = state.members.get(sender)
    if member is None:
        member = _new_member(turn, sender, request)
    else:
        _rejoin(turn, member, request)
    turn.ask(Wake())
    if member.banned_until >= state.epoch:
        note = f"banned until epoch {member.banned_until}: an audit of its work failed"
    elif member.first_epoch > state.epoch:
        note = f"waits for epoch {member.first_epoch}; epoch {state.epoch} is in phase {state.phase}"
    else:
        note = f"works in epoch {state.epoch}"
    return wire.Joined(stage=member.stage, first_epoch=member.first_epoch, note=note)


def _check_may_join(turn: Turn, sender: Hotkey, request: wire.Join) -> None:
    state, modes = turn.state, turn.config.training.modes
    check_protocol(request.protocol_version)
    if sender in state.auditors:
        raise Refused("role", f"{sender} is a validator of this run; a key has one role")
    if sender not in state.registered:
        raise Refused(
            "not-registered", f"{sender} is not registered on the subnet: btcli subnet register, then start again"
        )
    if request.mode not in modes:
        raise Refused("mode", f"numeric mode {request.mode} is not allowed; start with one of {', '.join(modes)}")


def check_protocol(version: int) -> None:
    """Refuse another protocol version, saying which side to update."""
    if version != wire.PROTOCOL_VERSION:
        older = "your node" if version < wire.PROTOCOL_VERSION else "this run's orchestrator"
        reason = f"protocol {version} here, {wire.PROTOCOL_VERSION} at the orchestrator: update {older}"
        raise Refused("protocol-version", reason)


def _new_member(turn: Turn, sender: Hotkey, request: wire.Join) -> Member:
    state = turn.state
    stage = emptiest_stage(turn)
    first_epoch = state.epoch if state.phase in WAITING else Epoch(state.epoch + 1)
    member = Member(
        hotkey=sender,
        stage=stage,
        endpoint=request.endpoint,
        mode=request.mode,
        session=request.session,
        first_epoch=first_epoch,
    )
    state.members[sender] = member
    turn.record(Assigned(hotkey=sender, stage=stage, first_epoch=first_epoch))
    return member


def _rejoin(turn: Turn, member: Member, request: wire.Join) -> None:
    """A process that is back: same stage, new endpoint; a ban outlives the process."""
    if request.session != member.session:
        member.ready_epoch = -1
    member.session, member.endpoint, member.mode, member.is_live = request.session, request.endpoint, request.mode, True
    if member.ready_epoch < turn.state.epoch and member.hotkey not in turn.state.current.work:
        member.first_epoch = turn.state.epoch if turn.state.phase in WAITING else Epoch(turn.state.epoch + 1)


def enlist(turn: Turn, sender: Hotkey, request: wire.Enlist) -> wire.Response:
    """Take a validator on. Raises Refused without a permit, or when the key mines in this run."""
    state = turn.state
    check_protocol(request.protocol_version)
    if sender not in state.permits:
        raise Refused(
            "permit", f"{sender} holds no validator permit; it comes with enough stake, at the chain's next epoch"
        )
    if sender in state.members:
        raise Refused("role", f"{sender} is a miner of this run; a key has one role")
    if sender not in state.auditors:
        turn.record(Enlisted(validator=sender))
    state.auditors[sender] = True
    turn.ask(Wake())
    return wire.Done()


def ready(turn: Turn, sender: Hotkey, request: wire.Ready) -> wire.Response:
    """A miner holds the params the epoch starts from. Raises Refused when they are not those."""
    state = turn.state
    member = member_of(turn, sender)
    if request.epoch != state.epoch:
        raise Refused("epoch", f"epoch {state.epoch} is being worked on, not {request.epoch}")
    if request.anchor != state.snapshots[member.stage].digest:
        raise Refused("anchor", f"stage {member.stage} starts epoch {state.epoch} from another snapshot: load it again")
    member.ready_epoch = request.epoch
    turn.ask(Wake())
    return wire.Done()


def leave(turn: Turn, sender: Hotkey, request: wire.Leave) -> wire.Response:
    """A miner stops; its stage goes on without it, its credit of this epoch stands once its upload is in."""
    member = member_of(turn, sender)
    if request.session == member.session:
        member.is_live = False
        member.ready_epoch = -1
        turn.has_lost_miners = True
        turn.ask(Wake())
    return wire.Done()


def heard_from(turn: Turn, event: HeardFrom) -> None:
    """A silent miner is routed around, never deregistered; one that is back takes part again."""
    state = turn.state
    if event.hotkey in state.auditors:
        state.auditors[event.hotkey] = event.is_live
    member = state.members.get(event.hotkey)
    if member is not None and member.is_live != event.is_live:
        member.is_live = event.is_live
        turn.has_lost_miners = not event.is_live
        turn.ask(Wake())


def chain_seen(turn: Turn, event: ChainSeen) -> None:
    """Registrations changed: who lost the key, or holds it by a later registration, is a member no more."""
    state = turn.state
    registered = dict(event.registered)
    for hotkey in sorted(state.members):
        if registered.get(hotkey) != state.registered.get(hotkey):
            state.members[hotkey].is_live = False
            turn.has_lost_miners = True
    state.registered = registered
    state.permits = event.permits
    turn.ask(Wake())


def member_of(turn: Turn, sender: Hotkey) -> Member:
    """The member behind a request. Raises Refused when it has not joined."""
    member = turn.state.members.get(sender)
    if member is None:
        raise Refused("not-joined", "join first: this orchestrator does not know your key")
    return member


def move_to_empty_stages(turn: Turn) -> None:
    """At an epoch's boundary a stage without live miners gets one from the fullest; otherwise nobody moves."""
    state, num_stages = turn.state, turn.config.training.num_stages
    for stage in range(num_stages):
        if state.live_members(stage):
            continue
        fullest = max(range(num_stages), key=lambda other: (len(state.live_members(other)), -other))
        spare = state.live_members(fullest)
        if len(spare) < 2:
            continue
        member = state.members[spare[-1]]
        member.stage, member.ready_epoch, member.first_epoch = StageIndex(stage), -1, state.epoch
        turn.record(Assigned(hotkey=member.hotkey, stage=member.stage, first_epoch=state.epoch))
