"""Updates that come late: committed in time, uploaded when their epoch was over (papers.md B3).

The commitment came before the beacon, so the work is audited like any other, and only its bytes are late. Such an update joins
the first merge of its stage that opens once it is here, through the same gates as those of that epoch, unless more than
`blocktrain.max_staleness` epochs lie between. A pipeline has no such bound: there an upload that is late is left out.
"""

from subnet import wire
from subnet.config import RunConfig, RunKind
from subnet.orchestration import merge
from subnet.orchestration.events import Wake
from subnet.orchestration.ledger import UpdateMergedLate, UploadAccepted
from subnet.orchestration.state import Late, State, Turn
from subnet.types import BlobRef, Hotkey, StageIndex


def max_staleness(config: RunConfig) -> int:
    """Epochs by which an update may be late."""
    return config.blocktrain.max_staleness if config.kind is RunKind.BLOCKTRAIN else 0


def keep(turn: Turn) -> None:
    """An epoch is being published: who committed and is in no merge may still come; who is too late for the next may not."""
    state, current, bound = turn.state, turn.state.current, max_staleness(turn.config)
    for key in [key for key in state.late if key[0] + bound <= current.epoch]:
        del state.late[key]
    if not bound:
        return
    for stage, stage_merge in enumerate(current.merges):
        merged = {upload.hotkey for upload in stage_merge.plan.uploads} if stage_merge.plan else set()
        for hotkey in merge.participants(turn, stage):
            if hotkey not in merged and hotkey not in current.copied:
                state.late[current.epoch, hotkey] = Late(
                    stage=StageIndex(stage),
                    commit=current.commits[hotkey],
                    num_batches=merge.merge_weight(turn, hotkey),
                    ref=current.uploaded.get(hotkey),
                )


def upload_done(turn: Turn, sender: Hotkey, request: wire.UploadDone) -> wire.Response:
    """A committed pseudo-gradient is in the store (the edge has looked): of this epoch, or of an earlier one and still paid."""
    state = turn.state
    late = state.late.get((request.epoch, sender))
    if late is None:
        return merge.upload_done(turn, sender, request)
    if late.ref is None:
        late.ref = merge.upload_ref(state.run_id, sender, late.commit)
        turn.keep(state.epoch, late.ref)
        turn.record(UploadAccepted(epoch=request.epoch, hotkey=sender))
        turn.ask(Wake())
    return wire.Done()


def committed_upload(state: State, hotkey: Hotkey, epoch: int) -> BlobRef | None:
    """Where the upload that `hotkey` committed to in `epoch` must lie; None when none is waited for."""
    if epoch == state.epoch:
        commit = state.current.commits.get(hotkey)
    else:
        commit = next((late.commit for key, late in state.late.items() if key == (epoch, hotkey)), None)
    return merge.upload_ref(state.run_id, hotkey, commit) if commit else None


def take(turn: Turn) -> dict[StageIndex, list[wire.Upload]]:
    """The late updates that are here, for the merges that open now; put on record and waited for no longer."""
    state = turn.state
    taken: dict[StageIndex, list[wire.Upload]] = {}
    for (epoch, hotkey), late in list(state.late.items()):
        if late.ref is None:
            continue
        del state.late[epoch, hotkey]
        if state.members[hotkey].banned_until >= state.epoch:
            continue
        taken.setdefault(late.stage, []).append(
            wire.Upload(
                hotkey=hotkey,
                base_epoch=epoch,
                num_batches=late.num_batches,
                ref=late.ref,
                chunk_digests=late.commit.chunk_digests,
            )
        )
        turn.record(UpdateMergedLate(epoch=state.epoch, base_epoch=epoch, hotkey=hotkey, stage=late.stage))
    return taken
