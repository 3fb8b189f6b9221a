"""Records made by hand: a run of two stages whose facts a test writes down itself."""

from dataclasses import dataclass, field

import msgspec

from incentives.config import IncentiveConfig
from neurons.scoring import Record
from subnet.config import RunConfig, TrainingConfig
from subnet.frames import digest
from subnet.orchestration.ledger import (
    AnyFact,
    Assigned,
    Committed,
    Credited,
    EpochPublished,
    EpochStarted,
    Leased,
    Ledger,
    LossRecorded,
    RunCreated,
    UploadAccepted,
)
from subnet.orchestration.segments import encode_segment
from subnet.receipts import canonical
from subnet.types import NO_DIGEST, BlobRef, Checkpoint, Digest, Epoch, Hotkey, SampleId, StageIndex

A, B, C, D = (Hotkey(f"5{name}" + "x" * 46) for name in "ABCD")
V, W = (Hotkey(f"5{name}" + "x" * 46) for name in "VW")
STAGES = ((A, B), (C, D))
INCENTIVES = IncentiveConfig()
CONFIG = RunConfig(training=TrainingConfig(num_stages=2, min_batches=2, target_batches=2))


def ref(name: str, size_bytes: int = 4) -> BlobRef:
    return BlobRef(key=f"runs/r/{name}", digest=digest(name.encode()), size_bytes=size_bytes)


@dataclass(slots=True)
class Book:
    """A ledger that grows by what a test says."""

    config: RunConfig = CONFIG
    incentives: IncentiveConfig = INCENTIVES
    ledger: Ledger = field(default_factory=Ledger)
    segments: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.say(
            RunCreated(
                run_id="r",
                config_json=canonical(self.config).decode(),
                incentives_json=canonical(self.incentives).decode(),
                corpus_digest=digest(b"corpus"),
                snapshots=(ref("s0"), ref("s1")),
                num_elements=(64, 64),
                stage_flops=(100, 150),
                beacon="genesis",
            )
        )
        for stage, hotkeys in enumerate(STAGES):
            for hotkey in hotkeys:
                self.say(Assigned(hotkey=hotkey, stage=StageIndex(stage), first_epoch=Epoch(0)))

    def say(self, *facts: AnyFact) -> "Book":
        for fact in facts:
            self.ledger.append(fact, at_s=float(self.ledger.num_entries))
        return self

    def start(self, epoch: int) -> "Book":
        return self.say(EpochStarted(epoch=Epoch(epoch), beacon=f"b{epoch}", roster=STAGES))

    def sample(self, epoch: int, sample: int, *hops: Hotkey, loss: float = 1.0) -> "Book":
        """One that went all the way."""
        number = SampleId(sample)
        self.say(Leased(epoch=Epoch(epoch), sample=number, attempt=0, hops=hops, deadline_s=1e9))
        for stage, hotkey in enumerate(hops):
            self.say(Credited(epoch=Epoch(epoch), sample=number, stage=StageIndex(stage), hotkey=hotkey))
        return self.say(LossRecorded(epoch=Epoch(epoch), sample=number, loss=loss))

    def finish(self, epoch: int, *committed: Hotkey, num_batches: int = 2) -> "Book":
        for hotkey in committed:
            self.say(commitment(epoch, hotkey, num_batches=num_batches))
            self.say(UploadAccepted(epoch=Epoch(epoch), hotkey=hotkey))
        return self.say(
            EpochPublished(epoch=Epoch(epoch), snapshots=(ref("s0"), ref("s1")), participants=STAGES)
        ).seal()

    def seal(self) -> "Book":
        self.segments.append(encode_segment(self.ledger.seal()))
        return self

    def record(self) -> Record:
        record = Record()
        for data in self.segments:
            record.add(data)
        return record


def commitment(epoch: int, hotkey: Hotkey, *, num_batches: int = 2, num_checkpoints: int = 2) -> Committed:
    return Committed(
        epoch=Epoch(epoch),
        hotkey=hotkey,
        num_receipts=4,
        head=NO_DIGEST,
        checkpoints=tuple(checkpoint(number) for number in range(num_checkpoints)),
        num_batches=num_batches,
        upload_digest=digest(hotkey.encode()),
    )


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint(digest=Digest(f"{number:064x}"), num_steps=number, num_receipts=4 * number, head=NO_DIGEST)


def quiet_epoch(book: Book, epoch: int) -> Book:
    """Everybody works on two samples, commits and uploads."""
    book.start(epoch)
    for number, hops in enumerate([(A, C), (B, D), (A, D), (B, C)]):
        book.sample(epoch, number, *hops)
    return book.finish(epoch, A, B, C, D)


def altered(config: RunConfig, part: str, **knobs: object) -> RunConfig:
    changed = msgspec.structs.replace(getattr(config, part), **knobs)
    return msgspec.structs.replace(config, **{part: changed})
