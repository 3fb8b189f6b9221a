"""A Llama decoder layer, with the param names of Hugging Face's and bit for bit its results.

Shapes: B batch, T tokens, D model width, H heads, G key/value heads, E head width, F feed-forward width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from subnet.config import ModelConfig

Rope = tuple[Tensor, Tensor]


def rope_tables(model: ModelConfig, num_tokens: int) -> Rope:
    """Cosines and sines for positions 0 to T - 1, each (T, E) float32."""
    head_dim = model.width // model.num_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    angles = torch.arange(num_tokens, dtype=torch.float32, device="cpu")[:, None] * (1.0 / model.rope_theta**exponents)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()


def _rotate(x_BHTE: Tensor, rope: Rope) -> Tensor:
    cos_TE, sin_TE = rope
    low, high = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-high, low), dim=-1) * sin_TE


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D) of the same dtype."""
        wide = x_BTD.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x_BTD.dtype)


class Attention(nn.Module):
    """Causal or masked attention with rotary positions and grouped key/value heads."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = model.width // model.num_heads
        self.is_grouped = model.num_kv_heads != model.num_heads
        kv_width = model.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(model.width, model.width, bias=False)
        self.k_proj = nn.Linear(model.width, kv_width, bias=False)
        self.v_proj = nn.Linear(model.width, kv_width, bias=False)
        self.o_proj = nn.Linear(model.width, model.width, bias=False)

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x_BTD: Tensor, rope: Rope, mask_TT: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D), without the residual; causal, or wherever `mask_TT` is true."""
        query_BHTE = _rotate(self._heads(self.q_proj(x_BTD)), rope)
        key_BGTE = _rotate(self._heads(self.k_proj(x_BTD)), rope)
        value_BGTE = self._heads(self.v_proj(x_BTD))
        mixed_BHTE = functional.scaled_dot_product_attention(
            query_BHTE,
            key_BGTE,
            value_BGTE.to(query_BHTE.dtype),
            attn_mask=mask_TT,
            is_causal=mask_TT is None,
            enable_gqa=self.is_grouped,
        )
        joined_BTD = mixed_BHTE.transpose(1, 2).reshape(x_BTD.shape)
        projected: Tensor = self.o_proj(joined_BTD)
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.width, model.ffn_width, bias=False)
        self.up_proj = nn.Linear(model.width, model.ffn_width, bias=False)
        self.down_proj = nn.Linear(model.ffn_width, model.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), without the residual."""
        out_BTD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(model)
        self.mlp = FeedForward(model)
        self.input_layernorm = RmsNorm(model.width, model.norm_eps)
        self.post_attention_layernorm = RmsNorm(model.width, model.norm_eps)

    def attend(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        """First half of the layer."""
        attended: Tensor = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope)
        return attended

    def feed(self, x_BTD: Tensor) -> Tensor:
        """Second half of the layer."""
        fed: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return fed

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.feed(self.attend(x_BTD, rope))
