"""Stages that train alone, as modules: one predicts the next token with its own head, one denoises it (papers.md B2 and B4).

Params are named `blocks.STAGE...`, so that no two stages share a name, and are handed to each call.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from subnet.config import ModelConfig, Objective, RunConfig
from subnet.model.diffusion import Denoiser
from subnet.model.layers import DecoderLayer, RmsNorm, rope_tables
from subnet.model.partition import layers_of
from subnet.types import StageIndex


class Predicted(NamedTuple):
    """Stream after the layers, (B, T, D), for the stage above; logits, (B, T, V) float32, where they were asked for."""

    stream: Tensor
    logits: Tensor | None


class _Headed(nn.Module):
    """Params of one predicting stage; a greedy one above the first has no embedding."""

    def __init__(self, model: ModelConfig, layers: range, *, reads_tokens: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.width) if reads_tokens else None
        self.layers = nn.ModuleDict({str(index): DecoderLayer(model) for index in layers})
        self.norm = RmsNorm(model.width, model.norm_eps)
        self.lm_head = nn.Linear(model.width, model.vocab_size, bias=False)


class PredictingBlock(nn.Module):
    """Layers and a head, over the tokens or over the stream of the stage below; a stack of them predicts at every depth."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: RunConfig, stage: StageIndex) -> None:
        super().__init__()
        reads_tokens = stage == 0 or config.blocktrain.objective is Objective.POOLED
        own = _Headed(config.model, layers_of(config, stage), reads_tokens=reads_tokens)
        self.blocks = nn.ModuleDict({str(stage): own})
        cos, sin = rope_tables(config.model, config.training.num_tokens)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def own(self) -> _Headed:
        """What is registered under the stage's name."""
        (own,) = self.blocks.values()
        assert isinstance(own, _Headed)
        return own

    @property
    def layers(self) -> nn.ModuleDict:
        """Layers by index."""
        return self.own.layers

    def forward(self, below_BTD: Tensor | None, ids_BT: Tensor, *, with_logits: bool = True) -> Predicted:
        """(B, T) ids, and the stream of the stage below, which only a greedy stage after the first reads."""
        own = self.own
        rope = (self.cos[: ids_BT.shape[1]], self.sin[: ids_BT.shape[1]])
        stream_BTD = below_BTD if own.embed_tokens is None else own.embed_tokens(ids_BT)
        assert stream_BTD is not None, "a greedy stage after the first needs the stream of the one below"
        for layer in own.layers.values():
            stream_BTD = layer(stream_BTD, rope)
        if not with_logits:
            return Predicted(stream_BTD, None)
        return Predicted(stream_BTD, own.lm_head(own.norm(stream_BTD)).to(torch.float32))


class DenoisingBlock(nn.Module):
    """Tells the next token from the clean text before it and a noisy embedding of it."""

    def __init__(self, config: RunConfig, stage: StageIndex) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(stage): Denoiser(config, layers_of(config, stage))})

    @property
    def own(self) -> Denoiser:
        """What is registered under the stage's name."""
        (own,) = self.blocks.values()
        assert isinstance(own, Denoiser)
        return own

    @property
    def layers(self) -> nn.ModuleDict:
        """Layers by index."""
        return self.own.layers

    def forward(self, noisy_BTD: Tensor, sigma_B: Tensor, ids_BT: Tensor) -> Tensor:
        """z = y + sigma * eps of the token after each of the (B, T) clean ids -> (B, T, V) float32 logits of it."""
        logits_BTV: Tensor = self.own(noisy_BTD, sigma_B, ids_BT)
        return logits_BTV


def build_block(config: RunConfig, stage: StageIndex) -> PredictingBlock | DenoisingBlock:
    """A stage of a BlockTrain run without values of its own, as `build_stage` makes one of a pipeline."""
    with torch.device("meta"):
        if config.blocktrain.objective is Objective.DIFFUSION:
            return DenoisingBlock(config, stage)
        return PredictingBlock(config, stage)
