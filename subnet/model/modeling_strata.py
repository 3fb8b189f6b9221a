"""Strata models as transformers (5.24 and later) loads them: pipelines whose cuts send K channels in place of D, and stages
that were trained apart on the tokens alone and are heard together.

`strata export` copies this file beside the params, so it imports torch and transformers alone. Load it with
`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`.

Shapes: B batch, T tokens, D model width, K bottleneck width, V vocabulary. Between two stages of a pipeline the values are
rounded to bfloat16 as they were in training; the cut itself is computed in float32.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, LlamaConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


def first_layers(num_layers: int, num_stages: int) -> list[int]:
    """First layer of each stage; where they do not divide, the later stages hold one more."""
    return [stage * num_layers // num_stages for stage in range(num_stages)]


class StrataConfig(LlamaConfig):  # type: ignore[no-untyped-call]  # transformers leaves its hook for subclasses untyped
    """Llama's shape, and what crosses the cuts between `num_stages` stages."""

    model_type = "strata"

    bottleneck: str = "resbm"
    bottleneck_width: int = 4
    boundary_width: int = 64
    num_stages: int = 3
    has_anchor: bool = True
    anchor_rank: int = 0


class StrataPooledConfig(LlamaConfig):  # type: ignore[no-untyped-call]  # as above
    """Llama's shape, its layers dealt out to `num_stages` small models that read the same tokens."""

    model_type = "strata_pooled"

    num_stages: int = 4


class StrataBoundary(nn.Module):
    """Linear, SiLU, Linear: encoder and decoder of the resbm cut."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width_in, hidden, bias=False)
        self.outer = nn.Linear(hidden, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width_in) -> (..., width_out)."""
        out: Tensor = self.outer(functional.silu(self.inner(x)))
        return out


class StrataAnchor(nn.Module):
    """An embedding of the ids that the receiver of a cut adds, full or factored."""

    def __init__(self, config: StrataConfig) -> None:
        super().__init__()
        rank = config.anchor_rank
        self.table = nn.Embedding(config.vocab_size, rank or config.hidden_size)
        self.lift = nn.Linear(rank, config.hidden_size, bias=False) if rank else None

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)."""
        rows: Tensor = self.table(ids_BT)
        return rows if self.lift is None else self.lift(rows)


class StrataCut(nn.Module):
    """Both sides of one cut."""

    def __init__(self, config: StrataConfig) -> None:
        super().__init__()
        width, hidden, channels = config.hidden_size, config.boundary_width, config.bottleneck_width
        is_resbm = config.bottleneck == "resbm"
        self.encoder = StrataBoundary(width, hidden, channels) if is_resbm else None
        self.decoder = StrataBoundary(channels, hidden, width) if is_resbm else None
        self.anchor = StrataAnchor(config) if config.has_anchor else None


class StrataLayer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]  # as above
    """A decoder layer; of the iota design, one that starts from K channels, ends in K channels, or both."""

    def __init__(self, config: StrataConfig, layer_idx: int, *, receives: bool, sends: bool) -> None:
        super().__init__(config, layer_idx)
        channels, width = config.bottleneck_width, config.hidden_size
        self.num_channels = channels
        self.expand = nn.Linear(channels, width, bias=False) if receives else None
        self.compress = nn.Linear(width, channels, bias=False) if sends else None

    def forward(self, stream: Tensor, anchor_BTD: Tensor | None = None, **attention: Any) -> Tensor:
        """(B, T, D or K) -> (B, T, D or K)."""
        start = stream
        if self.expand is not None:
            start = functional.relu(self.expand(stream.to(torch.float32))).to(stream.dtype)
        if self.expand is not None and anchor_BTD is not None:
            start = start + anchor_BTD
        mixed_BTD, _ = self.self_attn(hidden_states=self.input_layernorm(start), **attention)
        if self.expand is None:
            x_BTD = stream + mixed_BTD
        else:
            x_BTD = mixed_BTD + functional.pad(stream, (0, mixed_BTD.shape[-1] - stream.shape[-1]))
            x_BTD = x_BTD if anchor_BTD is None else x_BTD + anchor_BTD
        inner_BTD = self.mlp(self.post_attention_layernorm(x_BTD))
        if self.compress is None:
            fed_BTD: Tensor = x_BTD + inner_BTD
            return fed_BTD
        code_BTK = self.compress(functional.silu(inner_BTD.to(torch.float32)))
        sent_BTK: Tensor = code_BTK + x_BTD[..., : self.num_channels]
        return sent_BTK


class StrataBody(nn.Module):
    """What Llama keeps under `model.`."""

    def __init__(self, config: StrataConfig) -> None:
        super().__init__()
        count = config.num_hidden_layers
        firsts = set(first_layers(count, config.num_stages)[1:])
        is_iota = config.bottleneck == "iota"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            StrataLayer(config, index, receives=is_iota and index in firsts, sends=is_iota and index + 1 in firsts)
            for index in range(count)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class StrataCausal(LlamaPreTrainedModel, GenerationMixin, ABC):  # type: ignore[no-untyped-call]  # as above
    """From ids to logits with transformers' cache; subclasses embed the ids, and make logits of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    @abstractmethod
    def embed(self, ids_BT: Tensor) -> Tensor:
        """(B, T) -> (B, T, D), where the first layer starts."""

    @abstractmethod
    def logits(self, start_BTD: Tensor, ids_BT: Tensor, kept: slice | Tensor, attention: dict[str, Any]) -> Tensor:
        """From what `embed` gave and the ids -> (B, T, V) of the kept positions; `attention` is for every layer."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """(B, T) ids -> (B, T, V) logits; with `logits_to_keep`, those of the last tokens only."""
        if input_ids is None:
            raise ValueError("a Strata model needs input_ids: it embeds them in more than one place")
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        start_BTD = self.embed(input_ids)
        if position_ids is None:
            num_seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(input_ids.shape[1], device=start_BTD.device) + num_seen)[None]
        attention = {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=start_BTD,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            ),
            "position_embeddings": self.rotary_emb(start_BTD, position_ids=position_ids),
            "position_ids": position_ids,
            "cache": cache,
        }
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.logits(start_BTD, input_ids, kept, attention)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, cache=cache)


class StrataForCausalLM(StrataCausal):
    """Every stage of a pipeline in a row, with the cuts between them."""

    config_class = StrataConfig
    _no_split_modules = ["StrataLayer"]  # noqa: RUF012  # the base class has a list
    _keep_in_fp32_modules_strict = ["cuts", "expand", "compress"]  # noqa: RUF012  # as above

    def __init__(self, config: StrataConfig) -> None:
        super().__init__(config)
        self.model = StrataBody(config)
        self.cuts = nn.ModuleDict({str(cut): StrataCut(config) for cut in range(config.num_stages - 1)})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def _send(self, cut: StrataCut, stream: Tensor) -> Tensor:
        """What crosses: (B, T, K) rounded to bfloat16, or all of it; the iota design compressed in its last layer."""
        wide = stream.to(torch.float32)
        if self.config.bottleneck == "none":
            return wide
        if cut.encoder is not None:
            wide = cut.encoder(wide) + wide[..., : self.config.bottleneck_width]
        return wide.to(torch.bfloat16).to(torch.float32)

    def _receive(self, cut: StrataCut, code_BTK: Tensor, anchor_BTD: Tensor | None) -> Tensor:
        """Where the next stage's layers start from: (B, T, D), or the code itself in the iota design."""
        if self.config.bottleneck == "iota":
            return code_BTK
        if self.config.bottleneck == "k0":
            assert anchor_BTD is not None
            return anchor_BTD
        stream = code_BTK
        if cut.decoder is not None:
            stream = cut.decoder(code_BTK) + functional.pad(code_BTK, (0, self.config.hidden_size - code_BTK.shape[-1]))
        return stream if anchor_BTD is None else stream + anchor_BTD

    def embed(self, ids_BT: Tensor) -> Tensor:
        """By the first stage's table."""
        start_BTD: Tensor = self.model.embed_tokens(ids_BT)
        return start_BTD

    def logits(self, start_BTD: Tensor, ids_BT: Tensor, kept: slice | Tensor, attention: dict[str, Any]) -> Tensor:
        """Through every layer and cut, then the head."""
        firsts = first_layers(self.config.num_hidden_layers, self.config.num_stages)
        first_cuts = {layer: str(cut) for cut, layer in enumerate(firsts[1:])}
        stream, dtype = start_BTD, start_BTD.dtype
        for index, layer in enumerate(self.model.layers):
            anchor_BTD = None
            if index in first_cuts:
                cut = self.cuts[first_cuts[index]]
                assert isinstance(cut, StrataCut)
                anchor_BTD = None if cut.anchor is None else cut.anchor(ids_BT)
                stream = self._receive(cut, self._send(cut, stream), anchor_BTD).to(dtype)
                anchor_BTD = None if anchor_BTD is None else anchor_BTD.to(dtype)
            stream = layer(stream, anchor_BTD, **attention)
        logits_BTV: Tensor = self.lm_head(self.model.norm(stream)[:, kept])
        return logits_BTV


class StrataPooledStage(nn.Module):
    """A small language model of its own."""

    def __init__(self, config: StrataPooledConfig, layers: range) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): LlamaDecoderLayer(config, index) for index in layers})
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class StrataPooledForCausalLM(StrataCausal):
    """Stages that each read the tokens; the logits are the mean of theirs, a normalised geometric mean of what they say."""

    config_class = StrataPooledConfig

    def __init__(self, config: StrataPooledConfig) -> None:
        super().__init__(config)
        firsts = [*first_layers(config.num_hidden_layers, config.num_stages), config.num_hidden_layers]
        self.blocks = nn.ModuleDict(
            {
                str(stage): StrataPooledStage(config, range(firsts[stage], firsts[stage + 1]))
                for stage in range(config.num_stages)
            }
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def embed(self, ids_BT: Tensor) -> Tensor:
        """By the first stage's table; every other stage has its own."""
        first = self.blocks["0"]
        assert isinstance(first, StrataPooledStage)
        start_BTD: Tensor = first.embed_tokens(ids_BT)
        return start_BTD

    def logits(self, start_BTD: Tensor, ids_BT: Tensor, kept: slice | Tensor, attention: dict[str, Any]) -> Tensor:
        """Added up in float32 from the first stage to the last, so that the sum has the same bits everywhere."""
        total_BTV: Tensor | None = None
        for stage, block in self.blocks.items():
            assert isinstance(block, StrataPooledStage)
            stream_BTD = start_BTD if stage == "0" else block.embed_tokens(ids_BT)
            for layer in block.layers.values():
                stream_BTD = layer(stream_BTD, **attention)
            own_BTV = block.lm_head(block.norm(stream_BTD)[:, kept]).to(torch.float32)
            total_BTV = own_BTV if total_BTV is None else total_BTV + own_BTV
        assert total_BTV is not None
        return total_BTV / len(self.blocks)
