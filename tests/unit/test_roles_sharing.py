"""A miner's transfers: what it asks of the desk, what it checks, and what it tells about uploads that it could not use."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from neurons.roles.books import Books
from neurons.roles.desk import Desk
from neurons.roles.sharing import Sharing
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import InlineCompute, MemoryBlobs, MemoryBlobStore, MemoryDisk
from subnet.adapters.system import SystemClock
from subnet.errors import NotFound, ProtocolViolation
from subnet.frames import digest
from subnet.merging.schedule import shard_plans
from subnet.merging.upload import chunk_digests, to_bytes
from subnet.types import NO_DIGEST, BlobRef, Checkpoint, Epoch, Hotkey, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, Run

ME, OTHER = MINERS[0], MINERS[1]
ELEMENTS = 64
CHUNK_BYTES = CONFIG.merge.chunk_bytes


@dataclass
class AtTheDesk:
    """Control that asks the real desk for grants and keeps every other request."""

    desk: Desk
    told: list[wire.Request] = field(default_factory=list)
    answer: wire.Response | None = None

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        if self.answer is not None:
            return self.answer
        match request:
            case wire.RequestUpload():
                return self.desk.grant_upload(ME, request)
            case wire.RequestDownload():
                return self.desk.grant_download(ME, request)
            case _:
                self.told.append(request)
                return wire.Done()


@pytest.fixture
def store() -> MemoryBlobStore:
    return MemoryBlobStore(SystemClock())


@pytest.fixture
def control(store: MemoryBlobStore) -> AtTheDesk:
    run = Run()
    run.begin(*MINERS)
    signer = KeypairSigner.from_uri("//owner", deterministic=True)
    return AtTheDesk(Desk(state=lambda: run.state, signer=signer, blobs=store, clock=SystemClock()))


@pytest.fixture
def sharing(control: AtTheDesk, store: MemoryBlobStore) -> Sharing:
    return Sharing(config=CONFIG, control=control, blobs=MemoryBlobs(store), compute=InlineCompute(), hotkey=ME)


async def test_an_object_comes_back_as_it_was_stored(sharing: Sharing) -> None:
    ref = await sharing.put("upload", epoch=Epoch(0), name="whole", data=b"what was learned")
    assert await sharing.get("snapshot", ref) == b"what was learned"


async def test_an_object_that_is_missing_or_not_the_announced_one_is_never_used(
    sharing: Sharing, store: MemoryBlobStore
) -> None:
    """What cannot be had is reported as that; it is not replaced by what can (users.md 18)."""
    ref = await sharing.put("upload", epoch=Epoch(0), name="whole", data=b"what was learned")
    await store.put(ref.key, b"something other!")
    with pytest.raises(ProtocolViolation, match="is not the one announced"):
        await sharing.get("snapshot", ref)
    await store.put(ref.key, b"short")
    with pytest.raises(ProtocolViolation, match="is not the one announced"):
        await sharing.get("snapshot", ref)
    await store.delete(ref.key)
    with pytest.raises(NotFound):
        await sharing.get("snapshot", ref)


async def test_answers_that_do_not_fit_the_question_are_named(sharing: Sharing, control: AtTheDesk) -> None:
    control.answer = wire.Done()
    with pytest.raises(ProtocolViolation, match="asked for an upload grant, got Done"):
        await sharing.put("upload", epoch=Epoch(0), name="whole", data=b"x")
    control.answer = wire.DownloadGrant(urls=())
    with pytest.raises(ProtocolViolation, match="one URL for each key"):
        await sharing.urls([BlobRef(key="runs/r/x", digest=digest(b"x"), size_bytes=1)])


def vectors_of(*values: tuple[Hotkey, float]) -> dict[Hotkey, bytes]:
    return {hotkey: to_bytes(np.full(ELEMENTS, value, np.float32)) for hotkey, value in values}


def as_it_is(data: bytes) -> bytes:
    return data


def turned(data: bytes) -> bytes:
    return data[::-1]


def cut(data: bytes) -> bytes:
    return data[:-4]


async def merge_of(
    store: MemoryBlobStore, vectors: dict[Hotkey, bytes], *, spoil: Callable[[bytes], bytes] = as_it_is
) -> wire.MergePlan:
    """A plan in which the upload of OTHER lies in the store as `spoil` makes it."""
    uploads = []
    for hotkey, data in vectors.items():
        ref = BlobRef(
            key=f"runs/run-1/e0/upload/{hotkey}/whole-{digest(data)}", digest=digest(data), size_bytes=len(data)
        )
        await store.put(ref.key, spoil(data) if hotkey == OTHER else data)
        digests = chunk_digests(data, CHUNK_BYTES)
        uploads.append(wire.Upload(hotkey=hotkey, num_batches=2, base_epoch=Epoch(0), ref=ref, chunk_digests=digests))
    shards = shard_plans(
        ELEMENTS, list(vectors), beacon="b", stage=StageIndex(0), epoch=Epoch(0), chunk_bytes=CHUNK_BYTES
    )
    return wire.MergePlan(
        epoch=Epoch(0), stage=StageIndex(0), num_elements=ELEMENTS, uploads=tuple(uploads), shards=shards
    )


@pytest.mark.parametrize(("spoil", "left_out"), [(as_it_is, ()), (turned, (OTHER,)), (cut, (OTHER,))])
async def test_a_reducer_says_whose_upload_is_not_what_was_committed(
    sharing: Sharing,
    control: AtTheDesk,
    store: MemoryBlobStore,
    spoil: Callable[[bytes], bytes],
    left_out: tuple[Hotkey, ...],
) -> None:
    await sharing.reduce(await merge_of(store, vectors_of((ME, 1.0), (OTHER, -1.0)), spoil=spoil))
    (report,) = control.told
    assert isinstance(report, wire.ReportReduced)
    assert report.left_out == left_out
    merged = np.frombuffer(await sharing.get("shard", report.shards[0].ref), np.float32)
    assert set(merged.tolist()) == ({1.0} if left_out else {0.0})


async def test_a_merge_is_downloaded_into_one_vector_and_checked_part_by_part(
    sharing: Sharing, store: MemoryBlobStore
) -> None:
    plan = await merge_of(store, vectors_of((ME, 1.0), (OTHER, 1.0)))
    [place] = plan.shards
    ref = await sharing.put("shard", epoch=Epoch(0), name="s0-0", data=to_bytes(np.arange(ELEMENTS, dtype=np.float32)))
    shard = wire.ReducedShard(shard=place.shard, ref=ref)
    assert (await sharing.download_merged(plan, [shard])).tolist() == list(range(ELEMENTS))
    for wrong in ([], [shard, shard]):
        with pytest.raises(ProtocolViolation, match="merged shards do not make the 1 of the plan"):
            await sharing.download_merged(plan, wrong)
    for spoil in (turned, cut):
        await store.put(ref.key, spoil(await store.get(ref.key)))
        with pytest.raises(ProtocolViolation, match="nobody has shard 0 of stage 0 as it was announced"):
            await sharing.download_merged(plan, [shard])


@pytest.mark.parametrize("num_false", [0, 1, 2])
async def test_a_merged_shard_is_found_whoever_stored_other_bytes_under_its_digest(
    sharing: Sharing, store: MemoryBlobStore, num_false: int
) -> None:
    """A bucket binds the size of an object, not its digest. With both copies false the miner sums up itself."""
    vectors = dict.fromkeys((ME, OTHER), to_bytes(np.full(ELEMENTS, 2.0, np.float32)))
    plan = await merge_of(store, vectors)
    true = to_bytes(np.full(ELEMENTS, 2.0, np.float32))
    refs = [
        BlobRef(key=f"runs/run-1/e0/shard/{hotkey}/s0-0-{digest(true)}", digest=digest(true), size_bytes=len(true))
        for hotkey in plan.shards[0].reducers
    ]
    for place, ref in enumerate(refs):
        await store.put(ref.key, bytes(len(true)) if place < num_false else true)
    merged = await sharing.download_merged(plan, [wire.ReducedShard(shard=0, ref=refs[0])])
    assert merged.tolist() == [2.0] * ELEMENTS


async def test_a_merged_shard_that_nobody_has_and_no_sum_comes_to_is_not_used(
    sharing: Sharing, store: MemoryBlobStore
) -> None:
    vectors = dict.fromkeys((ME, OTHER), to_bytes(np.full(ELEMENTS, 2.0, np.float32)))
    plan = await merge_of(store, vectors)
    false = BlobRef(key=f"runs/run-1/e0/shard/{ME}/s0-0-x", digest=digest(b"x"), size_bytes=4 * ELEMENTS)
    with pytest.raises(ProtocolViolation, match="nobody has shard 0 of stage 0 as it was announced"):
        await sharing.download_merged(plan, [wire.ReducedShard(shard=0, ref=false)])


async def test_a_segment_that_is_not_on_disk_any_more_cannot_be_presented(sharing: Sharing, control: AtTheDesk) -> None:
    books = Books(run_id="run-1", hotkey=ME, stage=StageIndex(0), disk=MemoryDisk())
    end = Checkpoint(digest=NO_DIGEST, num_steps=0, num_receipts=0, head=NO_DIGEST)
    challenge = wire.Challenge(
        epoch=Epoch(0),
        hotkey=ME,
        stage=StageIndex(0),
        segment=3,
        start_checkpoint=end,
        end_checkpoint=end,
        deadline_s=1.0,
    )
    with pytest.raises(NotFound, match="segment 3 of epoch 0 is not on disk any more"):
        await sharing.answer(challenge, books)
    assert not control.told
