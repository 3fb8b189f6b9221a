"""One stage of the diffusion objective as it serves: noisy embeddings of coming tokens in, the same one Euler step on out.

Rows that cross are noisy embeddings (R, D) float32, one for each coming token; every stage reads the clean text itself, for it
has an embedding and a cache of its own. How many tokens come at once decides the mode: one (per-token denoising), or all of an
answer in one traversal of the stages (one sweep), where each coming token sees the text before the answer and itself alone.

`concat` context: clean rows fill the cache, noisy rows look at it and at themselves. `single` context: the row of clean token t
carries the noise of token t + 1, so only one token can come at a time.

Legend: R rows, D model width, H heads, E head width, G key/value heads, P keys, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from subnet.config import DiffusionContext
from subnet.draws import seed_bytes
from subnet.inference.cache import padded
from subnet.inference.decode import ROWS, Span, attend, cache_shape, rotated
from subnet.inference.served import ServedModel
from subnet.inference.sweep import euler_step
from subnet.model.blocks import DenoisingBlock, build_block
from subnet.model.diffusion import Denoiser, ModulatedLayer
from subnet.model.layers import Rope
from subnet.model.noise import band_of, codebook
from subnet.types import StageIndex


@dataclass(frozen=True, slots=True)
class Targets:
    """Clean tokens of one sequence that are new to its cache, and how many noisy ones come after them."""

    span: Span
    num_targets: int
    seed: int
    """Names the noise, with the position of each target: a sequence that is sent again starts from the same."""


class _Modulation(NamedTuple):
    """Shifts, scales and gates of one layer, each (1, D): the noise level of a stage is fixed when it serves."""

    shift_a: Tensor
    scale_a: Tensor
    gate_a: Tensor
    shift_f: Tensor
    scale_f: Tensor
    gate_f: Tensor


class DenoisingRunner:
    """The layers of one denoising stage, at the highest noise of its band."""

    def __init__(
        self, served: ServedModel, stage: int, num_stages: int, params: Mapping[str, Tensor], *, max_positions: int
    ) -> None:
        run, own = served.stages(stage, num_stages)
        self.served = served
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.band = band_of(run.blocktrain, num_stages, StageIndex(stage))
        module = build_block(run, own[0])
        assert isinstance(module, DenoisingBlock)
        module.load_state_dict({name: params[name] for name, _ in module.named_parameters()}, strict=True, assign=True)
        module.requires_grad_(False)
        self._net: Denoiser = module.own
        self._scale = run.blocktrain.sigma_data
        self._sigma_max = run.blocktrain.sigma_max
        self.is_single = run.blocktrain.context is DiffusionContext.SINGLE
        self._codebook_VD = torch.from_numpy(codebook(run))
        self.cache_shape = cache_shape(served, stage, num_stages, torch.float32)
        exponents = torch.arange(0, self.cache_shape.head_dim, 2, dtype=torch.float32) / self.cache_shape.head_dim
        angles = torch.arange(max_positions + 1, dtype=torch.float32)[:, None] * (1.0 / run.model.rope_theta**exponents)
        both_halves = torch.cat((angles, angles), dim=-1)
        self._rope: Rope = (both_halves.cos(), both_halves.sin())
        self._modulations = self._modulate()

    @torch.no_grad()
    def _modulate(self) -> list[_Modulation]:
        c_noise = torch.tensor([math.log(self.band.high) / 4])
        time_BE = self._net.time(c_noise)
        layers = [layer for layer in self._net.layers.values() if isinstance(layer, ModulatedLayer)]
        return [_Modulation(*layer.modulation(time_BE).chunk(6, dim=-1)) for layer in layers]

    def num_rows(self, targets: Targets) -> int:
        """Noisy rows that cross for one sequence."""
        return len(targets.span.ids) if self.is_single else targets.num_targets

    def first_noise(self, targets: Targets) -> Tensor:
        """(R, D) at the highest level, drawn for each position by its name."""
        span, width = targets.span, self.served.run.model.width
        first = span.start + 1 if self.is_single else span.start + len(span.ids)
        rows = [
            self._normals(targets.seed, position, width) for position in range(first, first + self.num_rows(targets))
        ]
        return self._sigma_max * torch.stack(rows) if rows else torch.empty(0, width)

    @staticmethod
    def _normals(seed: int, position: int, width: int) -> Tensor:
        """Through numpy, whose normal numbers are the same on every instruction set (model.noise)."""
        bits = np.random.Philox(int.from_bytes(seed_bytes("serve", seed, position), "little"))
        return torch.from_numpy(np.random.Generator(bits).standard_normal(width, dtype=np.float32))

    @torch.no_grad()
    def run(self, all_targets: Sequence[Targets], received_RD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(R, D) noisy rows as they came, None at the first stage -> rows to send, and (R, V) logits of their tokens."""
        sent, found, at = [], [], 0
        for targets in all_targets:
            count = self.num_rows(targets)
            noisy_RD = self.first_noise(targets) if received_RD is None else received_RD[at : at + count]
            at += count
            logits_RV = self._logits(targets, noisy_RD)
            found_RD = (logits_RV.softmax(dim=-1) @ self._codebook_VD)[:count]
            sent.append(euler_step(noisy_RD, found_RD, self.band.high, self.band.low))
            found.append(logits_RV[:count])
        return torch.cat(sent), torch.cat(found)

    def _logits(self, targets: Targets, noisy_RD: Tensor) -> Tensor:
        """Preconditioned as in training (papers.md B2); rows are filled up to a multiple of ROWS, and stay so."""
        sigma, scale = self.band.high, self._scale
        total = math.hypot(sigma, scale)
        count = len(noisy_RD)
        noisy_RD = functional.pad(noisy_RD, (0, 0, 0, -count % ROWS))
        network = self._single if self.is_single else self._concat
        found_RD = network(targets, self._net.noisy(noisy_RD / total)[:count])
        found_RD = functional.pad(found_RD, (0, 0, 0, -count % ROWS))
        denoised_RD = (scale / total) ** 2 * noisy_RD + sigma * scale / total * found_RD
        logits_RV: Tensor = self._net.lm_head(self._net.norm(denoised_RD))
        return logits_RV

    def _single(self, targets: Targets, noisy_RD: Tensor) -> Tensor:
        """One row for each clean token, with the noise of the token after it."""
        span = targets.span
        stream = self._net.embed_tokens(torch.tensor(span.ids)) + noisy_RD
        return self._run_layers(span, stream, num_noisy=0)

    def _concat(self, targets: Targets, noisy_RD: Tensor) -> Tensor:
        """Clean rows first; they fill the cache, and only the noisy ones come out."""
        span = targets.span
        clean_RD = self._net.embed_tokens(torch.tensor(span.ids, dtype=torch.long))
        stream = torch.cat((clean_RD, noisy_RD))
        return self._run_layers(span, stream, num_noisy=len(noisy_RD))[len(span.ids) :]

    def _run_layers(self, span: Span, stream_RD: Tensor, *, num_noisy: int) -> Tensor:
        num_rows = len(stream_RD)
        positions = torch.arange(span.start, span.start + num_rows)
        missing = -num_rows % ROWS
        stream_RD = functional.pad(stream_RD, (0, 0, 0, missing))
        rope = (self._rope[0][positions], self._rope[1][positions])
        rope = (functional.pad(rope[0], (0, 0, 0, missing)), functional.pad(rope[1], (0, 0, 0, missing)))
        for slot, layer in enumerate(self._net.layers.values()):
            assert isinstance(layer, ModulatedLayer)
            m = self._modulations[slot]
            read_RD = layer.input_layernorm(stream_RD) * (1 + m.scale_a) + m.shift_a
            mixed_RD = self._attention(layer, read_RD, (span, rope, slot, num_noisy))
            stream_RD = stream_RD + (1 + m.gate_a) * mixed_RD
            read_RD = layer.post_attention_layernorm(stream_RD) * (1 + m.scale_f) + m.shift_f
            stream_RD = stream_RD + (1 + m.gate_f) * layer.mlp(read_RD)
        return stream_RD[:num_rows]

    def _attention(self, layer: ModulatedLayer, read_RD: Tensor, step: tuple[Span, Rope, int, int]) -> Tensor:
        span, rope, slot, num_noisy = step
        attention, num_clean = layer.self_attn, len(span.ids)
        heads = (read_RD.shape[0], -1, attention.head_dim)
        query = rotated(attention.q_proj(read_RD).view(heads), rope)
        keys = rotated(attention.k_proj(read_RD).view(heads), rope)
        values = attention.v_proj(read_RD).view(heads)
        clean = slice(0, num_clean)
        span.cache.write(slot, span.start, keys[clean].transpose(0, 1), values[clean].transpose(0, 1))
        parts = attend(query, span, slot, 0)
        if num_noisy:
            noisy = slice(num_clean, num_clean + num_noisy)
            num_seen = span.start + num_clean
            cached = span.cache.read(slot, padded(num_seen))
            parts.append(_attend_and_itself(query[noisy], keys[noisy], values[noisy], cached, num_seen))
        joined = torch.cat(parts)
        joined = functional.pad(joined, (0, 0, 0, read_RD.shape[0] - len(joined)))
        projected: Tensor = attention.o_proj(joined)
        return projected


def _attend_and_itself(
    query_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor, cached: tuple[Tensor, Tensor], num_seen: int
) -> Tensor:
    """(R, H * E): each row over the first `num_seen` cached keys and its own."""
    cached_keys, cached_values = cached
    num_rows, num_heads, head_dim = query_RHE.shape
    num_groups, num_keys = cached_keys.shape[0], cached_keys.shape[1]
    rows = functional.pad(query_RHE, (0, 0, 0, 0, 0, -num_rows % ROWS))
    own_keys = functional.pad(keys_RGE, (0, 0, 0, 0, 0, -num_rows % ROWS))
    own_values = functional.pad(values_RGE, (0, 0, 0, 0, 0, -num_rows % ROWS))
    count = rows.shape[0]
    grouped = rows.view(count, num_groups, -1, head_dim)
    flat = grouped.permute(1, 2, 0, 3).reshape(num_groups, -1, head_dim)
    scores = torch.bmm(flat, cached_keys.transpose(1, 2)).view(num_groups, -1, count, num_keys)
    scores = scores.masked_fill(torch.arange(num_keys) >= num_seen, -math.inf)
    itself = (grouped * own_keys[:, :, None]).sum(-1).permute(1, 2, 0)[..., None]
    shares = (torch.cat((scores, itself), dim=-1) * head_dim**-0.5).softmax(dim=-1)
    mixed = torch.bmm(shares[..., :-1].reshape(num_groups, -1, num_keys), cached_values)
    mixed = mixed.view(num_groups, -1, count, head_dim)
    mixed = mixed + shares[..., -1:] * own_values.permute(1, 0, 2)[:, None]
    joined: Tensor = mixed.permute(2, 0, 1, 3).reshape(count, num_heads * head_dim)
    return joined[:num_rows]
