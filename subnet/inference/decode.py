"""One serving stage: rows of many sequences through its layers, each with its own cache (keys and values of a sequence).

A row is one token of one sequence. The same bits come out for a row whatever rows it shares a step with, and whether its
sequence is read at once or token by token, because (a) the number of rows in every product is a multiple of ROWS, with which
the libraries at hand give each row the same bits (`rows_are_independent` measures it on the machine itself, and
`rows_at_once` fixes the number where it does not hold), and (b) attention looks at a whole number of tiles of keys that
depends on the row's position alone.

Legend: R rows, D model width, K what crosses a cut, H heads, G key/value heads, E head width, P keys, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from subnet.config import Bottleneck, ModelConfig
from subnet.inference.cache import TILE, CacheShape, SequenceCache
from subnet.inference.served import RopeScaling, ServedModel
from subnet.model.bottleneck import Cut, IotaLayer, widen
from subnet.model.layers import Attention, DecoderLayer, Rope
from subnet.model.stage import StageModule, build_stage

ROWS = 4
"""Products of fewer rows take another path in the libraries (matrix by vector), and other roundings."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence: `ids` stand at positions `start` and on."""

    cache: SequenceCache
    start: int
    ids: Sequence[int]


def torch_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16."""
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def cache_shape(served: ServedModel, stage: int, num_stages: int, dtype: torch.dtype) -> CacheShape:
    """What a serving stage keeps of each position."""
    model = served.run.model
    return CacheShape(
        num_layers=served.num_layers(stage, num_stages),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.width // model.num_heads,
        dtype=dtype,
    )


def frequencies(model: ModelConfig, scaling: RopeScaling | None) -> Tensor:
    """(E / 2,) angle of one position, in each pair of channels."""
    head_dim = model.width // model.num_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / model.rope_theta**exponents
    if scaling is None:
        return plain
    wavelengths = 2 * math.pi / plain
    share = (scaling.original_positions / wavelengths - scaling.low) / (scaling.high - scaling.low)
    smooth = share.clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def rotated(x_RHE: Tensor, rope: Rope) -> Tensor:
    """Turned by the angles of each row's position, (R, E) each."""
    cos_RE, sin_RE = rope
    low, high = x_RHE.chunk(2, dim=-1)
    return x_RHE * cos_RE[:, None] + torch.cat((-high, low), dim=-1) * sin_RE[:, None]


def _tiles(start: int, stop: int) -> list[tuple[int, int, int]]:
    """(first row, end row, keys) of the rows at positions [start, stop): rows of one tile of positions see the same keys."""
    tiles = []
    at = start
    while at < stop:
        end = min(stop, (at // TILE + 1) * TILE)
        tiles.append((at - start, end - start, -(-end // TILE) * TILE))
        at = end
    return tiles


def attend(query_RHE: Tensor, span: Span, layer: int, first: int) -> list[Tensor]:
    """Attention of one sequence's rows, from row `first` on, over its cache: (rows of a tile, H * E) for each tile."""
    parts = []
    num_heads, head_dim = query_RHE.shape[1:]
    for begin, end, num_keys in _tiles(span.start, span.start + len(span.ids)):
        keys_GPE, values_GPE = span.cache.read(layer, num_keys)
        num_groups, num_rows = keys_GPE.shape[0], end - begin
        rows = query_RHE[first + begin : first + end]
        rows = functional.pad(rows, (0, 0, 0, 0, 0, -num_rows % ROWS))
        count = rows.shape[0]
        # (G, H / G * rows, E): the heads of a group share its keys, so they are rows of one product
        grouped = rows.view(count, num_groups, -1, head_dim).permute(1, 2, 0, 3).reshape(num_groups, -1, head_dim)
        scores = torch.bmm(grouped, keys_GPE.transpose(1, 2)).to(torch.float32) * head_dim**-0.5
        positions = span.start + begin + torch.arange(count)
        is_later = torch.arange(num_keys)[None] > positions[:, None]
        scores = scores.view(num_groups, -1, count, num_keys).masked_fill(is_later, -math.inf)
        shares = scores.softmax(dim=-1).to(values_GPE.dtype).view(num_groups, -1, num_keys)
        mixed = torch.bmm(shares, values_GPE).view(num_groups, -1, count, head_dim)
        parts.append(mixed.permute(2, 0, 1, 3).reshape(count, num_heads * head_dim)[:num_rows])
    return parts


class StageRunner:
    """The layers of one serving stage, without any sequence's state. `params` are named as in the run."""

    def __init__(
        self, served: ServedModel, stage: int, num_stages: int, params: Mapping[str, Tensor], *, max_positions: int
    ) -> None:
        run, own = served.stages(stage, num_stages)
        self.served = served
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.rows_at_once = 0
        """Rows of every product when it must not change; 0: any multiple of ROWS."""
        self._design = run.model.bottleneck
        self._dtype = torch_dtype(served.dtype)
        self._modules: list[StageModule] = []
        for index in own:
            module = build_stage(run, index)
            wanted = {name: params[name] for name, _ in module.named_parameters()}
            module.load_state_dict(wanted, strict=True, assign=True)
            module.requires_grad_(False)
            self._modules.append(module)
        self.cache_shape = cache_shape(served, stage, num_stages, self._dtype)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies(run.model, served.rope)
        both_halves = torch.cat((angles, angles), dim=-1)
        self._rope: Rope = (both_halves.cos().to(self._dtype), both_halves.sin().to(self._dtype))

    @torch.no_grad()
    def run(self, spans: Sequence[Span], received_RK: Tensor | None) -> Tensor:
        """(R, K) as it crossed (None at the first stage) -> (R, K) to send, or (R, D) of the last stage's layers."""
        sent = []
        for group, rows in self._groups(spans):
            own = None if received_RK is None else received_RK[rows.start : rows.stop]
            sent.append(self._run_group(group, own))
        return torch.cat(sent)

    def _groups(self, spans: Sequence[Span]) -> list[tuple[list[Span], range]]:
        """All spans together; or, where the number of rows is fixed, as many rows of one span at a time."""
        if not self.rows_at_once:
            return [(list(spans), range(sum(len(span.ids) for span in spans)))]
        groups, at = [], 0
        for span in spans:
            for begin in range(0, len(span.ids), self.rows_at_once):
                ids = span.ids[begin : begin + self.rows_at_once]
                groups.append(([Span(span.cache, span.start + begin, ids)], range(at, at + len(ids))))
                at += len(ids)
        return groups

    def _run_group(self, spans: Sequence[Span], received_RK: Tensor | None) -> Tensor:
        ids = torch.tensor([token for span in spans for token in span.ids])
        positions = torch.cat([torch.arange(span.start, span.start + len(span.ids)) for span in spans])
        num_rows = len(ids)
        missing = -num_rows % (self.rows_at_once or ROWS)
        ids, positions = functional.pad(ids, (0, missing)), functional.pad(positions, (0, missing))
        stream = None if received_RK is None else functional.pad(received_RK, (0, 0, 0, missing))
        rope = (self._rope[0][positions], self._rope[1][positions])
        slot = 0
        for module in self._modules:
            stream = self._receive(module, stream, ids)
            for layer in module.model.layers.values():
                assert isinstance(layer, DecoderLayer)
                stream = self._run_layer(module, layer, stream, (spans, ids, rope, slot))
                slot += 1
            stream = self._send(module, stream)
        assert stream is not None
        return stream[:num_rows]

    def _receive(self, module: StageModule, received_RK: Tensor | None, ids_R: Tensor) -> Tensor:
        wide = None if received_RK is None else received_RK.to(torch.float32)
        if self._design is Bottleneck.NONE and received_RK is not None:
            wide = received_RK
        return module.receive(wide, ids_R).to(self._dtype)

    def _send(self, module: StageModule, stream: Tensor) -> Tensor:
        """Rounded to what the wire carries, also between two stages that are held together."""
        if module.lm_head is not None:
            return stream
        return module.send(stream).to(torch_dtype(self.served.wire_dtype))

    def _run_layer(
        self,
        module: StageModule,
        layer: DecoderLayer,
        stream: Tensor,
        step: tuple[Sequence[Span], Tensor, Rope, int],
    ) -> Tensor:
        """As the layer itself computes it, with attention over the caches; an iota layer decodes the cut first."""
        spans, ids, rope, slot = step
        if not (isinstance(layer, IotaLayer) and layer.expand is not None):
            return layer.feed(stream + self._attention(layer, stream, (spans, rope, slot)))
        anchor_RD = _anchor(module, ids)
        rebuilt = functional.relu(layer.expand(stream))
        if anchor_RD is not None:
            rebuilt = rebuilt + anchor_RD
        mixed = self._attention(layer, rebuilt, (spans, rope, slot))
        mixed = mixed + widen(stream, mixed.shape[-1])
        return layer.feed(mixed if anchor_RD is None else mixed + anchor_RD)

    def _attention(self, layer: DecoderLayer, x_RD: Tensor, step: tuple[Sequence[Span], Rope, int]) -> Tensor:
        """(R, D) -> (R, D), without the residual; keys and values of the rows go into their caches first."""
        spans, rope, slot = step
        attention: Attention = layer.self_attn
        normed = layer.input_layernorm(x_RD)
        heads = (normed.shape[0], -1, attention.head_dim)
        query = rotated(attention.q_proj(normed).view(heads), rope)
        keys = rotated(attention.k_proj(normed).view(heads), rope)
        values = attention.v_proj(normed).view(heads)
        parts, first = [], 0
        for span in spans:
            rows = slice(first, first + len(span.ids))
            span.cache.write(slot, span.start, keys[rows].transpose(0, 1), values[rows].transpose(0, 1))
            parts += attend(query, span, slot, first)
            first = rows.stop
        joined = torch.cat(parts)
        joined = functional.pad(joined, (0, 0, 0, normed.shape[0] - joined.shape[0]))
        projected: Tensor = attention.o_proj(joined)
        return projected

    @torch.no_grad()
    def logits(self, stream_RD: Tensor) -> Tensor:
        """(R, D) of chosen rows of the last stage -> (R, V) float32."""
        module = self._modules[-1]
        assert module.model.norm is not None and module.lm_head is not None, "only the last stage has logits"
        num_rows, at_once = stream_RD.shape[0], self.rows_at_once or ROWS
        padded_rows = functional.pad(stream_RD, (0, 0, 0, -num_rows % at_once))
        groups = torch.split(padded_rows, at_once) if self.rows_at_once else (padded_rows,)
        found = torch.cat([module.lm_head(module.model.norm(group)) for group in groups])
        return found[:num_rows].to(torch.float32)


def _anchor(module: StageModule, ids_R: Tensor) -> Tensor | None:
    """What the receiver of an iota cut adds; its cut holds nothing else."""
    cuts = [cut for cut in module.cuts.values() if isinstance(cut, Cut) and cut.anchor is not None]
    anchor = cuts[0].anchor if cuts else None
    return None if anchor is None else anchor(ids_R)


def rows_are_independent(runner: StageRunner, *, num_tokens: int = 2) -> bool:
    """Whether this machine gives a sequence the same bits alone and token by token as in company and at once."""
    width = runner.served.wire_width
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.served.run.model.vocab_size, (3, num_tokens), generator=generator)
    codes = torch.randn(3, num_tokens, width, generator=generator).to(torch_dtype(runner.served.wire_dtype))
    if runner.served.run.model.bottleneck is Bottleneck.K0:
        codes = torch.zeros_like(codes)

    def pieces(bounds: Sequence[tuple[int, int]], sequences: Sequence[int]) -> list[Tensor]:
        caches = {sequence: SequenceCache(runner.cache_shape, num_tokens) for sequence in sequences}
        outs = []
        for begin, end in bounds:
            spans = [Span(caches[sequence], begin, ids[sequence, begin:end].tolist()) for sequence in sequences]
            received = None if runner.is_first else torch.cat([codes[sequence, begin:end] for sequence in sequences])
            outs.append(runner.run(spans, received)[: end - begin])
        return outs

    alone = torch.cat(pieces([(at, at + 1) for at in range(num_tokens)], [0]))
    company = torch.cat(pieces([(0, num_tokens)], [0, 1, 2]))
    if not torch.equal(alone, company):
        return False
    return not runner.is_last or torch.equal(runner.logits(company)[:1], runner.logits(company[:1]))
