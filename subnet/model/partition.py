"""Which layers each stage holds, the shape of each of its params, and what a sample costs there. No torch here.

The order of a stage's flat vector is the sorted order of its params' names (model/flat.py).
"""

import math

from subnet.config import Bottleneck, DiffusionContext, ModelConfig, Objective, RunConfig, RunKind
from subnet.lanes import lanes
from subnet.types import StageIndex

FULL_ANCHOR_LIMIT = 1 << 24
"""Elements up to which an anchor table is held in full; above it, it is factored (bottleneck.md 3)."""
ANCHOR_RANK = 64
TIME_FEATURES = 32
"""Sines and cosines of the noise level that a denoising stage starts from."""
TIME_WIDTH = 64
"""Hidden and outer width of its embedding of the noise level."""

Shapes = dict[str, tuple[int, ...]]


def is_first(config: RunConfig, stage: StageIndex) -> bool:
    """Whether this stage reads tokens and receives no activation; in a BlockTrain run every stage does."""
    return stage == lanes(config).of_stage(stage).start


def is_last(config: RunConfig, stage: StageIndex) -> bool:
    """Whether this stage computes the loss and sends no activation; in a BlockTrain run every stage does."""
    return stage == lanes(config).of_stage(stage)[-1]


def layers_of(config: RunConfig, stage: StageIndex) -> range:
    """Layers of `stage`; where they do not divide, the later stages hold one more (papers.md A5). Raises ValueError."""
    num_stages = config.training.num_stages
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in [0, {num_stages}), got {stage}")
    num_layers = config.model.num_layers
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


def neighbours_of(config: RunConfig, stage: StageIndex) -> tuple[StageIndex, ...]:
    """Other stages whose published params a worker of `stage` computes with, and never changes; in a pipeline none."""
    if config.kind is RunKind.PIPELINE or config.blocktrain.objective is not Objective.GREEDY:
        return ()
    return tuple(StageIndex(other) for other in range(stage))


def boundary_width(model: ModelConfig) -> int:
    """Hidden width of the resbm encoder and decoder (bottleneck.md 1)."""
    return max(4 * model.bottleneck_width, 64)


def has_anchor(model: ModelConfig) -> bool:
    """Whether the receiver of a cut adds an embedding of the ids; k0 has nothing else to go by."""
    return model.anchor_ids or model.bottleneck is Bottleneck.K0


def is_anchor_factored(model: ModelConfig) -> bool:
    """Whether the anchor table is a product of two thin matrices."""
    return model.vocab_size * model.width > FULL_ANCHOR_LIMIT


def _layer_shapes(model: ModelConfig, name: str) -> Shapes:
    head_dim = model.width // model.num_heads
    kv_width = model.num_kv_heads * head_dim
    return {
        f"{name}.input_layernorm.weight": (model.width,),
        f"{name}.post_attention_layernorm.weight": (model.width,),
        f"{name}.self_attn.q_proj.weight": (model.width, model.width),
        f"{name}.self_attn.k_proj.weight": (kv_width, model.width),
        f"{name}.self_attn.v_proj.weight": (kv_width, model.width),
        f"{name}.self_attn.o_proj.weight": (model.width, model.width),
        f"{name}.mlp.gate_proj.weight": (model.ffn_width, model.width),
        f"{name}.mlp.up_proj.weight": (model.ffn_width, model.width),
        f"{name}.mlp.down_proj.weight": (model.width, model.ffn_width),
    }


def _receiving_shapes(model: ModelConfig, *, cut: int, layer: int) -> Shapes:
    shapes: Shapes = {}
    if model.bottleneck is Bottleneck.RESBM:
        shapes[f"cuts.{cut}.decoder.inner.weight"] = (boundary_width(model), model.bottleneck_width)
        shapes[f"cuts.{cut}.decoder.outer.weight"] = (model.width, boundary_width(model))
    if model.bottleneck is Bottleneck.IOTA:
        shapes[f"model.layers.{layer}.expand.weight"] = (model.width, model.bottleneck_width)
    if has_anchor(model) and is_anchor_factored(model):
        shapes[f"cuts.{cut}.anchor.table.weight"] = (model.vocab_size, ANCHOR_RANK)
        shapes[f"cuts.{cut}.anchor.lift.weight"] = (model.width, ANCHOR_RANK)
    elif has_anchor(model):
        shapes[f"cuts.{cut}.anchor.table.weight"] = (model.vocab_size, model.width)
    return shapes


def _sending_shapes(model: ModelConfig, *, cut: int, layer: int) -> Shapes:
    if model.bottleneck is Bottleneck.RESBM:
        return {
            f"cuts.{cut}.encoder.inner.weight": (boundary_width(model), model.width),
            f"cuts.{cut}.encoder.outer.weight": (model.bottleneck_width, boundary_width(model)),
        }
    if model.bottleneck is Bottleneck.IOTA:
        return {f"model.layers.{layer}.compress.weight": (model.bottleneck_width, model.width)}
    return {}


def _block_shapes(config: RunConfig, stage: StageIndex) -> Shapes:
    """Of a stage that trains alone: always with a head; a greedy one above the first has no embedding."""
    model, name = config.model, f"blocks.{stage}"
    is_denoising = config.blocktrain.objective is Objective.DIFFUSION
    shapes: Shapes = {
        f"{name}.norm.weight": (model.width,),
        f"{name}.lm_head.weight": (model.vocab_size, model.width),
    }
    for layer in layers_of(config, stage):
        shapes |= _layer_shapes(model, f"{name}.layers.{layer}")
        if is_denoising:
            shapes[f"{name}.layers.{layer}.modulation.weight"] = (6 * model.width, TIME_WIDTH)
    if config.blocktrain.objective is not Objective.GREEDY or stage == 0:
        shapes[f"{name}.embed_tokens.weight"] = (model.vocab_size, model.width)
    if is_denoising:
        shapes[f"{name}.noisy.weight"] = (model.width, model.width)
        shapes[f"{name}.time.inner.weight"] = (TIME_WIDTH, TIME_FEATURES)
        shapes[f"{name}.time.outer.weight"] = (TIME_WIDTH, TIME_WIDTH)
    return shapes


def param_shapes(config: RunConfig, stage: StageIndex) -> Shapes:
    """Name -> shape of every param of `stage`, in sorted order. Names are unique over the whole model."""
    if config.kind is RunKind.BLOCKTRAIN:
        return dict(sorted(_block_shapes(config, stage).items()))
    model, layers = config.model, layers_of(config, stage)
    shapes: Shapes = {}
    for layer in layers:
        shapes |= _layer_shapes(model, f"model.layers.{layer}")
    if is_first(config, stage):
        shapes["model.embed_tokens.weight"] = (model.vocab_size, model.width)
    else:
        shapes |= _receiving_shapes(model, cut=stage - 1, layer=layers[0])
    if is_last(config, stage):
        shapes["model.norm.weight"] = (model.width,)
        shapes["lm_head.weight"] = (model.vocab_size, model.width)
    else:
        shapes |= _sending_shapes(model, cut=stage, layer=layers[-1])
    return dict(sorted(shapes.items()))


def num_elements(config: RunConfig, stage: StageIndex) -> int:
    """Length of the flat vector of `stage`."""
    return sum(math.prod(shape) for shape in param_shapes(config, stage).values())


def is_lookup(name: str) -> bool:
    """Whether the param is read by token id rather than multiplied."""
    return name.endswith(("embed_tokens.weight", "anchor.table.weight"))


def is_of_sample(name: str) -> bool:
    """Whether the param is multiplied once for each sequence, not for each token."""
    return ".time." in name or name.endswith("modulation.weight")


def stage_flops(config: RunConfig, stage: StageIndex) -> int:
    """Floating point operations of forward and backward of one microbatch, matrix products only.

    A product costs 2 for each multiply and add; backward costs twice the forward. Causal attention counts the half of the
    scores that is used. Published stages that a BlockTrain worker computes with count as it runs them: forward, without head.
    """
    below = sum(_forward_flops(config, other, with_head=False) for other in neighbours_of(config, stage))
    return 3 * _forward_flops(config, stage) + below


def _forward_flops(config: RunConfig, stage: StageIndex, *, with_head: bool = True) -> int:
    model, training = config.model, config.training
    num_tokens = training.microbatch_size * training.num_tokens
    attention = len(layers_of(config, stage)) * 2 * model.width * training.num_tokens * num_tokens
    # the second sequence of a concatenated context passes the layers too, and nothing else
    sequences = 2 if _is_concatenated(config) else 1
    products = 0
    for name, shape in param_shapes(config, stage).items():
        if len(shape) != 2 or is_lookup(name) or (name.endswith("lm_head.weight") and not with_head):
            continue
        rows = sequences * num_tokens if ".layers." in name else num_tokens
        products += math.prod(shape) * (training.microbatch_size if is_of_sample(name) else rows)
    return 2 * products + sequences * attention


def _is_concatenated(config: RunConfig) -> bool:
    is_denoising = config.kind is RunKind.BLOCKTRAIN and config.blocktrain.objective is Objective.DIFFUSION
    return is_denoising and config.blocktrain.context is DiffusionContext.CONCAT
