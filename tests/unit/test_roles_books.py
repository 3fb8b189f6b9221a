"""A miner's books: what is on disk after kill -9 is enough to go on, and to answer a challenge (trust.md 1)."""

import msgspec
import pytest

from neurons.roles.books import (
    ACKS_KEPT,
    EPOCHS_KEPT,
    PROGRESS,
    Attested,
    Books,
    ack_name,
    checkpoint_name,
    evidence_name,
)
from subnet import receipts, wire
from subnet.adapters.memory import MemoryDisk
from subnet.frames import digest
from subnet.types import Direction, Epoch, Hotkey, Receipt, SampleId, StageIndex
from subnet.validation.evidence import decode_evidence

ME = Hotkey("m1")


def books(disk: MemoryDisk, *, run_id: str = "run", stage: int = 1) -> Books:
    return Books(run_id=run_id, hotkey=ME, stage=StageIndex(stage), disk=disk)


def receipt(sample: int, direction: Direction = Direction.FORWARD, payload: bytes = b"in") -> Receipt:
    return Receipt(
        run_id="run",
        epoch=Epoch(0),
        sample=SampleId(sample),
        branch=0,
        stage=StageIndex(1),
        direction=direction,
        params_version=0,
        input_digest=digest(payload),
    )


async def segment(mine: Books, first: int, *, data: bytes) -> None:
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        mine.record(receipt(first, direction, b"%d" % first), Attested.of(b"%d" % first))
    await mine.checkpoint(data, num_steps=len(mine.checkpoints))


async def test_the_newest_acknowledgement_of_each_epoch_is_kept() -> None:
    disk = MemoryDisk()
    mine = books(disk)
    for epoch in (0, 1, ACKS_KEPT):
        await mine.open(Epoch(epoch), b"start")
        for count in (1, 2):
            ack = wire.Ack(epoch=Epoch(epoch), num_receipts=count, head=digest(b"head"), signature="s")
            await mine.keep_ack(ack)
    assert await disk.read(ack_name(Epoch(0))) is None, "a thousand epochs are enough"
    data = await disk.read(ack_name(Epoch(1)))
    assert data is not None
    kept = msgspec.json.decode(data, type=receipts.KeptAck)
    assert (kept.run_id, kept.hotkey, kept.num_receipts, kept.signature) == ("run", ME, 2, "s")
    await mine.forget_ack()
    assert await disk.read(ack_name(Epoch(ACKS_KEPT))) is None


async def test_a_chain_grows_and_is_acknowledged() -> None:
    mine = books(MemoryDisk())
    await mine.open(Epoch(0), b"start")
    assert mine.unacked() is None
    first = receipts.first_head("run", Epoch(0), ME)
    assert mine.head == first
    mine.record(receipt(0), Attested.of(b"in"))
    mine.record(receipt(0, Direction.BACKWARD), Attested.of(b"in"))
    request = mine.unacked()
    assert request is not None
    assert (request.num_before, len(request.receipts), mine.num_batches) == (0, 2, 1)
    assert receipts.extend(first, request.receipts) == request.head == mine.head
    mine.acknowledged(1)
    rest = mine.unacked()
    assert rest is not None and (rest.num_before, rest.receipts) == (1, request.receipts[1:])
    mine.acknowledged(2)
    assert mine.unacked() is None


async def test_a_process_that_was_killed_goes_on_from_its_newest_checkpoint() -> None:
    disk = MemoryDisk()
    mine = books(disk)
    await mine.open(Epoch(0), b"start")
    await segment(mine, 0, data=b"one")
    await segment(mine, 1, data=b"two")
    kept = (mine.head, mine.num_receipts, mine.num_batches, list(mine.checkpoints))
    mine.record(receipt(9), Attested.of(b"lost with the process"))
    again = books(disk)
    progress = await again.progress()
    assert progress is not None and progress.epoch == 0
    assert await again.reopen(progress) == b"two"
    assert (again.head, again.num_receipts, again.num_batches, again.checkpoints) == kept
    request = again.unacked()
    assert request is not None and (request.num_before, len(request.receipts), request.head) == (0, 4, again.head)
    again.acknowledged(4)
    await segment(again, 2, data=b"three")
    assert [place.num_receipts for place in again.checkpoints] == [0, 2, 4, 6]


@pytest.mark.parametrize("missing", [checkpoint_name(Epoch(0), 1), evidence_name(Epoch(0), 0)])
async def test_a_disk_that_lost_a_file_is_no_place_to_go_on_from(missing: str) -> None:
    disk = MemoryDisk()
    mine = books(disk)
    await mine.open(Epoch(0), b"start")
    await segment(mine, 0, data=b"one")
    await disk.delete(missing)
    progress = await books(disk).progress()
    assert progress is not None
    assert await books(disk).reopen(progress) == b""


async def test_a_checkpoint_that_was_damaged_is_no_place_to_go_on_from() -> None:
    disk = MemoryDisk()
    await books(disk).open(Epoch(0), b"start")
    await disk.write(checkpoint_name(Epoch(0), 0), b"other")
    progress = await books(disk).progress()
    assert progress is not None
    assert await books(disk).reopen(progress) == b""


async def test_progress_of_another_run_or_stage_or_none_is_not_ours() -> None:
    disk = MemoryDisk()
    assert await books(disk).progress() is None
    await books(disk).open(Epoch(0), b"start")
    assert await books(disk, run_id="other").progress() is None
    assert await books(disk, stage=2).progress() is None
    await disk.write(PROGRESS, b"{half a fi")
    assert await books(disk).progress() is None


async def test_a_segment_is_presented_with_both_its_ends() -> None:
    disk = MemoryDisk()
    mine = books(disk)
    await mine.open(Epoch(0), b"start")
    await segment(mine, 0, data=b"one")
    await segment(mine, 1, data=b"two")
    files = await mine.segment_files(Epoch(0), 1)
    assert files is not None
    start, end, evidence = files
    assert (start, end) == (b"one", b"two")
    found = decode_evidence(evidence, limit_bytes=len(evidence))
    assert [entry.sample for entry in found.receipts] == [1, 1]
    assert found.payloads == {digest(b"1"): b"1"}
    assert await mine.segment_files(Epoch(0), 2) is None


async def test_old_epochs_are_forgotten_and_recent_ones_kept_for_challenges() -> None:
    disk = MemoryDisk()
    mine = books(disk)
    for epoch in range(EPOCHS_KEPT + 2):
        await mine.open(Epoch(epoch), b"start of %d" % epoch)
        await segment(mine, 0, data=b"end of %d" % epoch)
    kept = [epoch for epoch in range(EPOCHS_KEPT + 2) if await mine.segment_files(Epoch(epoch), 0)]
    assert kept == list(range(2, EPOCHS_KEPT + 2))
    assert msgspec.json.decode(await disk.read(PROGRESS) or b"")["epoch"] == EPOCHS_KEPT + 1
