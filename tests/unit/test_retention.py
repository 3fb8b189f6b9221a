"""What stays in the blob store and what goes, and that no crash keeps anything there for ever."""

from subnet.orchestration import machine, retention
from subnet.orchestration.events import DeleteObjects, ObjectsDeleted
from subnet.orchestration.objects import folder, object_key
from subnet.orchestration.retention import EPOCHS_KEPT
from subnet.orchestration.state import EpochState, Late, State, Turn
from subnet.types import BlobRef, Epoch, Hotkey, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, RUN, Run, content
from tests.unit.test_machine import ENDLESS, close_cases, whole_epoch

MINER = MINERS[0]


def ref(epoch: int, kind: str) -> BlobRef:
    found = content(epoch, kind)
    key = object_key(RUN, epoch=epoch, hotkey=MINER, kind=kind, name="n", content=found)
    return BlobRef(key=key, digest=found, size_bytes=8)


def frames(*epochs: int) -> tuple[str, ...]:
    return tuple(folder(RUN, epoch=epoch, kind="frame") for epoch in epochs)


def published(*snapshots: BlobRef, objects: dict[int, list[BlobRef]]) -> Turn:
    """The turn in which the last epoch but one of those that are kept is published."""
    listed = {Epoch(epoch): [ref.key for ref in refs] for epoch, refs in objects.items()}
    current = EpochState(epoch=Epoch(EPOCHS_KEPT))
    return Turn(state=State(run_id=RUN, current=current, snapshots=snapshots, objects=listed), config=CONFIG, now_s=0.0)


def asked(turn: Turn) -> DeleteObjects:
    retention.delete_old(turn, Epoch(turn.state.epoch - 1))
    (effect,) = turn.effects
    assert isinstance(effect, DeleteObjects) and machine.outstanding(turn.state, CONFIG) == [effect]
    return effect


def test_an_old_epoch_goes_with_all_that_was_uploaded_and_never_reported() -> None:
    turn = published(objects={0: [ref(0, "upload")], 1: [ref(1, "upload")]})
    effect = asked(turn)
    assert (effect.keys, effect.folders) == ((), (f"runs/{RUN}/e0", *frames(1, 2)))
    assert list(turn.state.objects) == [1]


def test_where_something_is_still_in_use_the_rest_goes_one_by_one() -> None:
    """A stage that nobody merged starts from an old snapshot; what convicted somebody is kept with the epoch that found it."""
    snapshot, evidence, upload = ref(0, "snapshot"), ref(0, "shard"), ref(0, "upload")
    turn = published(snapshot, objects={0: [snapshot, evidence, upload], 2: [evidence]})
    effect = asked(turn)
    assert effect.folders == frames(1, 2)
    assert snapshot.key not in effect.keys and upload.key in effect.keys
    assert turn.state.objects == {2: [evidence.key], EPOCHS_KEPT: [snapshot.key]}


def test_an_epoch_is_kept_while_an_upload_of_it_may_come() -> None:
    run = Run()
    run.begin(*MINERS)
    turn = published(objects={0: [ref(0, "upload")], 1: []})
    commit = run.commitment(MINER)
    turn.state.late[Epoch(0), Hotkey(MINER)] = Late(stage=StageIndex(0), commit=commit, num_batches=1, ref=None)
    effect = asked(turn)
    assert (effect.keys, effect.folders) == ((), frames(1, 2)) and retention.is_kept(turn.state, 0)


def test_a_run_that_goes_on_keeps_a_few_epochs_and_what_open_audits_need() -> None:
    """An audited epoch's own objects, and the snapshots that it began from, which the epoch before made."""
    run = Run(config=ENDLESS)
    run.begin(*MINERS)
    whole_epoch(run)
    run.ready(*MINERS)
    close_cases(run)
    for _ in range(EPOCHS_KEPT):
        whole_epoch(run)
        run.ready(*MINERS)
    assert {epoch for (epoch, _), case in run.state.cases.items() if case.outcome is None} == {1, 2, 3}
    began = {case.challenge.anchor.key for case in run.state.cases.values() if case.challenge.anchor is not None}
    assert began <= {key for keys in run.state.objects.values() for key in keys}
    assert sorted(run.state.objects) == [1, 2, 3] and f"runs/{RUN}/e0" in run.deleted_folders
    close_cases(run)
    whole_epoch(run)
    assert sorted(run.state.objects) == [3, 4] and f"runs/{RUN}/e2" in run.deleted_folders
    gone = {*run.deleted, *run.deleted_folders}
    assert began & gone and not gone & {snapshot.key for snapshot in run.state.snapshots}


def test_a_deletion_is_asked_for_until_it_is_done() -> None:
    run = Run(config=ENDLESS)
    run.begin(*MINERS)
    whole_epoch(run)
    (effect,) = [effect for effect in machine.outstanding(run.state, ENDLESS) if isinstance(effect, DeleteObjects)]
    for _ in range(2):
        run.feed(ObjectsDeleted(at_s=run.now_s, epoch=effect.epoch))
        assert not run.state.deletions and effect not in machine.outstanding(run.state, ENDLESS)
