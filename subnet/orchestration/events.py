"""What the state machine is fed and what it asks to be done. Both are plain values; events are what the journal keeps."""

import msgspec

from subnet import wire
from subnet.orchestration.ledger import Segment
from subnet.types import BlobRef, Digest, Epoch, Hotkey, Metagraph, StageIndex


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag=True):
    """Something that happened at `at_s` (unix s, from the orchestrator's clock)."""

    at_s: float


class Created(Event, frozen=True):
    """The run is created from genesis params that lie in the blob store; always the first event."""

    run_id: str
    config_json: str
    incentives_json: str
    corpus_digest: Digest
    snapshots: tuple[BlobRef, ...]
    num_elements: tuple[int, ...]
    stage_flops: tuple[int, ...]
    beacon: str


class Requested(Event, frozen=True):
    """A verified request that changes the record."""

    sender: Hotkey
    request_id: str
    request: wire.Request


class Ticked(Event, frozen=True):
    """Time passed a deadline."""


class Returned(Event, frozen=True):
    """The orchestrator is back: since its last event nobody could reach it."""


class ChainSeen(Event, frozen=True):
    """The subnet's registrations changed: registered hotkeys with their registration block, and permit holders, sorted."""

    registered: tuple[tuple[Hotkey, int], ...]
    permits: tuple[Hotkey, ...]


class HeardFrom(Event, frozen=True):
    """A member that had been silent is back, or one has been silent for too long."""

    hotkey: Hotkey
    is_live: bool


class RootIncluded(Event, frozen=True):
    """The epoch's commit root is on chain."""

    epoch: Epoch
    at_block: int


class BlockSeen(Event, frozen=True):
    """The block that the epoch's beacon is taken from is final."""

    epoch: Epoch
    at_block: int
    block_hash: str


class ShardRefereed(Event, frozen=True):
    """The orchestrator recomputed a shard that had no two equal copies; `left_out` are uploads it could not use."""

    epoch: Epoch
    stage: StageIndex
    shard: int
    ref: BlobRef
    left_out: tuple[Hotkey, ...] = ()


class ShardRecomputed(Event, frozen=True):
    """The orchestrator recomputed an agreeing shard: `ref` is the accepted object when the bytes came out the same."""

    epoch: Epoch
    stage: StageIndex
    shard: int
    ref: BlobRef
    left_out: tuple[Hotkey, ...] = ()


class OuterRefereed(Event, frozen=True):
    """The orchestrator applied the outer step itself and stored the snapshot."""

    epoch: Epoch
    stage: StageIndex
    ref: BlobRef


class ObjectsDeleted(Event, frozen=True):
    """What the publication of `epoch` left without use is gone from the blob store."""

    epoch: Epoch


AnyEvent = (
    Created
    | Requested
    | Ticked
    | Returned
    | ChainSeen
    | HeardFrom
    | RootIncluded
    | BlockSeen
    | ShardRefereed
    | ShardRecomputed
    | OuterRefereed
    | ObjectsDeleted
)

_decoder = msgspec.json.Decoder(AnyEvent)


def encode_event(event: AnyEvent) -> bytes:
    """Journal entry."""
    return wire.encode(event)


def decode_event(data: bytes) -> AnyEvent:
    """Inverse of `encode_event`. Raises msgspec.DecodeError, and its ValidationError for JSON that is none of our events."""
    return _decoder.decode(data)


def chain_seen(metagraph: Metagraph, *, at_s: float) -> ChainSeen:
    """What the machine needs of a metagraph."""
    neurons = sorted(metagraph.neurons, key=lambda neuron: neuron.hotkey)
    return ChainSeen(
        at_s=at_s,
        registered=tuple((neuron.hotkey, neuron.registered_at_block) for neuron in neurons),
        permits=tuple(neuron.hotkey for neuron in neurons if neuron.validator_permit),
    )


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do at the edge. After a crash all but Answer and Wake are asked for again: StoreSegment by the events that are
    replayed, the others by `machine.outstanding`.
    """


class Answer(Effect, frozen=True):
    """Send this to who asked."""

    sender: Hotkey
    request_id: str
    response: wire.Response


class Wake(Effect, frozen=True):
    """Directives may have changed: let waiting polls look again."""


class CommitRoot(Effect, frozen=True):
    """Put the epoch's commit root on chain; answer with RootIncluded."""

    epoch: Epoch
    root: Digest


class AwaitBlock(Effect, frozen=True):
    """Wait until this block is final; answer with BlockSeen."""

    epoch: Epoch
    at_block: int


class RefereeShard(Effect, frozen=True):
    """Recompute this shard from the uploads; answer with ShardRefereed."""

    plan: wire.MergePlan
    shard: int


class AuditShard(Effect, frozen=True):
    """Recompute this shard, although both its copies agree on `accepted`; answer with ShardRecomputed."""

    plan: wire.MergePlan
    shard: int
    accepted: BlobRef


class RefereeOuter(Effect, frozen=True):
    """Apply the outer step to the previous snapshot; answer with OuterRefereed."""

    epoch: Epoch
    stage: StageIndex
    previous: BlobRef
    merged: tuple[wire.ReducedShard, ...]
    plan: wire.MergePlan


class StoreSegment(Effect, frozen=True):
    """Store the sealed segment and put the ledger's head on chain."""

    segment: Segment


class DeleteObjects(Effect, frozen=True):
    """Objects, and folders with all in them, that nobody needs once `epoch` is published; answer with ObjectsDeleted."""

    epoch: Epoch
    keys: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


AnyEffect = (
    Answer | Wake | CommitRoot | AwaitBlock | RefereeShard | AuditShard | RefereeOuter | StoreSegment | DeleteObjects
)
