"""Stages of the objective `pooled` as they serve: each is a small Llama over the tokens, and their logits are added up.

Hosts read the same tokens and keep caches of their own. From one to the next goes the sum of logits so far, in the order of the
stages and in float32, and only for tokens that are wanted; the last divides it. So the sum has the bits that adding up in one
place would give, however the stages are dealt out to hosts.

A stage needs no row of another for its own logits, so all hosts compute at once, when the gateway tells them the tokens; only the
adding up waits for the sum (`own`, `add`).

Legend: S stages of a host, R rows of which logits are wanted, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from subnet.config import RunConfig
from subnet.inference.decode import Span, StageRunner, cache_shape, torch_dtype
from subnet.inference.served import ServedModel
from subnet.model.export import llama_name
from subnet.model.partition import layers_of, param_shapes
from subnet.types import StageIndex


class PooledRunner:
    """The stages that one host holds, each with its layers of a sequence's cache. `params` are named as in the run."""

    def __init__(
        self, served: ServedModel, stage: int, num_stages: int, params: Mapping[str, Tensor], *, max_positions: int
    ) -> None:
        run, own = served.stages(stage, num_stages)
        self.served = served
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.runners: list[StageRunner] = []
        """Of its stages, in order."""
        for each in own:
            named = _as_alone(run, each, params)
            self.runners.append(StageRunner(served.alone(each), 0, 1, named, max_positions=max_positions))
        self._num_pooled = run.training.num_stages
        self.cache_shape = cache_shape(served, stage, num_stages, torch_dtype(served.dtype))

    @torch.no_grad()
    def own(self, spans: Sequence[Span], wanted: Sequence[int]) -> Tensor:
        """All tokens into the caches; (S, R, V) logits of each of this host's stages.

        `wanted` are those among the tokens of all spans after which logits are asked for.
        """
        found, first = [], 0
        for runner in self.runners:
            count = runner.cache_shape.num_layers
            stream = runner.run([Span(span.cache.layers(first, count), span.start, span.ids) for span in spans], None)
            first += count
            if wanted:
                found.append(runner.logits(stream[list(wanted)]))
        return torch.stack(found) if found else torch.empty(len(self.runners), 0, self.served.wire_width)

    def add(self, received_RV: Tensor | None, own_SRV: Tensor) -> Tensor:
        """(R, V) sums as they came, None at the first host -> the same with this host's stages added, one after the other."""
        sums_RV = received_RV
        for stage_RV in own_SRV:
            sums_RV = stage_RV if sums_RV is None else sums_RV + stage_RV
        assert sums_RV is not None, "a host has at least one stage"
        return sums_RV

    def mean(self, sums_RV: Tensor) -> Tensor:
        """(R, V) sums over all stages -> the logits of the model."""
        return sums_RV / self._num_pooled


def _as_alone(run: RunConfig, stage: StageIndex, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Params of one stage by the names that they have in a Llama of those layers alone."""
    first = layers_of(run, stage).start
    return {llama_name(name, first_layer=first): params[name] for name in param_shapes(run, stage)}
