"""One miner's computation: forward and backward passes of its stage, and inner steps that leave open samples alone.

A stage of a BlockTrain run is driven in the same way: it is first and last at once, and only where its loss comes from differs
(blocktrain.py).

A backward pass uses the params its forward used, however many steps lie between (system.md 4a): a step hands out a new
version of the params, live graphs keep theirs, and gradients of every version go into one accumulator. Results are a function
of the calls and their order, so a replay repeats them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call

from subnet.config import RunConfig, RunKind
from subnet.errors import InvariantBroken, ProtocolViolation
from subnet.model.blocks import build_block
from subnet.model.flat import flatten, unflatten
from subnet.model.partition import is_first, is_last, neighbours_of, param_shapes
from subnet.model.payload import decode_payload, encode_payload
from subnet.model.stage import build_stage
from subnet.training.blocktrain import Given, LocalObjective, make_objective
from subnet.training.checkpoint import CheckpointState, read_checkpoint, write_checkpoint
from subnet.training.optimizers import InnerOptimizer
from subnet.types import NumericMode, StageIndex

SampleKey = tuple[int, int, int]
"""As `wire.sample_key` makes it."""
Params = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`payload` is None on the last stage, `loss` (mean nats for each token, a float32 value) on every other.

    The loss of a BlockTrain stage is that of its local objective, which may weigh or add cross entropies.
    """

    payload: bytes | None
    loss: float | None


@dataclass(slots=True)
class _OpenSample:
    """The graph of one forward pass; `output` is None once a failed backward has used it up."""

    params: Params
    received: Tensor | None
    output: Tensor | None


class StageWorker:
    """Holds params, optimizer state, the gradients accumulated so far and the graphs of open samples."""

    def __init__(self, config: RunConfig, stage: StageIndex, mode: NumericMode = NumericMode.FP32) -> None:
        self.config = config
        self.stage = stage
        self.mode = mode
        self._is_first = is_first(config, stage)
        self._is_last = is_last(config, stage)
        is_alone = config.kind is RunKind.BLOCKTRAIN
        self._module = build_block(config, stage) if is_alone else build_stage(config, stage)
        self._objective: LocalObjective | None = None
        self._shapes = param_shapes(config, stage)
        self._optimizer = InnerOptimizer(config, stage, self._shapes)
        self._version = self._new_version()
        self._open: dict[SampleKey, _OpenSample] = {}
        self._sum: Params | None = None
        self._num_accumulated = 0
        self._num_steps = 0
        if is_alone and not neighbours_of(config, stage):
            self.load_neighbours({})

    @property
    def num_open(self) -> int:
        """Samples between their forward and their backward or drop."""
        return len(self._open)

    @property
    def open_keys(self) -> tuple[SampleKey, ...]:
        """Keys of open samples, oldest first."""
        return tuple(self._open)

    @property
    def num_accumulated(self) -> int:
        """Backward passes since the last step."""
        return self._num_accumulated

    @property
    def num_steps(self) -> int:
        """Inner steps since the epoch began: the version of the params that the next forward uses."""
        return self._num_steps

    def load(self, params: npt.NDArray[np.float32]) -> None:
        """Start an epoch from `params`: counts and accumulator are emptied, the optimizer state is kept.

        Raises ProtocolViolation (not params of this stage), InvariantBroken (samples are open).
        """
        self._require_none_open("load params")
        self._optimizer.load(unflatten(params, self._shapes))
        self._version = self._new_version()
        self._sum, self._num_accumulated, self._num_steps = None, 0, 0

    def load_neighbours(self, params: Mapping[StageIndex, npt.NDArray[np.float32]]) -> None:
        """Published params of every stage of `neighbours_of` this one, which a BlockTrain stage computes with in this epoch.

        Raises ProtocolViolation (not params of their stage), InvariantBroken (not these stages, or samples are open).
        """
        self._require_none_open("load neighbours")
        self._objective = make_objective(self.config, self.stage, params)

    def params(self) -> npt.NDArray[np.float32]:
        """The current params, flat."""
        return flatten(self._optimizer.params)

    def forward(self, key: SampleKey, tokens: npt.NDArray[np.int64], activation: bytes | None) -> ForwardResult:
        """Run the stage on (B, T + 1) ids and what came over the wire, and keep the graph under `key`.

        Raises ProtocolViolation: payload of a wrong size or not finite, or the sample is open already.
        """
        if key in self._open:
            raise ProtocolViolation(f"sample {key} is open already: a sample passes a stage once")
        received, ids = self._received(activation), self._ids(tokens)
        output = self._compute(self._version, self._given(key, received, ids), ids)
        if self._is_last:
            loss = float(output.detach())
            if not np.isfinite(loss):
                raise ProtocolViolation(f"loss of sample {key} is {loss}")
            result = ForwardResult(payload=None, loss=loss)
        else:
            result = ForwardResult(payload=encode_payload(self.config, output), loss=None)
        self._open[key] = _OpenSample(params=self._version, received=received, output=output)
        return result

    def backward(self, key: SampleKey, gradient: bytes | None) -> bytes | None:
        """Add the sample's gradient to the accumulator and return what goes upstream (None from stage 0).

        Raises ProtocolViolation: bad payload, or no such open sample; the sample then stays open, to be dropped.
        """
        sample = self._open.get(key)
        if sample is None or sample.output is None:
            raise ProtocolViolation(f"sample {key} has no forward pass here that waits for its gradient")
        wanted = self._gradient(gradient)
        leaves = list(sample.params.values())
        if sample.received is not None:
            leaves.append(sample.received)
        output, sample.output = sample.output, None
        gradients = torch.autograd.grad(output, leaves, grad_outputs=wanted, materialize_grads=True)
        payload = encode_payload(self.config, gradients[-1]) if sample.received is not None else None
        self._accumulate(dict(zip(sample.params, gradients, strict=False)))
        del self._open[key]
        return payload

    def drop(self, key: SampleKey) -> None:
        """Forget an open sample. Raises ProtocolViolation when there is none."""
        if self._open.pop(key, None) is None:
            raise ProtocolViolation(f"sample {key} is not open")

    def step(self) -> None:
        """One inner step with the mean of the accumulated gradients. Raises ProtocolViolation when there are none."""
        if self._sum is None:
            raise ProtocolViolation("an inner step needs at least one backward pass before it")
        self._update({name: total / self._num_accumulated for name, total in self._sum.items()})
        self._sum, self._num_accumulated = None, 0
        self._num_steps += 1

    def snapshot(self) -> CheckpointState:
        """Params, optimizer state and counts, sharing memory with this worker. Raises InvariantBroken unless drained."""
        self._require_none_open("take a checkpoint")
        if self._num_accumulated:
            raise InvariantBroken(
                f"cannot take a checkpoint with {self._num_accumulated} gradients accumulated: step first"
            )
        return CheckpointState(
            params={name: param.detach() for name, param in self._optimizer.params.items()},
            state=self._optimizer.state(),
            num_steps=self._num_steps,
            num_optimizer_steps=self._optimizer.num_steps,
        )

    def checkpoint(self) -> bytes:
        """The snapshot as bytes; the same state gives the same bytes. Raises InvariantBroken unless drained."""
        return write_checkpoint(self.snapshot())

    def restore(self, data: bytes) -> None:
        """Go on from a checkpoint. Raises ProtocolViolation (not one of this stage), InvariantBroken (samples are open)."""
        self._require_none_open("restore a checkpoint")
        found = read_checkpoint(self.config, self.stage, data)
        self._optimizer.load(found.params)
        self._optimizer.load_state(found.state, found.num_optimizer_steps)
        self._version = self._new_version()
        self._sum, self._num_accumulated, self._num_steps = None, 0, found.num_steps

    # ---- how the numbers come about; dishonest workers of the simulator override these two ----

    def _compute(self, params: Params, given: Given, tokens: Tensor) -> Tensor:
        """The stage's output, with its graph."""
        with torch.enable_grad(), self._autocast():
            if self._objective is not None:
                return self._objective.loss(self._module, params, given, tokens)
            output: Tensor = functional_call(self._module, params, (given, tokens))
        return output

    def _update(self, mean_gradients: Params) -> None:
        """Make the next version of the params."""
        self._optimizer.step(mean_gradients)
        self._version = self._new_version()

    # ---- the rest ----

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.mode is NumericMode.BF16_AUTOCAST)

    def _given(self, key: SampleKey, received: Tensor | None, tokens: Tensor) -> Given:
        if self.config.kind is RunKind.PIPELINE:
            return received
        if self._objective is None:
            raise InvariantBroken(f"stage {self.stage} computes with published neighbours: load them first")
        with self._autocast():
            return self._objective.given(key[0], key[1], tokens)

    def _new_version(self) -> Params:
        return {name: param.detach().clone().requires_grad_() for name, param in self._optimizer.params.items()}

    def _ids(self, tokens: npt.NDArray[np.int64]) -> Tensor:
        training = self.config.training
        expected = (training.microbatch_size, training.num_tokens + 1)
        if tokens.shape != expected or tokens.dtype != np.int64:
            raise ValueError(f"tokens must be int64 {expected}, got {tokens.dtype} {tokens.shape}")
        return torch.from_numpy(np.array(tokens))

    def _received(self, activation: bytes | None) -> Tensor | None:
        if self._is_first != (activation is None):
            raise ProtocolViolation(f"stage {self.stage} takes {'no' if self._is_first else 'an'} activation")
        return None if activation is None else decode_payload(self.config, activation).requires_grad_()

    def _gradient(self, gradient: bytes | None) -> Tensor | None:
        if self._is_last != (gradient is None):
            raise ProtocolViolation(f"stage {self.stage} takes {'no' if self._is_last else 'a'} gradient")
        return None if gradient is None else decode_payload(self.config, gradient)

    def _accumulate(self, gradients: Params) -> None:
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
            raise ProtocolViolation("the pass gave a gradient with NaN or infinity: drop the sample")
        total = self._sum
        self._sum = gradients if total is None else {name: total[name] + gradients[name] for name in total}
        self._num_accumulated += 1

    def _require_none_open(self, what: str) -> None:
        if self._open:
            raise InvariantBroken(f"cannot {what} with {len(self._open)} samples open: finish or drop them first")
