"""The inner optimizer of one stage: Muon for hidden matrices, AdamW for the rest, over master params of its own.

The master params are written in place; passes never see them, only copies that a step hands out (system.md 4a).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subnet.config import OptimizerKind, RunConfig, RunKind
from subnet.model.partition import Shapes, is_lookup, num_elements
from subnet.training.muon import Muon
from subnet.training.schedule import warmup
from subnet.types import StageIndex

ADAMW_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95


def uses_muon(config: RunConfig, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a param is a hidden matrix: neither a vector, nor read by id, nor the head."""
    is_hidden = len(shape) == 2 and not is_lookup(name) and not name.endswith("lm_head.weight")
    return is_hidden and config.training.optimizer is OptimizerKind.MUON


def clip_limit(config: RunConfig, stage: StageIndex) -> float:
    """A stage's share of the whole model's gradient norm limit (papers.md A2); all of it where a stage has a loss of its own."""
    if config.kind is RunKind.BLOCKTRAIN:
        return config.training.grad_clip
    total = sum(num_elements(config, StageIndex(other)) for other in range(config.training.num_stages))
    return config.training.grad_clip * math.sqrt(num_elements(config, stage) / total)


class InnerOptimizer:
    """Master params and the state of their optimizers; every tensor of the state exists from the start, as zeros."""

    def __init__(self, config: RunConfig, stage: StageIndex, shapes: Shapes) -> None:
        self._training = config.training
        self._limit = clip_limit(config, stage)
        self.params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        self.num_steps = 0
        self._with_muon = [name for name, shape in shapes.items() if uses_muon(config, name, shape)]
        self._with_adamw = [name for name in shapes if name not in self._with_muon]
        self._optimizers: list[torch.optim.Optimizer] = []
        rates = config.training
        if self._with_muon:
            self._muon = Muon(
                [self.params[name] for name in self._with_muon],
                lr=rates.learning_rate,
                weight_decay=rates.weight_decay,
                momentum=MUON_MOMENTUM,
            )
            self._optimizers.append(self._muon)
        self._adamw = torch.optim.AdamW(
            [self.params[name] for name in self._with_adamw],
            lr=rates.adamw_learning_rate,
            betas=ADAMW_BETAS,
            weight_decay=rates.weight_decay,
            foreach=False,
        )
        self._optimizers.append(self._adamw)
        self._full_rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in self._optimizers]
        self._reset_state()

    def _reset_state(self) -> None:
        for name in self._with_muon:
            self._muon.state[self.params[name]]["momentum_buffer"] = torch.zeros_like(self.params[name])
        for name in self._with_adamw:
            state: dict[str, Any] = self._adamw.state[self.params[name]]
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(self.params[name])
            state["exp_avg_sq"] = torch.zeros_like(self.params[name])

    def state(self) -> dict[str, Tensor]:
        """The state's own tensors by name, not copies."""
        tensors = {
            f"muon.momentum.{name}": self._muon.state[self.params[name]]["momentum_buffer"] for name in self._with_muon
        }
        for name in self._with_adamw:
            state = self._adamw.state[self.params[name]]
            tensors[f"adamw.mean.{name}"] = state["exp_avg"]
            tensors[f"adamw.square.{name}"] = state["exp_avg_sq"]
        return tensors

    @torch.no_grad()
    def load(self, params: Mapping[str, Tensor]) -> None:
        """Replace the params, keep the state."""
        for name, param in self.params.items():
            param.copy_(params[name])

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Replace the state by what `state` and `num_steps` once were."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        self.num_steps = num_steps
        for name in self._with_adamw:
            self._adamw.state[self.params[name]]["step"].fill_(num_steps)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Clip, warm up, update the master params."""
        squares = [float(gradients[name].to(torch.float64).square().sum()) for name in sorted(gradients)]
        norm = math.sqrt(math.fsum(squares))
        scale = min(1.0, self._limit / norm) if norm > 0 else 1.0
        for name, param in self.params.items():
            param.grad = gradients[name] * scale
        factor = warmup(self.num_steps, self._training.warmup_steps)
        for optimizer, full_rate in zip(self._optimizers, self._full_rates, strict=True):
            optimizer.param_groups[0]["lr"] = full_rate * factor
            optimizer.step()
        for param in self.params.values():
            param.grad = None
        self.num_steps += 1
