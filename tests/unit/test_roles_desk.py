"""Grants and objects: keys are the server's, and a report names the sender's own whole objects (trust.md 6)."""

from typing import Any

import msgspec
import pytest

from neurons.roles.desk import BASE_LIMIT_BYTES, Desk
from subnet import receipts, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import MemoryBlobs, MemoryBlobStore
from subnet.adapters.system import SystemClock
from subnet.errors import Refused
from subnet.frames import digest
from subnet.types import BlobRef, Epoch, Hotkey, Outcome, Verdict
from tests.unit.orchestration import MINERS, RUN, STRANGER, VALIDATORS, Run

DATA = b"object"
REQUEST = wire.RequestUpload(kind="shard", epoch=Epoch(0), name="s0-1", digest=digest(DATA), size_bytes=len(DATA))


@pytest.fixture
def run() -> Run:
    run = Run()
    run.begin(*MINERS)
    return run


@pytest.fixture
def store() -> MemoryBlobStore:
    return MemoryBlobStore(SystemClock())


@pytest.fixture
def desk(run: Run, store: MemoryBlobStore) -> Desk:
    signer = KeypairSigner.from_uri("//owner", deterministic=True)
    return Desk(state=lambda: run.state, signer=signer, blobs=store, clock=SystemClock())


def grant(desk: Desk, request: wire.RequestUpload = REQUEST) -> wire.UploadGrant:
    answer = desk.grant_upload(MINERS[0], request)
    assert isinstance(answer, wire.UploadGrant)
    return answer


async def test_a_grant_takes_exactly_the_announced_bytes_under_the_senders_key(
    desk: Desk, store: MemoryBlobStore
) -> None:
    granted = grant(desk)
    assert granted.ref.key == f"runs/{RUN}/e0/shard/{MINERS[0]}/s0-1-{digest(DATA)}"
    blobs = MemoryBlobs(store)
    with pytest.raises(Refused):
        await blobs.put(granted.url, b"other!")
    await blobs.put(granted.url, DATA)
    answer = desk.grant_download(VALIDATORS[0], wire.RequestDownload(keys=(granted.ref.key,)))
    assert isinstance(answer, wire.DownloadGrant)
    assert await blobs.get(answer.urls[0], limit_bytes=100) == DATA


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "ledger"},
        {"name": "../../ledger/000000"},
        {"name": ""},
        {"name": "a/b"},
        {"name": "x" * 65},
        {"epoch": Epoch(1)},
        {"epoch": Epoch(-1)},
        {"epoch": 10**300},
        {"size_bytes": -1},
        {"size_bytes": BASE_LIMIT_BYTES * 2},
        {"digest": "x"},
        {"digest": digest(DATA).upper()},
        {"digest": digest(DATA) + "\n"},
    ],
)
def test_an_object_that_no_miner_stores_gets_no_grant(desk: Desk, change: dict[str, Any]) -> None:
    with pytest.raises(Refused) as found:
        desk.grant_upload(MINERS[0], msgspec.structs.replace(REQUEST, **change))
    assert found.value.code == "object"


def test_strangers_get_no_grants(desk: Desk) -> None:
    with pytest.raises(Refused, match="join first"):
        desk.grant_upload(STRANGER, REQUEST)
    with pytest.raises(Refused, match="only miners and validators"):
        desk.grant_download(STRANGER, wire.RequestDownload(keys=()))


@pytest.mark.parametrize(
    "key",
    ["runs/other/e0/x", "/etc/passwd", f"runs/{RUN}/../other", f"runs/{RUN}", f"runs/{RUN}/a b", f"runs/{RUN}/x\n"],
)
def test_keys_outside_the_run_are_not_read(desk: Desk, key: str) -> None:
    with pytest.raises(Refused) as found:
        desk.grant_download(MINERS[0], wire.RequestDownload(keys=(key,)))
    assert found.value.code == "object"


def reports(ref: BlobRef) -> list[wire.Request]:
    return [
        wire.ReportReduced(epoch=Epoch(0), shards=(wire.ReducedShard(shard=0, ref=ref),)),
        wire.SnapshotDone(epoch=Epoch(0), ref=ref),
        wire.AnswerChallenge(epoch=Epoch(0), segment=0, start=ref, end=ref, evidence=ref),
    ]


async def test_a_report_of_a_stored_object_of_the_senders_is_taken(desk: Desk, store: MemoryBlobStore) -> None:
    granted = grant(desk)
    await MemoryBlobs(store).put(granted.url, DATA)
    for request in reports(granted.ref):
        await desk.check(MINERS[0], request)
    await desk.check(MINERS[0], wire.Leave(num_open_samples=0))


@pytest.mark.parametrize(
    "change",
    [
        {"key": f"runs/{RUN}/e0/shard/m2/s0-1-{digest(DATA)}"},
        {"key": f"runs/{RUN}/e0/shard/m1/s0-1-{digest(b'other')}"},
        {"key": f"runs/{RUN}/../../m1/{digest(DATA)}"},
        {"key": f"/m1/{digest(DATA)}"},
        {"digest": digest(b"other")},
        {"size_bytes": 5},
    ],
)
async def test_a_report_of_anything_else_is_refused(desk: Desk, store: MemoryBlobStore, change: dict[str, Any]) -> None:
    """A foreign object, a key that no grant made, other bytes, half an object: all refused, and nobody crashes."""
    granted = grant(desk)
    await MemoryBlobs(store).put(granted.url, DATA)
    for request in reports(msgspec.structs.replace(granted.ref, **change)):
        with pytest.raises(Refused) as found:
            await desk.check(MINERS[0], request)
        assert found.value.code == "object"


async def test_an_upload_is_looked_for_before_it_is_believed(run: Run, desk: Desk, store: MemoryBlobStore) -> None:
    await desk.check(MINERS[0], wire.UploadDone(epoch=Epoch(0)))
    run.train()
    run.done(MINERS[0], run.commitment(MINERS[0]))
    with pytest.raises(Refused) as found:
        await desk.check(MINERS[0], wire.UploadDone(epoch=Epoch(0)))
    assert found.value.code == "upload"


async def test_a_verdict_carries_its_validators_signature(desk: Desk) -> None:
    signer = KeypairSigner.from_uri("//v", deterministic=True)
    verdict = Verdict(
        run_id=RUN,
        epoch=Epoch(0),
        hotkey=Hotkey("m1"),
        segment=0,
        validator=signer.hotkey,
        outcome=Outcome.FAIL,
        reason="r",
    )
    signed = msgspec.structs.replace(verdict, signature=signer.sign(receipts.verdict_bytes(verdict)))
    await desk.check(signer.hotkey, wire.PostVerdict(verdict=signed))
    for forged in (verdict, msgspec.structs.replace(signed, outcome=Outcome.PASS)):
        with pytest.raises(Refused) as found:
            await desk.check(signer.hotkey, wire.PostVerdict(verdict=forged))
        assert found.value.code == "signature"
