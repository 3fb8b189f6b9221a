"""What crosses a pipeline cut: designs that send K channels in place of D (bottleneck.md, papers.md A5).

Shapes: B batch, T tokens, D model width, K bottleneck width. Every module is built with its stage, never inside forward.

The cut itself is computed in float32 in every numeric mode: it is thin, so this costs next to nothing, and it halves the
distance of honest bf16 work from its replay.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from subnet.config import ModelConfig
from subnet.model.layers import DecoderLayer, Rope
from subnet.model.partition import ANCHOR_RANK, boundary_width, is_anchor_factored


def in_float32(near: Tensor) -> torch.autocast:
    """Context that keeps a cut out of autocast, on the device of `near`."""
    return torch.autocast(near.device.type, enabled=False)


class TwoLayers(nn.Module):
    """Linear, SiLU, Linear without biases: encoder and decoder of the resbm cut."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width_in, hidden, bias=False)
        self.outer = nn.Linear(hidden, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width_in) -> (..., width_out)."""
        out: Tensor = self.outer(functional.silu(self.inner(x)))
        return out


class Anchor(nn.Module):
    """An embedding of the ids that the receiver adds; full, or of rank 64 where the full table is too large."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        is_factored = is_anchor_factored(model)
        self.table = nn.Embedding(model.vocab_size, ANCHOR_RANK if is_factored else model.width)
        self.lift = nn.Linear(ANCHOR_RANK, model.width, bias=False) if is_factored else None

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)."""
        rows: Tensor = self.table(ids_BT)
        return rows if self.lift is None else self.lift(rows)


class Cut(nn.Module):
    """This stage's side of one cut; the other side lives on the next miner."""

    def __init__(
        self, *, encoder: TwoLayers | None = None, decoder: TwoLayers | None = None, anchor: Anchor | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.anchor = anchor


def resbm_encoder(model: ModelConfig) -> TwoLayers:
    """D -> K."""
    return TwoLayers(model.width, boundary_width(model), model.bottleneck_width)


def resbm_decoder(model: ModelConfig) -> TwoLayers:
    """K -> D."""
    return TwoLayers(model.bottleneck_width, boundary_width(model), model.width)


def widen(x: Tensor, width: int) -> Tensor:
    """Zeros after the last channel, up to `width`."""
    return functional.pad(x, (0, width - x.shape[-1]))


class IotaLayer(DecoderLayer):
    """The paper's block on either side of a cut, or on both when a stage has one layer (papers.md A5).

    Sending, the feed-forward half ends in K channels. Receiving, the attention half starts from K channels: what came passes
    on untouched in the first K, the rest is rebuilt. The paper leaves the width between W3 and W4 open; here it is D, so W3
    is the ordinary down projection. The anchor (ours) is added wherever the layer reads or rebuilds the stream.
    """

    def __init__(self, model: ModelConfig, *, receives: bool, sends: bool) -> None:
        super().__init__(model)
        self.num_channels = model.bottleneck_width
        self.expand = nn.Linear(model.bottleneck_width, model.width, bias=False) if receives else None
        self.compress = nn.Linear(model.width, model.bottleneck_width, bias=False) if sends else None

    def receive(self, y_BTK: Tensor, rope: Rope, anchor_BTD: Tensor | None) -> Tensor:
        """First half from the cut: (B, T, K) -> (B, T, D)."""
        assert self.expand is not None
        with in_float32(y_BTK):
            rebuilt_BTD: Tensor = functional.relu(self.expand(y_BTK))
        if anchor_BTD is not None:
            rebuilt_BTD = rebuilt_BTD + anchor_BTD
        mixed_BTD: Tensor = self.self_attn(self.input_layernorm(rebuilt_BTD), rope)
        stream_BTD = mixed_BTD + widen(y_BTK, mixed_BTD.shape[-1])
        return stream_BTD if anchor_BTD is None else stream_BTD + anchor_BTD

    def feed(self, x_BTD: Tensor) -> Tensor:
        """Second half; (B, T, D) -> (B, T, K) where this layer sends."""
        if self.compress is None:
            return super().feed(x_BTD)
        inner_BTD = self.mlp(self.post_attention_layernorm(x_BTD))
        with in_float32(x_BTD):
            code_BTK: Tensor = self.compress(functional.silu(inner_BTD.to(torch.float32)))
        return code_BTK + x_BTD[..., : self.num_channels]


def nothing(stream_BTD: Tensor) -> Tensor:
    """(B, T, 1) of zeros with a zero gradient: what the k0 control sends. Adding zero turns -0 into 0."""
    return torch.zeros_like(stream_BTD[..., :1]) * stream_BTD[..., :1] + 0.0
