"""What a model directory holds, read from its config.json, and how it is cut into stages that serve.

Two kinds: a plain Llama, cut anywhere between two layers; and a Strata model with cuts, whose stages can be put together but
not cut again, for what crosses is part of the model.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from subnet.config import Bottleneck, ModelConfig, RunConfig, RunKind, TrainingConfig
from subnet.errors import InvalidConfig
from subnet.model.export import DENOISING_TYPE
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
        return self.run.kind is RunKind.BLOCKTRAIN

    @property
    def max_stages(self) -> int:
        """The most stages it can be served in."""
        return self.run.training.num_stages if self.has_cuts else self.run.model.num_layers

    @property
    def wire_width(self) -> int:
        """Channels that cross from one stage to the next."""
        if self.is_denoising:
            return self.run.model.width
        return self.run.wire_shape[2]

    @property
    def wire_dtype(self) -> DType:
        """Codes cross in bfloat16 as in training; an uncut stream as it is computed."""
        if self.is_denoising:
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

    def cache_bytes_per_token(self, stage: int, num_stages: int) -> int:
        """Keys and values of one token at one serving stage."""
        model = self.run.model
        kv_width = model.num_kv_heads * (model.width // model.num_heads)
        return 2 * self.num_layers(stage, num_stages) * kv_width * (4 if self.dtype == "float32" else 2)

    def tensor_names(self, stage: int, num_stages: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """For each param of a serving stage: the name it has in the files, and its shape."""
        run, own = self.stages(stage, num_stages)
        names = {}
        for each in own:
            for name, shape in param_shapes(run, each).items():
                stored = "model.embed_tokens.weight" if self.is_tied and name == "lm_head.weight" else name
                names[name] = (stored, shape)
        return names


def read_config(data: bytes) -> ServedModel:
    """From the bytes of config.json. Raises InvalidConfig naming what cannot be served."""
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"config.json does not decode: {error}") from error
    kind = config.get("model_type")
    if kind == DENOISING_TYPE:
        return _denoising(config)
    if kind not in ("llama", "strata"):
        raise InvalidConfig(f"model_type must be llama or strata, config.json says {kind!r}")
    _refuse_unknown(config)
    model = _shape(config)
    has_cuts = kind == "strata"
    eos = config.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    stored = config.get("dtype", config.get("torch_dtype", "float32"))
    num_stages = int(config["num_stages"]) if has_cuts else 1
    return ServedModel(
        run=RunConfig(model=model, training=TrainingConfig(num_stages=num_stages)),
        has_cuts=has_cuts,
        dtype="bfloat16" if stored == "bfloat16" else "float32",
        max_positions=int(config.get("max_position_embeddings", 2048)),
        eos_ids=eos_ids,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope_scaling(config),
    )


def _denoising(config: Mapping[str, Any]) -> ServedModel:
    """Its shape is the run's own configuration, which the directory carries."""
    try:
        run = msgspec.convert(config.get("run_config"), RunConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"config.json: {error}") from error
    return ServedModel(run=run, has_cuts=True, dtype="float32", max_positions=run.training.num_tokens)


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise InvalidConfig for what these layers do not compute."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise InvalidConfig(f"a model with {key} cannot be served: the layers have no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidConfig(f"hidden_act must be silu, config.json says {config['hidden_act']!r}")
    own_head_dim = config.get("head_dim")
    if own_head_dim not in (None, config.get("hidden_size", 0) // config.get("num_attention_heads", 1)):
        raise InvalidConfig(f"head_dim must be hidden_size / num_attention_heads, config.json says {own_head_dim}")


def _shape(config: Mapping[str, Any]) -> ModelConfig:
    rope = config.get("rope_parameters") or {}
    fields = {
        "vocab_size": config.get("vocab_size"),
        "width": config.get("hidden_size"),
        "num_layers": config.get("num_hidden_layers"),
        "num_heads": config.get("num_attention_heads"),
        "num_kv_heads": config.get("num_key_value_heads") or config.get("num_attention_heads"),
        "ffn_width": config.get("intermediate_size"),
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "bottleneck": config.get("bottleneck", "none"),
        "bottleneck_width": config.get("bottleneck_width", 1),
        "anchor_ids": config.get("has_anchor", False),
    }
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"config.json: {error}") from error


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InvalidConfig(f"rope_type must be default or llama3, config.json says {kind!r}")
    return RopeScaling(
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        original_positions=rope["original_max_position_embeddings"],
    )
