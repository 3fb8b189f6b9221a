"""A miner's checkpoint: params, optimizer state and step counts as one safetensors file (trust.md 1.3).

Counts are tensors, for safetensors writes its free-form metadata in no fixed order; so the same state gives the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.model.flat import flatten
from subnet.model.partition import Shapes, param_shapes
from subnet.training.optimizers import uses_muon
from subnet.types import StageIndex

NUM_STEPS = "count.num_steps"
NUM_OPTIMIZER_STEPS = "count.num_optimizer_steps"
STATE_KINDS = ("muon.momentum.", "adamw.mean.", "adamw.square.")
HEADER_BYTES_PER_TENSOR = 512


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """`num_steps` is the params version within the epoch, `num_optimizer_steps` counts over the state's whole life."""

    params: dict[str, Tensor]
    state: dict[str, Tensor]
    num_steps: int
    num_optimizer_steps: int

    def flat_params(self) -> npt.NDArray[np.float32]:
        """Params as the merge sees them."""
        return flatten(self.params)

    def state_of(self, kind: str) -> dict[str, Tensor]:
        """Every tensor of the optimizer state of one of STATE_KINDS; none when this optimizer has none."""
        return {name: tensor for name, tensor in self.state.items() if name.startswith(kind)}

    def flat_state(self, kind: str) -> npt.NDArray[np.float32]:
        """The same as one vector."""
        chosen = self.state_of(kind)
        return flatten(chosen) if chosen else np.empty(0, dtype=np.float32)


def state_shapes(config: RunConfig, shapes: Shapes) -> Shapes:
    """Name -> shape of every tensor of the optimizer state."""
    result: Shapes = {}
    for name, shape in shapes.items():
        if uses_muon(config, name, shape):
            result[f"muon.momentum.{name}"] = shape
        else:
            result[f"adamw.mean.{name}"] = shape
            result[f"adamw.square.{name}"] = shape
    return result


def write_checkpoint(checkpoint: CheckpointState) -> bytes:
    """Canonical bytes."""
    tensors = {f"param.{name}": tensor.detach() for name, tensor in checkpoint.params.items()}
    tensors |= checkpoint.state
    tensors[NUM_STEPS] = torch.tensor([checkpoint.num_steps], dtype=torch.int64)
    tensors[NUM_OPTIMIZER_STEPS] = torch.tensor([checkpoint.num_optimizer_steps], dtype=torch.int64)
    return safetensors.torch.save({name: tensors[name].contiguous() for name in sorted(tensors)})


def checkpoint_limit_bytes(config: RunConfig, stage: StageIndex) -> int:
    """More than any checkpoint of this stage has."""
    shapes = param_shapes(config, stage)
    all_shapes = [*shapes.values(), *state_shapes(config, shapes).values()]
    values = sum(int(np.prod(shape)) for shape in all_shapes)
    return 4 * values + HEADER_BYTES_PER_TENSOR * (len(all_shapes) + 2)


def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype is not torch.float32 or tuple(tensor.shape) != shape:
        raise ProtocolViolation(
            f"checkpoint tensor {name} must be float32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ProtocolViolation(f"checkpoint tensor {name} holds NaN or infinity")
    return tensor


def _count(tensors: Mapping[str, Tensor], name: str) -> int:
    tensor = tensors[name]
    if tensor.dtype is not torch.int64 or tuple(tensor.shape) != (1,) or not 0 <= int(tensor[0]) < 1 << 31:
        raise ProtocolViolation(f"checkpoint tensor {name} must be one int64 in [0, 2^31)")
    return int(tensor[0])


def read_checkpoint(config: RunConfig, stage: StageIndex, data: bytes) -> CheckpointState:
    """Strict: exactly the expected names, dtypes and shapes, finite values. Raises ProtocolViolation."""
    limit = checkpoint_limit_bytes(config, stage)
    if len(data) > limit:
        raise ProtocolViolation(f"checkpoint of {len(data)} bytes, limit {limit}")
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # KeyError: a dtype torch does not know
        raise ProtocolViolation(f"checkpoint is not a safetensors file: {error}") from error
    shapes = param_shapes(config, stage)
    of_params = {f"param.{name}": shape for name, shape in shapes.items()}
    of_state = state_shapes(config, shapes)
    expected = sorted([*of_params, *of_state, NUM_STEPS, NUM_OPTIMIZER_STEPS])
    if sorted(tensors) != expected:
        odd = sorted(set(expected) ^ set(tensors))
        raise ProtocolViolation(f"checkpoint does not have the tensors of stage {stage}: {', '.join(odd[:3])}")
    for name, shape in of_state.items():
        if name.startswith("adamw.square.") and bool((_checked(tensors, name, shape) < 0).any()):
            raise ProtocolViolation(f"checkpoint tensor {name} holds a negative mean of squares")
    return CheckpointState(
        params={name: _checked(tensors, f"param.{name}", shape) for name, shape in shapes.items()},
        state={name: _checked(tensors, name, shape) for name, shape in of_state.items()},
        num_steps=_count(tensors, NUM_STEPS),
        num_optimizer_steps=_count(tensors, NUM_OPTIMIZER_STEPS),
    )
