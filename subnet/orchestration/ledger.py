"""The run's public record: hash-chained entries, sealed each epoch into one immutable segment (system.md 1).

An entry's head depends on every entry before it, so the newest head on chain proves the whole record, and a changed byte
is found at the entry where it was changed (`subnet.orchestration.segments` reads and writes the sealed parts).
"""

from dataclasses import dataclass

import msgspec

from subnet.frames import digest
from subnet.receipts import canonical
from subnet.types import (
    BlobRef,
    Checkpoint,
    Digest,
    Epoch,
    Hotkey,
    LossFlag,
    Noise,
    NumericMode,
    SampleId,
    StageIndex,
    Verdict,
)

GENESIS_HEAD = digest(b"strata/ledger/1")


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="fact", tag=True, gc=False):
    """Base of what the ledger records; the class name is the tag. No fact is part of a cycle (types.Record)."""


class RunCreated(Fact, frozen=True):
    """The run's identity and genesis params. `stage_flops` weigh pay; `config_json` and `incentives_json` are canonical."""

    run_id: str
    config_json: str
    incentives_json: str
    corpus_digest: Digest
    snapshots: tuple[BlobRef, ...]
    num_elements: tuple[int, ...]
    stage_flops: tuple[int, ...]
    beacon: str


class Assigned(Fact, frozen=True):
    """A miner holds a stage from `first_epoch` on."""

    hotkey: Hotkey
    stage: StageIndex
    first_epoch: Epoch


class Enlisted(Fact, frozen=True):
    """A permit holder audits from now on."""

    validator: Hotkey


class Calibrated(Fact, frozen=True):
    """How far honest work lies from its replay on a validator's machine; the network's limit on distances follows."""

    validator: Hotkey
    noise: Noise


class EpochStarted(Fact, frozen=True):
    """Pathways of the epoch are drawn from `beacon` over `roster`, one tuple of hotkeys for each stage."""

    epoch: Epoch
    beacon: str
    roster: tuple[tuple[Hotkey, ...], ...]


class Leased(Fact, frozen=True):
    """A sample's pathway; `attempt` > 0 replaces an earlier one after a pass could not be delivered."""

    epoch: Epoch
    sample: SampleId
    attempt: int
    hops: tuple[Hotkey, ...]
    deadline_s: float


class Credited(Fact, frozen=True):
    """One unit of work: this stage's backward of this sample is complete, on time, and its neighbours attest it."""

    epoch: Epoch
    sample: SampleId
    stage: StageIndex
    hotkey: Hotkey


class LossRecorded(Fact, frozen=True):
    """Every stage of the sample is credited; the loss is the last stage's."""

    epoch: Epoch
    sample: SampleId
    loss: float


class SampleDropped(Fact, frozen=True):
    """The sample will not finish; units not yet credited never will be."""

    epoch: Epoch
    sample: SampleId
    reason: str


class Voided(Fact, frozen=True):
    """Credited units taken back: the miner restarted from a checkpoint that does not contain them."""

    epoch: Epoch
    hotkey: Hotkey
    samples: tuple[SampleId, ...]


class Committed(Fact, frozen=True):
    """A miner's last word on its epoch: receipt chain, checkpoints, upload."""

    epoch: Epoch
    hotkey: Hotkey
    num_receipts: int
    head: Digest
    checkpoints: tuple[Checkpoint, ...]
    num_batches: int
    upload_digest: Digest


class RootCommitted(Fact, frozen=True):
    """Merkle root over the commitments of the epoch, included on chain at `at_block`."""

    epoch: Epoch
    root: Digest
    at_block: int


class BeaconSeen(Fact, frozen=True):
    """The block whose hash drives the draws of the epoch, fixed after the root was on chain."""

    epoch: Epoch
    at_block: int
    beacon: str


class UploadAccepted(Fact, frozen=True):
    """The committed pseudo-gradient arrived; without it the epoch's credit is void."""

    epoch: Epoch
    hotkey: Hotkey


class UpdateMergedLate(Fact, frozen=True):
    """A pseudo-gradient that was committed in time in `base_epoch` and came late is summed in the merge of `epoch`."""

    epoch: Epoch
    base_epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex


class ShardMerged(Fact, frozen=True):
    """One merged shard: the digest each reducer reported ("" for none), and the accepted one."""

    epoch: Epoch
    stage: StageIndex
    shard: int
    reducers: tuple[Hotkey, ...]
    reported: tuple[Digest, ...]
    accepted: BlobRef
    is_refereed: bool


class UploadCopied(Fact, frozen=True):
    """Two uploads of one stage committed the same bytes in `share` of their chunks: the credit of both is void.

    Nobody can know another's upload before it commits, so both keys took part, or are one machine's.
    """

    epoch: Epoch
    stage: StageIndex
    pair: tuple[Hotkey, Hotkey]
    share: float


class OutputRepeated(Fact, frozen=True):
    """A miner sent the same for two samples; its next audits are certain. Recorded once an epoch."""

    epoch: Epoch
    hotkey: Hotkey
    sample: SampleId
    first: SampleId


class UploadRejected(Fact, frozen=True):
    """An upload's part of a shard is not what its commitment says, or holds no numbers that can be summed.

    The orchestrator saw it when it recomputed the shard. The upload is left out there, and the credit of its epoch is void.
    """

    epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex
    shard: int


class MergeMissed(Fact, frozen=True):
    """Half of the merge's time was over, and a miner that was there had not done its part: the credit of its epoch is void."""

    epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex


class ShardAudited(Fact, frozen=True):
    """A shard whose two copies agreed was recomputed from the same uploads, after nobody could change them any more.

    `recomputed` is the accepted object when its bytes came out the same, else the evidence, stored under the owner's key.
    """

    epoch: Epoch
    stage: StageIndex
    shard: int
    reducers: tuple[Hotkey, ...]
    accepted: BlobRef
    recomputed: BlobRef


class ReducerConvicted(Fact, frozen=True):
    """Both copies of an audited shard were false: its reducers are banned, as for a failed audit of that epoch."""

    epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex
    shard: int
    banned_until: Epoch
    at_epoch: Epoch


class EpochPublished(Fact, frozen=True):
    """Params and outer momentum that the next epoch starts from, one snapshot for each stage."""

    epoch: Epoch
    snapshots: tuple[BlobRef, ...]
    participants: tuple[tuple[Hotkey, ...], ...]


class Challenged(Fact, frozen=True):
    """A segment drawn for audit, and the validator drawn to replay it.

    `mode` is how the miner says it computes, `max_rel_d` the network's limit on distances at the time.
    """

    epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex
    segment: int
    auditor: Hotkey
    mode: NumericMode | None = None
    max_rel_d: float | None = None


class Answered(Fact, frozen=True):
    """The challenged miner presented both checkpoints and its records."""

    epoch: Epoch
    hotkey: Hotkey
    segment: int
    start: BlobRef
    end: BlobRef
    evidence: BlobRef


class Absent(Fact, frozen=True):
    """The challenged miner presented nothing in time: that epoch's credit is void."""

    epoch: Epoch
    hotkey: Hotkey
    segment: int


class VerdictRecorded(Fact, frozen=True):
    """A validator's signed verdict, as posted."""

    verdict: Verdict


class Flagged(Fact, frozen=True):
    """A validator's signed flag, as posted: the miner is audited with certainty in later epochs, and nothing else."""

    flag: LossFlag


class CaseClosed(Fact, frozen=True):
    """What the verdicts of one audit come to: pass, fail (then banned until the named epoch), or inconclusive."""

    epoch: Epoch
    hotkey: Hotkey
    segment: int
    outcome: str
    banned_until: Epoch
    at_epoch: Epoch


class Evaluated(Fact, frozen=True):
    """Held-out loss of a published epoch, nats per token, as a drawn validator measured it."""

    epoch: Epoch
    validator: Hotkey
    loss: float
    loss_wires_zeroed: float


class ScoresPosted(Fact, frozen=True):
    """What a validator computed from the record up to `ledger_head` and put on chain."""

    validator: Hotkey
    segment: int
    ledger_head: Digest
    scores: dict[Hotkey, float]
    weights: dict[Hotkey, float]


AnyFact = (
    RunCreated | Assigned | Enlisted | Calibrated | EpochStarted
    | Leased | Credited | LossRecorded | SampleDropped | Voided | OutputRepeated
    | Committed | RootCommitted | BeaconSeen | UploadCopied | UploadAccepted | ShardMerged | EpochPublished
    | UpdateMergedLate | UploadRejected | MergeMissed | ShardAudited | ReducerConvicted
    | Challenged | Answered | Absent | VerdictRecorded | Flagged | CaseClosed | Evaluated | ScoresPosted
)  # fmt: skip


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One recorded fact: its place in the run's whole record, when (unix s), what, and the head after it."""

    seq: int
    at_s: float
    fact: AnyFact
    head: Digest


def entry_head(previous: Digest, *, seq: int, at_s: float, fact: AnyFact) -> Digest:
    """Head after an entry."""
    return digest(previous.encode() + canonical([seq, at_s, fact]))


@dataclass(slots=True)
class Ledger:
    """The growing end of the record: the chain's head and the entries not sealed yet."""

    num_entries: int = 0
    head: Digest = GENESIS_HEAD
    sealed_head: Digest = GENESIS_HEAD
    num_segments: int = 0
    tail: list[Entry] | None = None

    def append(self, fact: AnyFact, *, at_s: float) -> None:
        """Record `fact`."""
        self.head = entry_head(self.head, seq=self.num_entries, at_s=at_s, fact=fact)
        self.tail = self.tail or []
        self.tail.append(Entry(seq=self.num_entries, at_s=at_s, fact=fact, head=self.head))
        self.num_entries += 1

    def seal(self) -> "Segment":
        """Close the current segment and begin the next."""
        segment = Segment(
            index=self.num_segments, previous_head=self.sealed_head, entries=tuple(self.tail or ()), head=self.head
        )
        self.sealed_head, self.tail = self.head, []
        self.num_segments += 1
        return segment


@dataclass(frozen=True, slots=True)
class Segment:
    """One sealed part of the record. `head` is the chain's head after its last entry."""

    index: int
    previous_head: Digest
    entries: tuple[Entry, ...]
    head: Digest
