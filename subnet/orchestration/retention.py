"""How long a run's objects stay in the blob store: the ledger for ever, all else for a few epochs (trust.md 6).

An epoch's objects are deleted as one folder, so that what was uploaded and never reported goes too. Only where something in it
is still in use its known objects go one by one. What is to be deleted stays in the state until it is gone: a crash loses no
deletion, as it loses no other effect.
"""

from subnet import detours
from subnet.orchestration.events import DeleteObjects, ObjectsDeleted
from subnet.orchestration.objects import epoch_folder, folder, folder_of
from subnet.orchestration.state import State, Turn
from subnet.types import Epoch
from subnet.wire import Challenge

EPOCHS_KEPT = 3


def is_kept(state: State, epoch: int) -> bool:
    """Whether objects of an epoch are still of use: it is recent, an audit needs them, or an upload may yet come."""
    return epoch > state.epoch - EPOCHS_KEPT or epoch in _open_epochs(state)


def _open_epochs(state: State) -> set[Epoch]:
    """Epochs that an audit or a late upload holds open."""
    audited = {challenge.epoch for challenge in _open_challenges(state)}
    return audited | {epoch for epoch, _, _ in state.shard_audits} | {epoch for epoch, _ in state.late}


def _open_challenges(state: State) -> list[Challenge]:
    return [case.challenge for case in state.cases.values() if case.outcome is None]


def _needed(state: State) -> set[str]:
    """Snapshots that a stage starts from now, or that an audited epoch began from: an older one may have made them."""
    began = [ref for challenge in _open_challenges(state) for ref in (challenge.anchor, *challenge.neighbours) if ref]
    return {ref.key for ref in (*state.snapshots, *began)}


def delete_old(turn: Turn, ended: Epoch) -> None:
    """Ask for everything to be deleted that is of no use once `ended` is published; the new epoch is the state's already."""
    state = turn.state
    needed = _needed(state)
    old = sorted(epoch for epoch in state.objects if not is_kept(state, epoch))
    dropped = dict.fromkeys(key for epoch in old for key in state.objects.pop(epoch))
    moved = [key for key in dropped if key in needed]
    if moved:
        state.objects.setdefault(state.epoch, []).extend(moved)
    in_use = {folder_of(key) for keys in state.objects.values() for key in keys}
    in_use |= {epoch_folder(state.run_id, epoch=epoch) for epoch in _open_epochs(state)}
    folders = dict.fromkeys(place for key in dropped if (place := folder_of(key)) not in in_use)
    # Frames die with their leases. Those of the epoch before are named again: a granted upload may have come after.
    frames = [folder(state.run_id, epoch=at, kind=detours.KIND) for at in (ended - 1, ended) if at >= 0]
    effect = DeleteObjects(
        epoch=ended,
        keys=tuple(key for key in dropped if key not in needed and folder_of(key) in in_use),
        folders=(*folders, *frames),
    )
    state.deletions[ended] = effect
    turn.ask(effect)


def deleted(turn: Turn, event: ObjectsDeleted) -> None:
    """It is done; a repeat changes nothing."""
    turn.state.deletions.pop(event.epoch, None)
