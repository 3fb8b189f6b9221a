"""What a model directory holds, read from its config.json, and how it is cut into stages that serve.

A plain Llama is cut anywhere between two layers. The stages of a Strata model can be put together but not cut again, for what
crosses is part of the model; those that denoise are served one on each host.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from subnet.config import (
    BlockTrainConfig,
    Bottleneck,
    DiffusionContext,
    ModelConfig,
    Objective,
    RunConfig,
    RunKind,
    TrainingConfig,
)
from subnet.errors import InvalidConfig
from subnet.model.export import DENOISING_TYPE, POOLED_TYPE, is_denoising, is_pooled
from subnet.model.partition import layers_of, param_shapes
from subnet.types import Record, StageIndex

DType = Literal["float32", "bfloat16"]


class RopeScaling(Record, frozen=True):
    """Llama 3's stretching of long waves: those longer than `original_positions / low` are slowed by `factor`."""

    factor: Annotated[float, Meta(ge=1)]
    low: Annotated[float, Meta(gt=0)]
    high: Annotated[float, Meta(gt=0)]
    original_positions: Annotated[int, Meta(ge=1)]


class ServedModel(Record, frozen=True):
    """A model to be served. `run` holds its shape and, where it has cuts, the stages it was trained in."""

    run: RunConfig
    has_cuts: bool
    """Whether it is cut where it was trained in stages, and nowhere else."""
    dtype: DType
    max_positions: Annotated[int, Meta(ge=1)]
    """Longest context the model was made for, in tokens."""
    eos_ids: tuple[int, ...] = ()
    is_tied: bool = False
    """Whether the head is the embedding."""
    rope: RopeScaling | None = None

    @property
    def is_denoising(self) -> bool:
        """Whether its stages denoise embeddings of coming tokens (papers.md B2); they are served one on each host."""
        return is_denoising(self.run)

    @property
    def is_pooled(self) -> bool:
        """Whether each stage is a small model of its own, and the mean of their logits is what they say together."""
        return is_pooled(self.run)

    @property
    def max_stages(self) -> int:
        """The most stages it can be served in."""
        return self.run.training.num_stages if self.has_cuts else self.run.model.num_layers

    @property
    def wire_width(self) -> int:
        """Channels that cross from one stage to the next; of pooled stages the sum of logits so far."""
        if self.is_denoising:
            return self.run.model.width
        if self.is_pooled:
            return self.run.model.vocab_size
        return self.run.wire_shape[2]

    @property
    def wire_dtype(self) -> DType:
        """Codes cross in bfloat16 as in training; an uncut stream as it is computed."""
        if self.is_denoising or self.is_pooled:
            return "float32"
        if self.run.model.bottleneck is Bottleneck.NONE:
            return "float32" if self.has_cuts else self.dtype
        return "bfloat16"

    def stages(self, stage: int, num_stages: int) -> tuple[RunConfig, list[StageIndex]]:
        """The run's shape, and the stages of it that serving stage `stage` of `num_stages` holds. Raises InvalidConfig."""
        if not 1 <= num_stages <= self.max_stages:
            raise InvalidConfig(f"this model is served in 1 to {self.max_stages} stages, got {num_stages}")
        if self.is_denoising and num_stages != self.max_stages:
            raise InvalidConfig(f"stages that denoise are served in exactly {self.max_stages} stages, got {num_stages}")
        if not 0 <= stage < num_stages:
            raise InvalidConfig(f"stage must be in [0, {num_stages}), got {stage}")
        if not self.has_cuts:
            training = msgspec.structs.replace(self.run.training, num_stages=num_stages)
            return msgspec.structs.replace(self.run, training=training), [StageIndex(stage)]
        trained = self.run.training.num_stages
        return self.run, [
            StageIndex(own) for own in range(stage * trained // num_stages, (stage + 1) * trained // num_stages)
        ]

    def num_layers(self, stage: int, num_stages: int) -> int:
        """Layers of one serving stage."""
        run, own = self.stages(stage, num_stages)
        return sum(len(layers_of(run, each)) for each in own)

    def alone(self, stage: StageIndex) -> "ServedModel":
        """One pooled stage as what it is: an uncut Llama of its own."""
        model = msgspec.structs.replace(self.run.model, num_layers=len(layers_of(self.run, stage)))
        run = RunConfig(model=model, training=TrainingConfig(num_stages=1))
        return msgspec.structs.replace(self, run=run, has_cuts=False)

    def tensor_names(self, stage: int, num_stages: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """For each param of a serving stage: the name it has in the files, and its shape."""
        run, own = self.stages(stage, num_stages)
        names = {}
        for each in own:
            for name, shape in param_shapes(run, each).items():
                stored = "model.embed_tokens.weight" if self.is_tied and name == "lm_head.weight" else name
                names[name] = (stored, shape)
        return names


class _Noise(msgspec.Struct):
    """Of stages that denoise (model.export.DENOISING_FIELDS)."""

    context: DiffusionContext
    sigma_min: float
    sigma_max: float
    sigma_data: float
    p_mean: float
    p_std: float


class _Stored(msgspec.Struct):
    """The fields of config.json that are read; Hugging Face writes many more."""

    model_type: str
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: Annotated[int, Meta(ge=1)] = 1
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: dict[str, float | int | str] | None = None
    rope_scaling: dict[str, float | int | str] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bottleneck: Bottleneck = Bottleneck.NONE
    bottleneck_width: int = 1
    has_anchor: bool = False
    num_stages: Annotated[int, Meta(ge=1)] = 1
    codebook_seed: int = 0
    denoising: _Noise | None = None

    @property
    def rope(self) -> dict[str, float | int | str]:
        """Of either spelling."""
        return self.rope_parameters or self.rope_scaling or {}


def read_config(data: bytes) -> ServedModel:
    """From the bytes of config.json. Raises InvalidConfig naming what cannot be served."""
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"config.json: {error}") from error
    if stored.model_type == DENOISING_TYPE and stored.denoising is not None:
        return _denoising(stored, stored.denoising)
    if stored.model_type not in ("llama", "strata", POOLED_TYPE):
        raise InvalidConfig(
            f"model_type must be llama, strata or {POOLED_TYPE}, config.json says {stored.model_type!r}"
        )
    _refuse_unknown(stored)
    eos = stored.eos_token_id
    has_cuts, trains_apart = stored.model_type != "llama", stored.model_type == POOLED_TYPE
    return ServedModel(
        run=RunConfig(
            kind=RunKind.BLOCKTRAIN if trains_apart else RunKind.PIPELINE,
            model=_shape(stored),
            training=TrainingConfig(num_stages=stored.num_stages if has_cuts else 1),
            blocktrain=BlockTrainConfig(objective=Objective.POOLED) if trains_apart else BlockTrainConfig(),
        ),
        has_cuts=has_cuts,
        dtype="bfloat16" if (stored.dtype or stored.torch_dtype) == "bfloat16" else "float32",
        max_positions=stored.max_position_embeddings,
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        is_tied=stored.tie_word_embeddings,
        rope=_rope_scaling(stored),
    )


def _denoising(stored: _Stored, noise: _Noise) -> ServedModel:
    model = msgspec.structs.replace(_shape(stored), seed=stored.codebook_seed)
    training = TrainingConfig(num_stages=stored.num_stages, num_tokens=stored.max_position_embeddings)
    blocktrain = BlockTrainConfig(objective=Objective.DIFFUSION, **msgspec.structs.asdict(noise))
    run = RunConfig(kind=RunKind.BLOCKTRAIN, model=model, training=training, blocktrain=blocktrain)
    return ServedModel(run=run, has_cuts=True, dtype="float32", max_positions=stored.max_position_embeddings)


def _refuse_unknown(stored: _Stored) -> None:
    """Raise InvalidConfig for what these layers do not compute."""
    for key in ("attention_bias", "mlp_bias"):
        if getattr(stored, key):
            raise InvalidConfig(f"a model with {key} cannot be served: the layers have no biases")
    if stored.hidden_act != "silu":
        raise InvalidConfig(f"hidden_act must be silu, config.json says {stored.hidden_act!r}")
    if stored.head_dim not in (None, stored.hidden_size // stored.num_attention_heads):
        raise InvalidConfig(f"head_dim must be hidden_size / num_attention_heads, config.json says {stored.head_dim}")


def _shape(stored: _Stored) -> ModelConfig:
    fields = {
        "vocab_size": stored.vocab_size,
        "width": stored.hidden_size,
        "num_layers": stored.num_hidden_layers,
        "num_heads": stored.num_attention_heads,
        "num_kv_heads": stored.num_key_value_heads or stored.num_attention_heads,
        "ffn_width": stored.intermediate_size,
        "rope_theta": float(stored.rope.get("rope_theta", stored.rope_theta)),
        "norm_eps": stored.rms_norm_eps,
        "bottleneck": stored.bottleneck,
        "bottleneck_width": stored.bottleneck_width,
        "anchor_ids": stored.has_anchor,
    }
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"config.json: {error}") from error


def _rope_scaling(stored: _Stored) -> RopeScaling | None:
    rope = stored.rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InvalidConfig(f"rope_type must be default or llama3, config.json says {kind!r}")
    names = {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    }
    try:
        return msgspec.convert({name: rope.get(theirs) for name, theirs in names.items()}, RopeScaling)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"config.json, rope_parameters: {error}") from error
