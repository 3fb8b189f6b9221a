"""Messages between a node and the orchestrator: strict decode and encode, one table for both sides.

Every request names itself by its tag; `request_id` is the envelope's, so a repeat of a lost answer is recognised. A field
or a kind that is not known here is refused: both sides then see which of them to update (`PROTOCOL_VERSION`).
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from subnet.detours import AnyDetourRequest, WaitingFrames
from subnet.errors import ProtocolViolation
from subnet.receipts import canonical
from subnet.types import (
    NO_DIGEST,
    BlobRef,
    Checkpoint,
    Digest,
    Endpoint,
    Epoch,
    Hotkey,
    Lease,
    LossFlag,
    Message,
    Noise,
    NumericMode,
    Phase,
    Receipt,
    SampleId,
    StageIndex,
    Verdict,
)

PROTOCOL_VERSION = 1
REQUEST_LIMIT_BYTES = 1 << 20
RESPONSE_LIMIT_BYTES = 64 << 20

T = TypeVar("T")

Token = Annotated[str, Meta(max_length=64)]
"""What a node draws and the orchestrator keeps in its state: the name of a process, or of a request."""


# ---- requests that change the record -------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """A miner asks for a stage, or says that it is back. Answer: Joined."""

    endpoint: Endpoint
    mode: NumericMode
    protocol_version: int = PROTOCOL_VERSION
    session: Token = ""
    """Drawn anew by each process, so that two processes on one hotkey are told apart."""


class Enlist(Message, frozen=True):
    """A permit holder offers to audit, or is back; a permit alone is no offer, for earners get them too. Answer: Done."""

    protocol_version: int = PROTOCOL_VERSION


class Resume(Message, frozen=True):
    """A miner that restarted in an epoch goes on from its checkpoint; receipts after it are void. Answer: Resumed."""

    epoch: Epoch
    num_receipts: int
    head: Digest


class Ready(Message, frozen=True):
    """A miner holds the params that `epoch` starts from; `anchor` is their snapshot's digest. Answer: Done."""

    epoch: Epoch
    anchor: Digest


class LeaseSamples(Message, frozen=True):
    """A miner of stage 0 asks for up to `count` samples. Answer: Leases."""

    epoch: Epoch
    count: int


class Reroute(Message, frozen=True):
    """The pass could not be delivered to `lease.hops[stage]`; ask for another miner of that stage. Answer: Leases."""

    lease: Lease
    stage: StageIndex


class PostReceipts(Message, frozen=True):
    """Receipts that follow the first `num_before` of the chain; `head` is the head after them. Answer: Ack."""

    epoch: Epoch
    num_before: int
    receipts: tuple[Receipt, ...]
    head: Digest


class CommitEpoch(Message, frozen=True):
    """A miner's last word on an epoch, before anything is drawn (trust.md 1.1, 1.3, 5). Answer: Done.

    `chunk_digests` are of the upload's chunks in order; `num_batches` is its merge weight.
    """

    epoch: Epoch
    num_receipts: int
    head: Digest
    checkpoints: tuple[Checkpoint, ...]
    num_batches: int
    upload_digest: Digest
    upload_bytes: int
    chunk_digests: tuple[Digest, ...]


class UploadDone(Message, frozen=True):
    """The committed pseudo-gradient lies in the blob store. Answer: Done."""

    epoch: Epoch


class ReducedShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One copy of one merged shard, as its reducer stored it."""

    shard: int
    ref: BlobRef


class ReportReduced(Message, frozen=True):
    """A reducer stored its copies of these shards. Answer: Done.

    `left_out` names uploads whose part of them is not what was committed, or holds no numbers; the orchestrator looks itself.
    """

    epoch: Epoch
    shards: tuple[ReducedShard, ...]
    left_out: tuple[Hotkey, ...] = ()


class ReportOuter(Message, frozen=True):
    """Digest of the snapshot (params, outer momentum) after the outer step. Answer: Done."""

    epoch: Epoch
    digest: Digest
    size_bytes: int


class SnapshotDone(Message, frozen=True):
    """A drawn miner stored the snapshot that joiners will load. Answer: Done."""

    epoch: Epoch
    ref: BlobRef


class AnswerChallenge(Message, frozen=True):
    """The challenged segment's evidence lies in the blob store. Answer: Done."""

    epoch: Epoch
    segment: int
    start: BlobRef
    end: BlobRef
    evidence: BlobRef


class PostVerdict(Message, frozen=True):
    """A validator's signed finding. Answer: Done."""

    verdict: Verdict


class PostNoise(Message, frozen=True):
    """How far honest work lies from its replay on a validator's machine, as it measured at its start. Answer: Done."""

    noise: Noise


class PostFlags(Message, frozen=True):
    """Miners whose samples lose more than chance explains; it only raises the odds of their audits. Answer: Done."""

    flags: tuple[LossFlag, ...]


class PostEvaluation(Message, frozen=True):
    """Held-out loss of a published epoch, nats per token; `loss_wires_zeroed` with nothing crossing the cuts. Answer: Done."""

    epoch: Epoch
    loss: float
    loss_wires_zeroed: float


class PostScores(Message, frozen=True):
    """What a validator computed from the sealed segment and is about to put on chain. Answer: Done."""

    segment: int
    ledger_head: Digest
    scores: dict[Hotkey, float]
    weights: dict[Hotkey, float]


class Leave(Message, frozen=True):
    """A miner stops; it says what it could not finish. Answer: Done."""

    num_open_samples: int
    session: Token = ""


# ---- requests that only read ---------------------------------------------------------------------------------------


class Poll(Message, frozen=True):
    """Wait up to `wait_s` for a directive newer than `known_version`. Answer: Directive."""

    known_version: int
    wait_s: float
    session: Token = ""


class RequestUpload(Message, frozen=True):
    """Where to put an object; the orchestrator makes the key. Answer: UploadGrant."""

    kind: str
    """One of upload, shard, snapshot, checkpoint, evidence."""
    epoch: Epoch
    name: str
    """Tells objects of one kind apart: shard number, segment number; letters, digits, dash."""
    digest: Digest
    size_bytes: int


class RequestDownload(Message, frozen=True):
    """URLs of objects. Answer: DownloadGrant."""

    keys: tuple[str, ...]


class GetPeers(Message, frozen=True):
    """Who works in a stage in the running epoch, and where. Answer: StagePeers."""

    stage: StageIndex


class GetMergePlan(Message, frozen=True):
    """The merge of the caller's stage. Answer: MergePlan."""

    epoch: Epoch


Request = (
    Join | Enlist | Resume | Ready | Leave
    | LeaseSamples | Reroute | PostReceipts
    | CommitEpoch | UploadDone | ReportReduced | ReportOuter | SnapshotDone
    | AnswerChallenge | PostNoise | PostVerdict | PostFlags | PostEvaluation | PostScores
    | Poll | RequestUpload | RequestDownload | GetPeers | GetMergePlan
    | AnyDetourRequest
)  # fmt: skip
READS = (Poll, RequestUpload, RequestDownload, GetPeers, GetMergePlan)


# ---- responses -----------------------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """Recorded."""


class Joined(Message, frozen=True):
    """The stage a miner holds and the epoch it will first work in."""

    stage: StageIndex
    first_epoch: Epoch
    note: str


class Resumed(Message, frozen=True):
    """How many receipts of the resumed chain are recorded; the miner posts the rest, up to its checkpoint, again."""

    num_receipts: int


class Leases(Message, frozen=True):
    """Signed leases; fewer than asked for when the epoch has no more for this miner now."""

    leases: tuple[Lease, ...]


class Ack(Message, frozen=True):
    """Signed word of the orchestrator that the chain up to `head` is recorded (receipts.ack_bytes)."""

    epoch: Epoch
    num_receipts: int
    head: Digest
    signature: str


class UploadGrant(Message, frozen=True):
    """A presigned URL that takes exactly the announced bytes."""

    ref: BlobRef
    url: str


class DownloadGrant(Message, frozen=True):
    """Presigned URLs, in the order of the keys asked for."""

    urls: tuple[str, ...]


class Upload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One miner's accepted pseudo-gradient, with what was committed about it; `base_epoch` is the one it was trained in, earlier
    than the merge's where it came late.
    """

    hotkey: Hotkey
    base_epoch: Epoch
    num_batches: int
    ref: BlobRef
    chunk_digests: tuple[Digest, ...]


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Elements [start, stop) of the flat vector and the two miners (one when N = 1) that reduce them."""

    shard: int
    start: int
    stop: int
    reducers: tuple[Hotkey, ...]


class MergePlan(Message, frozen=True):
    """Everything a reducer of one stage needs; uploads are sorted by hotkey and base epoch."""

    epoch: Epoch
    stage: StageIndex
    num_elements: int
    uploads: tuple[Upload, ...]
    shards: tuple[ShardPlan, ...]


class StagePeer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who can be reached where, for delivering frames."""

    hotkey: Hotkey
    endpoint: Endpoint


class StagePeers(Message, frozen=True):
    """The live miners of one stage's roster, in its order."""

    peers: tuple[StagePeer, ...]


class Challenge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One audited segment. A miner sees its own until it has answered; a validator sees answered ones that it must judge.

    `start` and `end` are the checkpoints the segment lies between, `evidence` its records; None until answered. `anchor` is
    the snapshot that the epoch began from, `neighbours` are those of the stages that this one computes with; `upload_digest` is
    the committed upload's when the segment is the epoch's last.
    `mode` is how the miner says it computes; `max_rel_d` is the network's limit on distances, None for the run's own.
    """

    epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex
    segment: int
    start_checkpoint: Checkpoint
    end_checkpoint: Checkpoint
    deadline_s: float
    mode: NumericMode | None = None
    max_rel_d: float | None = None
    anchor: BlobRef | None = None
    neighbours: tuple[BlobRef, ...] = ()
    upload_digest: Digest = NO_DIGEST
    start: BlobRef | None = None
    end: BlobRef | None = None
    evidence: BlobRef | None = None


class Directive(Message, frozen=True):
    """What one node should do now: a pure view of the orchestrator's state, so a restarted node needs nothing else.

    `snapshot` is what `epoch` starts from, for the caller's stage, and `snapshots` for the stages that this one computes with. A
    validator gets every stage's `snapshots` of `evaluate_epoch`, whose held-out loss it was drawn to measure. `merged` is
    complete or empty: the stage's accepted shards, in order. `note` says why nothing is to do.
    """

    version: int
    epoch: Epoch
    phase: Phase
    phase_deadline_s: float
    stage: StageIndex | None = None
    is_in_roster: bool = False
    """Whether the caller works in this epoch; else it loads the snapshot and waits for the next."""
    snapshot: BlobRef | None = None
    snapshots: tuple[BlobRef, ...] = ()
    is_settled: bool = True
    """No sample of the epoch is open any more: nothing further will arrive."""
    has_committed: bool = False
    has_uploaded: bool = False
    is_merging: bool = False
    """The caller's stage has a merge in progress (GetMergePlan)."""
    merged: tuple[ReducedShard, ...] = ()
    must_upload_snapshot: bool = False
    challenges: tuple[Challenge, ...] = ()
    evaluate_epoch: Epoch | None = None
    sealed_segments: int = 0
    has_frames: bool = False
    """Frames that could not be pushed to the caller wait for it in the store (CollectFrames)."""
    note: str = ""


class ErrorBody(Message, frozen=True):
    """Body of every answer that is not 200; `code` is stable, `reason` is for people and names the remedy."""

    code: str
    reason: str


Response = (
    Done
    | Joined
    | Resumed
    | Leases
    | Ack
    | UploadGrant
    | DownloadGrant
    | StagePeers
    | WaitingFrames
    | MergePlan
    | Directive
    | ErrorBody
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request and the id under which its answer is kept."""

    request_id: Token
    request: Request


_decoders: dict[object, msgspec.json.Decoder[object]] = {}
_msgpack = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """Canonical JSON."""
    return canonical(message)


def decode(kind: type[T], body: bytes, *, limit_bytes: int = REQUEST_LIMIT_BYTES) -> T:
    """`body` as a `kind` (a struct or a union of them). Raises ProtocolViolation naming what is wrong and where."""
    if len(body) > limit_bytes:
        raise ProtocolViolation(f"message of {len(body)} bytes, limit {limit_bytes}")
    decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        found = decoder.decode(body)
        _msgpack.encode(found)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"message does not decode: {error}") from error
    except OverflowError as error:
        # JSON has integers of any size, and what is stored of a message is msgpack
        raise ProtocolViolation(f"message holds an integer of more than 64 bits: {error}") from error
    return found  # type: ignore[return-value]  # the decoder is built from `kind`


class Discovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The owner's one commitment on chain: how to find the run, and the newest roots of its record (chain.md 2).

    Short names keep it inside the chain's space limit: `u` orchestrator URL, `r` run id, `v` protocol version, `c` digest of
    the run's configuration, `e` epoch of the commit root `m`, `n` number of sealed segments, `s` ledger head after them.
    """

    u: str
    r: str
    v: int
    c: str
    e: int = -1
    m: str = ""
    n: int = 0
    s: str = ""


def sample_key(epoch: Epoch, sample: SampleId, branch: int) -> tuple[int, int, int]:
    """Identity of a microbatch in one miner's books."""
    return (int(epoch), int(sample), branch)
