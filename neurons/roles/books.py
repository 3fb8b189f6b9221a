"""A miner's books of one epoch: receipt chain, checkpoints, and the evidence it presents when challenged (trust.md 1).

Everything up to the newest checkpoint lies on disk, so that kill -9 costs at most the segment being worked on.
"""

from dataclasses import dataclass

import msgspec

from subnet import receipts, wire
from subnet.frames import digest
from subnet.ports import Disk
from subnet.types import NO_DIGEST, Checkpoint, Digest, Direction, Epoch, Hotkey, Receipt, Record, StageIndex
from subnet.validation.evidence import Evidence, decode_evidence, encode_evidence

EPOCHS_KEPT = 3
ACKS_KEPT = 1000
"""Epochs whose acknowledgement stays on disk: some 300 bytes each, and all that proves an omission later."""
PROGRESS = "progress.json"


class Progress(Record, frozen=True):
    """Where a restarted miner goes on."""

    run_id: str
    epoch: Epoch
    stage: StageIndex
    checkpoints: tuple[Checkpoint, ...]
    num_batches: int


def checkpoint_name(epoch: Epoch, index: int) -> str:
    """File of a checkpoint."""
    return f"e{epoch:06d}-checkpoint-{index:04d}.safetensors"


def evidence_name(epoch: Epoch, segment: int) -> str:
    """File of a segment's records."""
    return f"e{epoch:06d}-evidence-{segment:04d}.msgpack"


def ack_name(epoch: Epoch) -> str:
    """File of the newest acknowledgement of an epoch."""
    return f"ack-{epoch:06d}.json"


@dataclass(frozen=True, slots=True)
class Attested:
    """Bytes that a receipt names, with their digest: hashed once, where they were made or came in."""

    data: bytes
    digest: Digest

    @classmethod
    def of(cls, data: bytes) -> "Attested":
        """Of bytes made here."""
        return cls(data, digest(data))


class Books:
    """Receipts since the newest checkpoint are in memory, all before are on disk."""

    def __init__(self, *, run_id: str, hotkey: Hotkey, stage: StageIndex, disk: Disk) -> None:
        self.stage = stage
        self.epoch = Epoch(-1)
        self.num_receipts = 0
        self.num_batches = 0
        self.num_acked = 0
        self.head: Digest = NO_DIGEST
        self.checkpoints: list[Checkpoint] = []
        self._run_id = run_id
        self._hotkey = hotkey
        self._disk = disk
        self._segment: list[Receipt] = []
        self._unacked: list[Receipt] = []
        self._payloads: dict[Digest, bytes] = {}

    async def open(self, epoch: Epoch, checkpoint: bytes) -> None:
        """Begin an epoch from its first checkpoint."""
        self.epoch = epoch
        self.num_receipts = self.num_batches = self.num_acked = 0
        self.head = receipts.first_head(self._run_id, epoch, self._hotkey)
        self.checkpoints = []
        self._segment, self._unacked, self._payloads = [], [], {}
        await self._forget_old()
        await self.checkpoint(checkpoint, num_steps=0)

    async def reopen(self, progress: Progress) -> bytes:
        """Go on from the newest checkpoint on disk; returns its bytes, b"" when they are not there any more.

        How much of the chain is recorded already is not known yet: `acknowledged` is to follow.
        """
        newest = progress.checkpoints[-1]
        data = await self._disk.read(checkpoint_name(progress.epoch, len(progress.checkpoints) - 1))
        if data is None or digest(data) != newest.digest:
            return b""
        self._unacked = []
        for segment in range(len(progress.checkpoints) - 1):
            evidence = await self._disk.read(evidence_name(progress.epoch, segment))
            if evidence is None:
                return b""
            self._unacked += decode_evidence(evidence, limit_bytes=len(evidence)).receipts
        self.epoch, self.checkpoints = progress.epoch, list(progress.checkpoints)
        self.num_receipts, self.num_acked = newest.num_receipts, 0
        self.num_batches, self.head = progress.num_batches, newest.head
        self._segment, self._payloads = [], {}
        return data

    async def progress(self) -> Progress | None:
        """What the disk knows of an earlier process of this run and stage; a file that does not decode is no progress."""
        data = await self._disk.read(PROGRESS)
        if data is None:
            return None
        try:
            progress = msgspec.json.decode(data, type=Progress)
        except msgspec.DecodeError:
            return None
        is_ours = progress.run_id == self._run_id and progress.stage == self.stage and progress.checkpoints
        return progress if is_ours else None

    def record(self, receipt: Receipt, *payloads: Attested) -> None:
        """Put a receipt on the chain, with the payloads it names."""
        self.head = receipts.next_head(self.head, receipt)
        self.num_receipts += 1
        self.num_batches += receipt.direction is Direction.BACKWARD
        self._segment.append(receipt)
        self._unacked.append(receipt)
        for payload in payloads:
            self._payloads[payload.digest] = payload.data

    def unacked(self) -> wire.PostReceipts | None:
        """What the orchestrator has not acknowledged yet."""
        if not self._unacked:
            return None
        return wire.PostReceipts(
            epoch=self.epoch, num_before=self.num_acked, receipts=tuple(self._unacked), head=self.head
        )

    def acknowledged(self, num_receipts: int) -> None:
        """The orchestrator has recorded this many."""
        del self._unacked[: num_receipts - self.num_acked]
        self.num_acked = num_receipts

    async def keep_ack(self, ack: wire.Ack) -> None:
        """Keep the orchestrator's signed word on what it has of this epoch, for `strata audit --acks`."""
        kept = receipts.KeptAck(
            run_id=self._run_id,
            epoch=ack.epoch,
            hotkey=self._hotkey,
            num_receipts=ack.num_receipts,
            head=ack.head,
            signature=ack.signature,
        )
        await self._disk.write(ack_name(ack.epoch), wire.encode(kept))

    async def forget_ack(self) -> None:
        """Receipts after the newest checkpoint will be cut off: what was acknowledged of them is no more."""
        await self._disk.delete(ack_name(self.epoch))

    async def checkpoint(self, data: bytes, *, num_steps: int) -> None:
        """Close the current segment with a checkpoint: evidence first, then state, then the note that both are there."""
        index = len(self.checkpoints)
        if index > 0:
            evidence = Evidence(receipts=tuple(self._segment), payloads=self._payloads)
            await self._disk.write(evidence_name(self.epoch, index - 1), encode_evidence(evidence))
        await self._disk.write(checkpoint_name(self.epoch, index), data)
        self.checkpoints.append(
            Checkpoint(digest=digest(data), num_steps=num_steps, num_receipts=self.num_receipts, head=self.head)
        )
        progress = Progress(
            run_id=self._run_id,
            epoch=self.epoch,
            stage=self.stage,
            checkpoints=tuple(self.checkpoints),
            num_batches=self.num_batches,
        )
        await self._disk.write(PROGRESS, wire.encode(progress))
        self._segment, self._payloads = [], {}

    async def segment_files(self, epoch: Epoch, segment: int) -> tuple[bytes, bytes, bytes] | None:
        """Start, end and evidence of a segment, or None when they are not there any more."""
        start = await self._disk.read(checkpoint_name(epoch, segment))
        end = await self._disk.read(checkpoint_name(epoch, segment + 1))
        evidence = await self._disk.read(evidence_name(epoch, segment))
        if start is None or end is None or evidence is None:
            return None
        return start, end, evidence

    async def _forget_old(self) -> None:
        oldest = f"e{max(0, self.epoch - EPOCHS_KEPT + 1):06d}"
        oldest_ack = ack_name(Epoch(max(0, self.epoch - ACKS_KEPT + 1)))
        for name in await self._disk.names():
            if (name.startswith("e") and name < oldest) or (name.startswith("ack-") and name < oldest_ack):
                await self._disk.delete(name)
