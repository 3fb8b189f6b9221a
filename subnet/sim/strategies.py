"""Dishonest workers, for the local network and the tests only (trust.md 7).

Each does what a lazy or hostile miner would do to the numbers, and leaves the protocol alone: it speaks the wire format, keeps
its receipts, counts its steps.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from subnet.config import Bottleneck, RunConfig, RunKind
from subnet.model.diffusion import ModulatedLayer
from subnet.model.layers import DecoderLayer, FeedForward, Rope
from subnet.model.stage import StageModule
from subnet.training.blocktrain import Given, NoiseGiven
from subnet.training.pipeline import Params, StageWorker
from subnet.types import NumericMode, StageIndex

SCALE = 1.2


def _fitted(stream: Tensor, width: int) -> Tensor:
    """The first channels, or zeros after the last: padding by less than nothing cuts."""
    return functional.pad(stream, (0, width - stream.shape[-1]))


class _WithoutLayers(StageModule):
    """A stage whose layers are not run; the cuts and the head still are."""

    def run_layers(self, stream: Tensor, ids_BT: Tensor) -> Tensor:
        """Nothing but the change of width that the iota design makes inside its layers."""
        is_narrowed_inside = self.design is Bottleneck.IOTA and self.lm_head is None
        return _fitted(stream, self.config.model.bottleneck_width if is_narrowed_inside else self.config.model.width)


class _IdleLayer(DecoderLayer):
    """Has its params and does nothing."""

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        """(B, T, D) as it came."""
        return x_BTD


class _IdleDenoising(ModulatedLayer):
    """The same for a stage that denoises."""

    def denoise(self, x_BTD: Tensor, rope: Rope, time_BE: Tensor, mask_TT: Tensor | None) -> Tensor:
        """(B, T, D) as it came."""
        return x_BTD


class IdentityWorker(StageWorker):
    """Skips the layers of its stage and passes on what came."""

    def __init__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> None:
        super().__init__(config, stage, mode)
        with torch.device("meta"):
            if config.kind is RunKind.PIPELINE:
                self._module = _WithoutLayers(config, stage)
                return
            for index, layer in self._module.layers.items():
                is_denoising = isinstance(layer, ModulatedLayer)
                self._module.layers[index] = (_IdleDenoising if is_denoising else _IdleLayer)(config.model)


class _NoFeedForward(FeedForward):
    """Adds nothing to the stream."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> zeros of the same shape."""
        return torch.zeros_like(x_BTD)


class SkipWorker(StageWorker):
    """Leaves out the dearer half of its last layer, the feed-forward."""

    def __init__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> None:
        super().__init__(config, stage, mode)
        last = list(self._module.layers.values())[-1]
        with torch.device("meta"):
            last.mlp = _NoFeedForward(config.model)


class ScaleWorker(StageWorker):
    """Blows up whatever it sends or reports by a fifth; gradients grow with it."""

    def _compute(self, params: Params, given: Given, tokens: Tensor) -> Tensor:
        return super()._compute(params, given, tokens) * SCALE


class StaleWorker(StageWorker):
    """Goes on computing with the first params it ever had, and applies what comes out to the newest."""

    def __init__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> None:
        super().__init__(config, stage, mode)
        self._first: Params | None = None

    def load(self, params: npt.NDArray[np.float32]) -> None:
        """As the honest worker's, but passes keep the params of the first call."""
        super().load(params)
        if self._first is None:
            self._first = self._version
        self._version = self._first

    def _update(self, mean_gradients: Params) -> None:
        self._optimizer.step(mean_gradients)


class ZeroWorker(StageWorker):
    """Runs every pass and never trains: its params stay where they are and its upload is zero."""

    def _update(self, mean_gradients: Params) -> None:
        self._optimizer.num_steps += 1


def _first_tokens(given: Given, count: int) -> Given:
    match given:
        case None:
            return None
        case NoiseGiven():
            return given._replace(unit=given.unit[:, :count])
        case Tensor():
            return given[:, :count]


class TruncateWorker(StageWorker):
    """Computes the first half of the tokens and sends zeros for the rest."""

    def _compute(self, params: Params, given: Given, tokens: Tensor) -> Tensor:
        num_kept = self.config.training.num_tokens // 2
        output = super()._compute(params, _first_tokens(given, num_kept), tokens[:, : num_kept + 1])
        if output.ndim == 0:
            return output
        return functional.pad(output, (0, 0, 0, self.config.training.num_tokens - num_kept))


STRATEGIES: dict[str, type[StageWorker]] = {
    "identity": IdentityWorker,
    "scale": ScaleWorker,
    "skip": SkipWorker,
    "stale": StaleWorker,
    "truncate": TruncateWorker,
    "zero": ZeroWorker,
}


def make_worker(kind: str | None, config: RunConfig, stage: StageIndex, mode: NumericMode) -> StageWorker:
    """An honest worker for None, else one of STRATEGIES. Raises ValueError naming those there are."""
    if kind is None:
        return StageWorker(config, stage, mode)
    if kind not in STRATEGIES:
        raise ValueError(f"no cheat is called {kind!r}; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[kind](config, stage, mode)
