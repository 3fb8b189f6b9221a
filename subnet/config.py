"""Frozen run configuration: everything two nodes must agree on. Its digest is part of the run's identity on chain.

Each field carries its unit, and its range as a constraint that decoding enforces; `__post_init__` checks what involves
several fields. Knobs of pay live in `incentives.config`, knobs of one node in `neurons.settings`.
"""

import enum
from typing import Annotated

from msgspec import Meta

from subnet.errors import InvalidConfig
from subnet.receipts import canonical
from subnet.types import NumericMode, Record

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]

WIRE_COMPRESSION = 128
"""fp32 bytes at full width over bytes sent, for activations and gradients (papers.md A5)."""
REL_D_LIMITS = (0.03, 0.08)
"""Between these lies every network's limit on distances: no machine is as quiet as the first promises for ever, and a cheat
that skips its layers at a 128x cut begins at .13 (trust.md 2)."""


class Bottleneck(enum.StrEnum):
    """Designs of what crosses a pipeline cut (bottleneck.md)."""

    RESBM = "resbm"
    IOTA = "iota"
    NONE = "none"
    K0 = "k0"


class OptimizerKind(enum.StrEnum):
    """Inner optimizer: Muon for hidden matrices with AdamW for the rest, or AdamW for all."""

    MUON = "muon"
    ADAMW = "adamw"


class RunKind(enum.StrEnum):
    """How a run trains: one loss through a pipeline of stages (papers.md A), or each stage on a loss of its own (papers.md B)."""

    PIPELINE = "pipeline"
    BLOCKTRAIN = "blocktrain"


class Objective(enum.StrEnum):
    """Local loss of a stage in a BlockTrain run (papers.md B2 and B4)."""

    DIFFUSION = "diffusion"
    """Denoise the embedding of the next token within a band of noise levels; nothing trained is shared between stages."""
    GREEDY = "greedy"
    """Predict the next token with a head of its own, from what the published stages below make of the text."""
    POOLED = "pooled"
    """Predict the next token from the tokens alone; what the stages predict is pooled. Nothing trained is shared (DESIGN D53)."""


class DiffusionContext(enum.StrEnum):
    """Where a denoising stage sees the clean text: before the noisy tokens as a second sequence, or added to them."""

    CONCAT = "concat"
    SINGLE = "single"


class AuditMode(enum.StrEnum):
    """What an audit replays: one drawn segment, or the whole epoch (the paper's full tracking)."""

    SEGMENT = "segment"
    FULL = "full"


class ModelConfig(Record, frozen=True):
    """Shape of the decoder. D = `width`, K = `bottleneck_width`."""

    vocab_size: Annotated[int, Meta(ge=2, le=1 << 20)] = 256
    width: Annotated[int, Meta(ge=8, le=1 << 16)] = 256
    num_layers: Annotated[int, Meta(ge=1, le=1024)] = 6
    num_heads: Count = 4
    num_kv_heads: Count = 4
    ffn_width: Count = 704
    rope_theta: Positive = 10000.0
    norm_eps: Annotated[float, Meta(gt=0, le=0.1)] = 1e-5
    init_std: Annotated[float, Meta(gt=0, le=1)] = 0.02
    bottleneck: Bottleneck = Bottleneck.RESBM
    bottleneck_width: Annotated[int, Meta(ge=1)] = 4
    """Channels that cross a cut in bf16; 128x means width / 64. `none` sends the whole width in float32, `k0` no channel."""
    anchor_ids: bool = True
    """Whether the receiver of a cut adds an embedding of the token ids, which it has from the corpus."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0

    def __post_init__(self) -> None:
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            raise InvalidConfig(
                f"model.width / model.num_heads must be an even whole number, got {self.width} / {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfig(
                f"model.num_heads must be a multiple of model.num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.bottleneck_width > self.width:
            raise InvalidConfig(
                f"model.bottleneck_width must be in [1, model.width = {self.width}], got {self.bottleneck_width}"
            )


class TrainingConfig(Record, frozen=True):
    """What one epoch of one miner looks like. B = `microbatch_size`, T = `num_tokens`."""

    num_stages: Annotated[int, Meta(ge=1, le=256)] = 3
    microbatch_size: Count = 8
    num_tokens: Annotated[int, Meta(ge=2, le=1 << 20)] = 128
    accumulate: Count = 4
    """Backward passes in one inner step."""
    max_in_flight: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Samples a miner holds open between their forward and their backward."""
    optimizer: OptimizerKind = OptimizerKind.MUON
    learning_rate: Positive = 0.02
    """Step size of Muon; unused with AdamW alone."""
    adamw_learning_rate: Positive = 0.003
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.01
    grad_clip: Positive = 1.0
    """Norm limit for the whole model; a stage gets its share, 1.0 * sqrt(stage params / total params)."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 10
    """Inner steps over which the learning rate rises, counted over the whole run."""
    outer_learning_rate: Positive = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    min_batches: Annotated[int, Meta(ge=1)] = 8
    """B_min: backward passes a miner needs in an epoch to take part in its merge."""
    quorum: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Fraction of each stage's miners that must have reached `target_batches` for training to end early."""
    target_batches: Count = 48
    min_miners: Count = 1
    """Miners that, once ready and with every stage filled, let the first epoch start before the gathering deadline."""
    min_validators: Annotated[int, Meta(ge=0)] = 0
    """Validators that the first epoch waits for beside them; work that nobody audits is paid all the same."""
    max_reroutes: Count = 64
    """Re-routes in one epoch from one miner away from another, before their samples are dropped instead."""
    num_epochs: Annotated[int, Meta(ge=0)] = 0
    """Epochs after which the run closes; 0 runs for ever."""
    modes: tuple[NumericMode, ...] = (NumericMode.FP32, NumericMode.BF16_AUTOCAST)

    def __post_init__(self) -> None:
        if self.min_batches > self.target_batches:
            raise InvalidConfig(
                f"training.min_batches must be in [1, training.target_batches = {self.target_batches}], got {self.min_batches}"
            )
        if not self.modes:
            raise InvalidConfig("training.modes must name at least one of fp32, bf16_autocast")


class CorpusConfig(Record, frozen=True):
    """Which text, and how it becomes token ids."""

    name: str = "sotu"
    tokenizer: str = "bytes"
    heldout_fraction: Annotated[float, Meta(gt=0, lt=0.5)] = 0.05
    seed: Annotated[int, Meta(ge=0)] = 0


class MergeConfig(Record, frozen=True):
    """Butterfly all-reduce (papers.md A6, trust.md 5)."""

    chunk_bytes: Annotated[int, Meta(ge=64, multiple_of=64)] = 65536
    """Uploads are committed chunk by chunk; shard edges fall on chunk edges."""
    weight_cap: Annotated[float, Meta(ge=1)] = 2.0
    """Largest merge weight, over the median of the stage."""
    norm_cap: Annotated[float, Meta(ge=1)] = 1.0
    """A shard longer than this times the median norm is scaled down to it."""
    audit_fraction: Fraction = 0.08
    """Chance that a shard whose two copies agree is recomputed all the same, once nobody can change them any more."""


class AuditConfig(Record, frozen=True):
    """Challenges and the measures of a replay (trust.md 1 and 2)."""

    probability: Fraction = 0.1
    """Chance that a miner is audited in an epoch."""
    mode: AuditMode = AuditMode.SEGMENT
    """Replays are better spent on many miners than on one (trust.md 1.7): `full` costs as many as an epoch has segments."""
    checkpoint_every: Count = 4
    """Inner steps between two checkpoints; a segment lies between them."""
    max_rel_d: Positive = 0.04
    """Until validators have published the noise of their machines; then three times its median (trust.md 2)."""
    max_rel_d_token: Positive = 0.25
    min_norm_ratio: Fraction = 0.9
    max_norm_ratio: Annotated[float, Meta(ge=1)] = 1.1
    max_rel_dw: Positive = 0.25
    """Honest work in its own mode reaches .14 on another instruction set, half the steps begin at .48 (trust.md 2, LOG)."""
    max_loss_error: Positive = 2e-3
    max_single_rel_d: Positive = 0.5
    """One micro-batch above this fails alone; below it a failure needs two."""
    ban_epochs: Annotated[int, Meta(ge=1)] = 216
    probation_epochs: Annotated[int, Meta(ge=0)] = 30
    absences_to_fail: Annotated[int, Meta(ge=1)] = 2
    absence_window_epochs: Count = 30
    flag_epochs: Count = 30
    """Epochs for which a miner that CLASP flagged is audited with certainty."""


class DeadlineConfig(Record, frozen=True):
    """Upper bounds in seconds; phases end earlier when their quorum is complete."""

    gathering_s: Seconds = 120.0
    """Wait for the first miners before the first epoch starts with those that came."""
    training_s: Seconds = 1200.0
    committing_s: Seconds = 60.0
    uploading_s: Seconds = 300.0
    merging_s: Seconds = 300.0
    ready_s: Seconds = 30.0
    """Wait for miners to load a published epoch before the next begins without them."""
    sample_s: Seconds = 60.0
    """Life of a lease."""
    challenge_s: Seconds = 120.0
    """For a challenged miner to present its segment."""
    verdict_s: Seconds = 300.0
    """For a validator to answer; then another is drawn."""
    silent_s: Seconds = 30.0
    """A miner not heard of for this long is re-routed around."""


class BlockTrainConfig(Record, frozen=True):
    """Local objectives of a BlockTrain run (papers.md B2); unused in a pipeline run."""

    objective: Objective = Objective.GREEDY
    context: DiffusionContext = DiffusionContext.SINGLE
    """Of the diffusion objective."""
    sigma_min: Positive = 1.0
    """Least noise of the diffusion objective, over unit-norm targets; far below 1 a stage reads its target off (B2)."""
    sigma_max: Positive = 10.0
    """Most noise; sampling starts here."""
    sigma_data: Positive = 0.5
    p_mean: float = -1.2
    """Mean of the log of the noise level, before it is cut off at both ends."""
    p_std: Positive = 1.2
    overlap: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Exponent g by which a stage's band of noise levels is widened for training: by (high / low)^g at each end."""
    max_staleness: Annotated[int, Meta(ge=0, le=64)] = 0
    """Epochs by which an update that was committed in time may be uploaded late and still be merged (papers.md B3)."""

    def __post_init__(self) -> None:
        if self.sigma_min >= self.sigma_max:
            raise InvalidConfig(
                f"blocktrain.sigma_min must be below blocktrain.sigma_max = {self.sigma_max}, got {self.sigma_min}"
            )


class RunConfig(Record, frozen=True):
    """Everything the nodes of one run agree on."""

    kind: RunKind = RunKind.PIPELINE
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    corpus: CorpusConfig = CorpusConfig()
    merge: MergeConfig = MergeConfig()
    audit: AuditConfig = AuditConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    blocktrain: BlockTrainConfig = BlockTrainConfig()

    def __post_init__(self) -> None:
        if self.model.num_layers < self.training.num_stages:
            raise InvalidConfig(
                f"training.num_stages must be in [1, model.num_layers = {self.model.num_layers}], got {self.training.num_stages}"
            )

    @property
    def wire_shape(self) -> tuple[int, int, int]:
        """Shape of every tensor that crosses a cut: (B, T, K), or (B, T, D) uncut, or (B, T, 1) of zeros for the k0 control."""
        width = {Bottleneck.NONE: self.model.width, Bottleneck.K0: 1}.get(
            self.model.bottleneck, self.model.bottleneck_width
        )
        return (self.training.microbatch_size, self.training.num_tokens, width)

    @property
    def wire_item_bytes(self) -> int:
        """Bytes of one value on the wire: bf16, except uncut streams, which stay float32."""
        return 4 if self.model.bottleneck is Bottleneck.NONE else 2

    @property
    def wire_dtype(self) -> str:
        """Type of the values on the wire, as a frame's header spells it."""
        return "float32" if self.wire_item_bytes == 4 else "bfloat16"


def config_bytes(config: RunConfig) -> bytes:
    """Canonical JSON; its blake3 stands in the owner's on-chain record."""
    return canonical(config)
