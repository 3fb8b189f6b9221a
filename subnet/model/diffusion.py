"""The denoising network of one stage: clean text and noisy targets in, logits of the targets out (papers.md B2).

Two ways to see the clean text. `concat`: the sequences [clean | noisy], where a noisy token sees the clean ones before its
target and itself alone. `single`: one sequence, the embedding of clean token t plus the noisy target t + 1, under a causal
mask; half the length.

Shapes: B batch, T tokens, D model width, E width of the noise level's embedding, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from subnet.config import BlockTrainConfig, DiffusionContext, ModelConfig, RunConfig
from subnet.model.layers import DecoderLayer, RmsNorm, Rope, rope_tables
from subnet.model.partition import TIME_FEATURES, TIME_WIDTH

MAX_FREQUENCY = 64.0
"""Of the features of c_noise = ln(sigma) / 4; the least is 1."""


class TimeEmbedding(nn.Module):
    """c_noise -> features -> two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(TIME_FEATURES, TIME_WIDTH, bias=False)
        self.outer = nn.Linear(TIME_WIDTH, TIME_WIDTH, bias=False)

    def forward(self, c_noise_B: Tensor) -> Tensor:
        """(B,) -> (B, E)."""
        half = TIME_FEATURES // 2
        rates = torch.linspace(0, math.log(MAX_FREQUENCY), half, device=c_noise_B.device).exp()
        angles = c_noise_B[:, None] * rates
        features = torch.cat((angles.cos(), angles.sin()), dim=-1)
        embedded_BE: Tensor = functional.silu(self.outer(functional.silu(self.inner(features))))
        return embedded_BE


class ModulatedLayer(DecoderLayer):
    """A decoder layer whose norms and residuals are shifted and scaled by the noise level; an ordinary one at the start."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.modulation = nn.Linear(TIME_WIDTH, 6 * model.width, bias=False)

    def denoise(self, x_BTD: Tensor, rope: Rope, time_BE: Tensor, mask_TT: Tensor | None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = self.modulation(time_BE)[:, None].chunk(6, dim=-1)
        read_BTD = self.input_layernorm(x_BTD) * (1 + scale_a) + shift_a
        x_BTD = x_BTD + (1 + gate_a) * self.self_attn(read_BTD, rope, mask_TT)
        read_BTD = self.post_attention_layernorm(x_BTD) * (1 + scale_f) + shift_f
        fed_BTD: Tensor = x_BTD + (1 + gate_f) * self.mlp(read_BTD)
        return fed_BTD


def concat_mask(num_tokens: int) -> Tensor:
    """(2T, 2T), true where row may look: clean at clean up to itself, noisy target t + 1 at clean up to t and at itself."""
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    itself = torch.eye(num_tokens, dtype=torch.bool)
    nothing = torch.zeros_like(causal)
    return torch.cat((torch.cat((causal, nothing), dim=1), torch.cat((causal, itself), dim=1)))


class Denoiser(nn.Module):
    """Embedding, time embedding, layers and head of one stage; nothing of it is another stage's."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: RunConfig, layers: range) -> None:
        super().__init__()
        model = config.model
        self.blocktrain: BlockTrainConfig = config.blocktrain
        self.embed_tokens = nn.Embedding(model.vocab_size, model.width)
        self.noisy = nn.Linear(model.width, model.width, bias=False)
        self.time = TimeEmbedding()
        self.layers = nn.ModuleDict({str(index): ModulatedLayer(model) for index in layers})
        self.norm = RmsNorm(model.width, model.norm_eps)
        self.lm_head = nn.Linear(model.width, model.vocab_size, bias=False)
        cos, sin = rope_tables(model, config.training.num_tokens + 1)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, noisy_BTD: Tensor, sigma_B: Tensor, ids_BT: Tensor) -> Tensor:
        """(B, T, V) float32 logits of the tokens whose noisy embeddings these are; see DenoisingBlock."""
        scale = self.blocktrain.sigma_data
        sigma_B11 = sigma_B[:, None, None]
        total_B11 = (sigma_B11.square() + scale**2).sqrt()
        time_BE = self.time(sigma_B.log() / 4)
        found_BTD = self._network(noisy_BTD / total_B11, time_BE, ids_BT).to(torch.float32)
        skipped_BTD = (scale / total_B11) ** 2 * noisy_BTD
        denoised_BTD = skipped_BTD + sigma_B11 * scale / total_B11 * found_BTD
        logits_BTV: Tensor = self.lm_head(self.norm(denoised_BTD))
        return logits_BTV.to(torch.float32)

    def _network(self, scaled_BTD: Tensor, time_BE: Tensor, ids_BT: Tensor) -> Tensor:
        """F of the preconditioning."""
        num_tokens = ids_BT.shape[1]
        clean_BTD, noisy_BTD = self.embed_tokens(ids_BT), self.noisy(scaled_BTD)
        if self.blocktrain.context is DiffusionContext.SINGLE:
            rope = (self.cos[:num_tokens], self.sin[:num_tokens])
            return self._run_layers(clean_BTD + noisy_BTD, rope, time_BE, None)
        both = torch.cat((torch.arange(num_tokens), torch.arange(1, num_tokens + 1)))
        rope = (self.cos[both], self.sin[both])
        stream_BTD = torch.cat((clean_BTD, noisy_BTD), dim=1)
        return self._run_layers(stream_BTD, rope, time_BE, concat_mask(num_tokens))[:, num_tokens:]

    def _run_layers(self, stream_BTD: Tensor, rope: Rope, time_BE: Tensor, mask_TT: Tensor | None) -> Tensor:
        for layer in self.layers.values():
            assert isinstance(layer, ModulatedLayer)
            stream_BTD = layer.denoise(stream_BTD, rope, time_BE, mask_TT)
        return stream_BTD
