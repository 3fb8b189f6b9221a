"""Flags of validators: samples through a miner lose more than chance explains, so its audits become certain (trust.md 3, 4).

A flag punishes nobody. What it is computed from is in the record, so a false one can be shown to be one.
"""

from subnet import wire
from subnet.errors import Refused
from subnet.orchestration.events import Wake
from subnet.orchestration.ledger import Flagged
from subnet.orchestration.state import Turn
from subnet.types import Hotkey, LossFlag


def post_flags(turn: Turn, sender: Hotkey, request: wire.PostFlags) -> wire.Response:
    """Record flags (signatures were checked at the edge); a repeated one changes nothing. Raises Refused."""
    if sender not in turn.state.validators:
        raise Refused("permit", "only a permit holder that enlisted posts flags")
    for flag in request.flags:
        _check(turn, sender, flag)
    for flag in request.flags:
        _take(turn, flag)
    turn.ask(Wake())
    return wire.Done()


def _check(turn: Turn, sender: Hotkey, flag: LossFlag) -> None:
    state = turn.state
    if flag.validator != sender or flag.run_id != state.run_id:
        raise Refused("flag", "a flag is posted by the validator that signed it, for this run")
    if flag.hotkey not in state.members:
        raise Refused("flag", f"{flag.hotkey} is no miner of this run")
    if not state.epoch - turn.config.audit.flag_epochs <= flag.epoch < state.epoch:
        raise Refused("flag", f"epoch {flag.epoch} is not published, or too long ago to matter")


def _take(turn: Turn, flag: LossFlag) -> None:
    key = (flag.epoch, flag.hotkey, flag.validator)
    if key in turn.state.flags:
        return
    member = turn.state.members[flag.hotkey]
    member.flagged_until = max(member.flagged_until, flag.epoch + turn.config.audit.flag_epochs)
    turn.state.flags[key] = flag
    turn.record(Flagged(flag=flag))


def forget_old_flags(turn: Turn) -> None:
    """Flags that raise no odds any more are in the ledger; they need no place here."""
    flags = turn.state.flags
    for key in [key for key in flags if key[0] < turn.state.epoch - turn.config.audit.flag_epochs]:
        del flags[key]
