"""Muon whose orthogonalization runs in float32, which torch's own does in bfloat16 (DESIGN.md D80)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic x -> a x + b x^3 + c x^5, steepest at zero: singular values go to the interval .7 to 1.2, not to 1."""
NUM_ITERATIONS = 5
_LEAST_NORM = 1e-7


def orthogonalized(matrix: Tensor) -> Tensor:
    """Newton-Schulz iteration on (A, B) float32: the same singular vectors, every singular value of weight near 1."""
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=_LEAST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


class Muon(torch.optim.Muon):
    """torch's Muon but for the precision of its iteration: Nesterov momentum, decoupled decay, rate times sqrt(max(1, A / B))."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(list(params), lr=lr, weight_decay=weight_decay, momentum=momentum)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # gradients are given, nothing is called for them
        """Update every param that has a gradient; `momentum_buffer` has to be in the state already."""
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), float(group["momentum"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                state: dict[str, Any] = self.state[param]
                buffer: Tensor = state["momentum_buffer"]
                buffer.lerp_(param.grad, 1 - momentum)
                update = orthogonalized(param.grad.lerp(buffer, momentum))
                num_rows, num_columns = param.shape
                param.mul_(1 - rate * float(group["weight_decay"]))
                param.add_(update, alpha=-rate * max(1.0, num_rows / num_columns) ** 0.5)
