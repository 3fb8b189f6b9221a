"""All stages in one process, with the same rounding at the cuts and no bytes in between: reference and evaluation."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from subnet.config import RunConfig
from subnet.model.payload import as_sent
from subnet.model.stage import build_stage
from subnet.types import StageIndex


class WholeModel:
    """The composition of every stage; params are handed to each call, one mapping for each stage."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._modules = [build_stage(config, StageIndex(stage)) for stage in range(config.training.num_stages)]

    def loss(self, params: Sequence[Mapping[str, Tensor]], tokens: Tensor, *, wires_zeroed: bool = False) -> Tensor:
        """Mean loss of (B, T + 1) ids; with `wires_zeroed`, zeros arrive at every cut and only the ids are left."""
        carried: Tensor | None = None
        for module, own in zip(self._modules, params, strict=True):
            if carried is not None:
                carried = torch.zeros_like(carried) if wires_zeroed else as_sent(self.config, carried)
            carried = functional_call(module, dict(own), (carried, tokens))
        assert carried is not None
        return carried
