"""Values that travel through the whole system. Records that cross a wire or enter the ledger are frozen structs."""

import enum
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

Hotkey = NewType("Hotkey", str)
"""SS58 address of a key that signs; every state of this project is kept by hotkey, never by uid."""
Uid = NewType("Uid", int)
"""A slot on the subnet now; slots are reused, so a uid is looked up at the moment of use."""
StageIndex = NewType("StageIndex", int)
Epoch = NewType("Epoch", int)
SampleId = NewType("SampleId", int)
"""Index of a microbatch within its epoch; `(epoch, sample) -> tokens` is pure."""
Digest = NewType("Digest", str)
"""Lower-case hex blake3 of the bytes named, 64 characters."""

NO_DIGEST = Digest("")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of records that cross a wire or enter the ledger: immutable, strict on decode.

    `gc=False`: what is frozen and holds only frozen values and text cannot be part of a cycle, and Python's collector need
    not look at it, of which an orchestrator holds hundreds of thousands.
    """


class Message(Record, frozen=True, tag_field="type", tag=True):
    """Base of requests and responses between nodes; the class name is the tag."""


class Direction(enum.StrEnum):
    """What one receipt attests."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    DROP = "drop"


class Phase(enum.StrEnum):
    """Phases of an epoch, in order (system.md 3); `finished` follows the last epoch of a bounded run."""

    GATHERING = "gathering"
    TRAINING = "training"
    COMMITTING = "committing"
    UPLOADING = "uploading"
    MERGING = "merging"
    PUBLISHED = "published"
    CLOSING = "closing"
    FINISHED = "finished"


class Outcome(enum.StrEnum):
    """Tri-state outcome of an audit (trust.md 1.5)."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class NumericMode(enum.StrEnum):
    """How a miner computes; checked against the run's allow-list at assignment."""

    FP32 = "fp32"
    BF16_AUTOCAST = "bf16_autocast"


class BlobRef(Record, frozen=True):
    """An immutable object: its key in the blob store, the digest and size of its bytes."""

    key: str
    digest: Digest
    size_bytes: int


class Endpoint(Record, frozen=True):
    """Where a node listens for peers."""

    host: Annotated[str, Meta(max_length=255)]
    port: int


class Lease(Record, frozen=True):
    """The right to work on one sample along one pathway (trust.md 1.2).

    `hops` has a miner for each stage that the sample passes, first to last (subnet.lanes). `attempt` grows by one at each
    re-route. `deadline_s` is unix time; work that ends later earns nothing. `signature` is the orchestrator's, hex, over
    `lease_bytes`.
    """

    run_id: str
    epoch: Epoch
    sample: SampleId
    branch: int
    attempt: int
    hops: tuple[Hotkey, ...]
    deadline_s: float
    signature: str = ""


class FrameHeader(Record, frozen=True):
    """What a frame is about; `stage` is the receiving stage, `direction` FORWARD (activation) or BACKWARD (its gradient)."""

    lease: Lease
    stage: StageIndex
    direction: Direction
    dtype: str
    shape: tuple[int, ...]
    payload_digest: Digest

    @property
    def epoch(self) -> Epoch:
        """Epoch of the lease."""
        return self.lease.epoch

    @property
    def sample(self) -> SampleId:
        """Sample of the lease."""
        return self.lease.sample

    @property
    def pass_id(self) -> str:
        """Names the pass in paths and keys: stable over retries of one delivery."""
        lease = self.lease
        return f"{lease.epoch}-{lease.sample}-{lease.branch}-{lease.attempt}-{self.stage}-{self.direction}"


class Receipt(Record, frozen=True):
    """One entry of a miner's receipt chain (trust.md 1.1).

    `input_digest` and `output_digest` are of the payload bytes received and sent. The last stage's forward has the
    digest of its float32 loss as output and carries `loss`. A STEP has no digests and `sample` -1.
    """

    run_id: str
    epoch: Epoch
    sample: SampleId
    branch: int
    stage: StageIndex
    direction: Direction
    params_version: int
    input_digest: Digest = NO_DIGEST
    output_digest: Digest = NO_DIGEST
    loss: float | None = None


class Checkpoint(Record, frozen=True):
    """Params and optimizer state with nothing in flight: digest, and its place in the receipt chain.

    `num_steps` is the params version; `num_receipts` and `head` say how long the chain was when it was taken.
    """

    digest: Digest
    num_steps: int
    num_receipts: int
    head: Digest


class Measures(Record, frozen=True):
    """What a replay measured (trust.md 2); ratios without unit, NaN never appears.

    `rel_d` and `rel_d_token` are medians over the segment of the whole-tensor and the worst-token distance,
    `rel_d_max` the largest whole-tensor one; `rel_dw` compares the segment's change of params; `loss_error` is the
    largest relative error of a reported loss. `cosine` and `norm_ratio` are what the published rule looks at.
    """

    num_passes: int
    num_failing: int
    rel_d: float
    rel_d_max: float
    rel_d_token: float
    rel_d_backward: float
    rel_dw: float
    loss_error: float
    cosine: float
    norm_ratio: float


class Noise(Record, frozen=True):
    """How far honest work, made in the other modes that a run allows, lies from its replay on one machine (trust.md 2).

    `mode` is what the machine replays in, `machine` the software and instruction set that it computes with. The figures are
    99.9th percentiles over a reference set.
    """

    mode: NumericMode
    machine: Annotated[str, Meta(max_length=255)]
    rel_d: float
    rel_d_token: float
    rel_d_backward: float
    rel_d_backward_token: float
    rel_dw: float
    loss_error: float

    @property
    def distance(self) -> float:
        """What the limit on distances must lie well above."""
        return max(self.rel_d, self.rel_d_backward)


class Verdict(Record, frozen=True):
    """A validator's signed finding about one segment of one miner's epoch; `mode` is what it replayed in."""

    run_id: str
    epoch: Epoch
    hotkey: Hotkey
    segment: int
    validator: Hotkey
    outcome: Outcome
    reason: str
    measures: Measures | None = None
    published_rule_passes: bool | None = None
    mode: NumericMode | None = None
    signature: str = ""


class LossFlag(Record, frozen=True):
    """A validator's signed finding that samples through a miner lose more than chance explains; no verdict (trust.md 4).

    `effect` is against the median of the miner's stage, nats a token, over the published epochs that end with `epoch`.
    """

    run_id: str
    epoch: Epoch
    hotkey: Hotkey
    stage: StageIndex
    validator: Hotkey
    effect: float
    standard_error: float
    z: float
    num_samples: int
    signature: str = ""


class Neuron(Record, frozen=True):
    """One registered key of the subnet, as one metagraph shows it. Stakes and emission in alpha."""

    uid: Uid
    hotkey: Hotkey
    coldkey: str
    stake: float
    validator_permit: bool
    registered_at_block: int
    last_update_block: int
    is_active: bool
    incentive: float
    dividends: float
    emission: float
    endpoint: Endpoint | None = None


class Metagraph(Record, frozen=True):
    """Every neuron of a subnet at one block; the only place where a uid is looked up."""

    netuid: int
    at_block: int
    owner_hotkey: Hotkey
    tempo: int
    neurons: tuple[Neuron, ...]

    def by_hotkey(self) -> dict[Hotkey, Neuron]:
        """Neurons by the key that signs."""
        return {neuron.hotkey: neuron for neuron in self.neurons}


class Contribution(Record, frozen=True):
    """Credited work of one hotkey in one epoch: `units` completed backwards, `volume` weighted by stage FLOPs."""

    hotkey: Hotkey
    epoch: Epoch
    stage: StageIndex
    units: int
    volume: float


class PathwayLoss(Record, frozen=True):
    """Loss of one completed sample and the miners it passed through, first stage first."""

    epoch: Epoch
    sample: SampleId
    pathway: tuple[Hotkey, ...]
    loss: float
