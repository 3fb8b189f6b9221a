"""Repeat one segment of a miner's epoch from its checkpoint and its receipts, and measure what differs (trust.md 2).

What does not hang together (a digest, a count, the order) raises ProtocolViolation and is a failed audit; what does is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from torch import Tensor

from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.frames import digest
from subnet.model.partition import is_first, is_last
from subnet.model.payload import decode_payload
from subnet.ports import Corpus
from subnet.receipts import extend
from subnet.training.checkpoint import STATE_KINDS, CheckpointState, read_checkpoint
from subnet.training.neighbours import NO_NEIGHBOURS, Neighbours
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.training.reachable import check_reachable
from subnet.types import NO_DIGEST, Checkpoint, Digest, Direction, Measures, NumericMode, Receipt, StageIndex
from subnet.validation.distance import Distance, Values, bf16_spacing, distance, ratio
from subnet.validation.evidence import Evidence
from subnet.validation.recording import Recording, loss_digest, tokens_digest
from subnet.validation.verdict import is_backward_failing, is_forward_failing
from subnet.wire import Challenge, sample_key

BF16_BYTES = 2
Tensors = Mapping[str, Tensor]


@dataclass(slots=True)
class Replayed:
    """Every measurement of one segment, before it is summarised."""

    forward: list[Distance] = field(default_factory=list)
    backward: list[Distance] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    failing: dict[SampleKey, bool] = field(default_factory=dict)
    num_passes: int = 0
    rel_dw: float = 0.0

    def summary(self) -> Measures:
        """Medians and extremes."""
        sent = self.forward or self.backward
        everything = self.forward + self.backward
        return Measures(
            num_passes=self.num_passes,
            num_failing=sum(self.failing.values()),
            rel_d=_median([found.rel_d for found in self.forward]),
            rel_d_max=max((found.rel_d for found in everything), default=0.0),
            rel_d_token=_median([found.rel_d_token for found in self.forward]),
            rel_d_backward=_median([found.rel_d for found in self.backward]),
            rel_dw=self.rel_dw,
            loss_error=max(self.loss_errors, default=0.0),
            cosine=_median([found.cosine for found in sent], of_nothing=1.0),
            norm_ratio=_median([found.norm_ratio for found in sent], of_nothing=1.0),
        )


def replay_segment(
    config: RunConfig, made: Recording, corpus: Corpus, mode: NumericMode, neighbours: Neighbours = NO_NEIGHBOURS
) -> Measures:
    """Measures of a segment as presented, computed in `mode`. Raises ProtocolViolation with the reason to fail it."""
    return replay_passes(config, made, corpus, mode, neighbours).summary()


def replay_passes(
    config: RunConfig, made: Recording, corpus: Corpus, mode: NumericMode, neighbours: Neighbours = NO_NEIGHBOURS
) -> Replayed:
    """The same, pass by pass."""
    challenge, evidence = made.challenge, made.evidence
    first = _opened(config, challenge.stage, made.start, challenge.start_checkpoint)
    last = _opened(config, challenge.stage, made.end, challenge.end_checkpoint)
    _check_chain(challenge, evidence)
    worker = StageWorker(config, challenge.stage, mode)
    if neighbours:
        worker.load_neighbours(neighbours)
    worker.restore(made.start)
    replay = _Replay(config, worker, evidence, corpus)
    for receipt in evidence.receipts:
        replay.repeat(receipt)
    replay.check_end()
    replay.found.rel_dw = _compare_change(first, last, worker.snapshot())
    return replay.found


def _opened(config: RunConfig, stage: StageIndex, data: bytes, announced: Checkpoint) -> CheckpointState:
    if digest(data) != announced.digest:
        raise ProtocolViolation(
            f"the checkpoint of step {announced.num_steps} is not the one whose digest was committed"
        )
    found = read_checkpoint(config, stage, data)
    if found.num_steps != announced.num_steps:
        raise ProtocolViolation(
            f"the checkpoint was taken at step {found.num_steps}, {announced.num_steps} was committed"
        )
    check_reachable(config, stage, found)
    return found


def _check_chain(challenge: Challenge, evidence: Evidence) -> None:
    start, end, receipts = challenge.start_checkpoint, challenge.end_checkpoint, evidence.receipts
    if start.num_receipts + len(receipts) != end.num_receipts:
        raise ProtocolViolation(
            f"the segment has receipts {start.num_receipts} to {end.num_receipts}, the evidence {len(receipts)} of them"
        )
    if extend(start.head, receipts) != end.head:
        raise ProtocolViolation("the receipts do not lead from the segment's first chain head to its last")
    if any((receipt.epoch, receipt.stage) != (challenge.epoch, challenge.stage) for receipt in receipts):
        raise ProtocolViolation("a receipt is of another epoch or stage")
    if len({receipt.run_id for receipt in receipts}) > 1:
        raise ProtocolViolation("the receipts are of several runs")
    num_steps = sum(receipt.direction is Direction.STEP for receipt in receipts)
    if start.num_steps + num_steps != end.num_steps:
        raise ProtocolViolation(
            f"the receipts hold {num_steps} steps, the checkpoints lie {end.num_steps - start.num_steps} apart"
        )


class _Replay:
    """One segment under way."""

    def __init__(self, config: RunConfig, worker: StageWorker, evidence: Evidence, corpus: Corpus) -> None:
        self.found = Replayed()
        self._config = config
        self._worker = worker
        self._evidence = evidence
        self._corpus = corpus
        self._is_first = is_first(config, worker.stage)
        self._is_last = is_last(config, worker.stage)
        self._steps_left = sum(receipt.direction is Direction.STEP for receipt in evidence.receipts)
        self._sent: dict[SampleKey, Digest] = {}
        self._done: dict[SampleKey, None] = {}

    def repeat(self, receipt: Receipt) -> None:
        key = sample_key(receipt.epoch, receipt.sample, receipt.branch)
        match receipt.direction:
            case Direction.FORWARD:
                self._forward(key, receipt)
            case Direction.BACKWARD:
                self._backward(key, receipt)
            case Direction.DROP:
                _require_no_digests(receipt)
                self._worker.drop(key)
            case Direction.STEP:
                _require_no_digests(receipt)
                self._step()

    def check_end(self) -> None:
        if self._worker.num_open or self._worker.num_accumulated:
            raise ProtocolViolation(
                f"the segment ends with {self._worker.num_open} samples open and {self._worker.num_accumulated} gradients"
                " accumulated; a checkpoint needs none of either"
            )

    def _forward(self, key: SampleKey, receipt: Receipt) -> None:
        if key in self._done or receipt.sample < 0:
            raise ProtocolViolation(f"sample {key} is worked twice in one segment, or is none")
        if self._worker.num_open >= self._config.training.max_in_flight:
            raise ProtocolViolation(f"more than {self._config.training.max_in_flight} samples are open at once")
        if receipt.params_version != self._worker.num_steps:
            raise ProtocolViolation(
                f"sample {key} claims params version {receipt.params_version}, the chain is at {self._worker.num_steps}"
            )
        tokens = self._corpus.tokens(receipt.epoch, receipt.sample)
        activation = None if self._is_first else self._payload(receipt.input_digest)
        if activation is None and receipt.input_digest != tokens_digest(tokens):
            raise ProtocolViolation(f"the ids of sample {key} are not the corpus's")
        result = self._worker.forward(key, tokens, activation)
        self._sent[key] = receipt.output_digest
        self.found.num_passes += 1
        self.found.failing.setdefault(key, False)
        if result.payload is None:
            self._compare_loss(key, receipt, result.loss)
            return
        claimed = self._values(self._payload(receipt.output_digest))
        given = None if activation is None else self._values(activation)
        found = distance(claimed, self._values(result.payload), given, spacing_BTK=self._spacing(claimed))
        self.found.forward.append(found)
        self.found.failing[key] |= is_forward_failing(found, self._config.audit)

    def _compare_loss(self, key: SampleKey, receipt: Receipt, replayed: float | None) -> None:
        claimed = receipt.loss
        if claimed is None or not math.isfinite(claimed) or loss_digest(claimed) != receipt.output_digest:
            raise ProtocolViolation(f"the loss of sample {key} does not have the digest of its receipt")
        assert replayed is not None
        error = ratio(abs(claimed - replayed), abs(replayed))
        self.found.loss_errors.append(error)
        self.found.failing[key] |= error > self._config.audit.max_loss_error

    def _backward(self, key: SampleKey, receipt: Receipt) -> None:
        if self._worker.num_accumulated >= self._config.training.accumulate:
            raise ProtocolViolation(f"more than {self._config.training.accumulate} backward passes between two steps")
        if self._is_last and receipt.input_digest != self._sent.get(key):
            raise ProtocolViolation(f"the backward pass of sample {key} does not start from its loss")
        gradient = None if self._is_last else self._payload(receipt.input_digest)
        payload = self._worker.backward(key, gradient)
        self._done[key] = None
        self.found.num_passes += 1
        if payload is None:
            if receipt.output_digest != NO_DIGEST:
                raise ProtocolViolation("stage 0 sends no gradient, its receipt names one")
            return
        claimed = self._values(self._payload(receipt.output_digest))
        given = None if gradient is None else self._values(gradient)
        found = distance(
            claimed,
            self._values(payload),
            given,
            spread=not self._is_last,
            spacing_BTK=self._spacing(claimed),
        )
        self.found.backward.append(found)
        self.found.failing[key] |= is_backward_failing(found, self._config.audit)

    def _step(self) -> None:
        self._steps_left -= 1
        missing = self._config.training.accumulate - self._worker.num_accumulated
        if missing > 0 and (self._steps_left or self._worker.num_open):
            raise ProtocolViolation(
                f"a step with {missing} backward passes fewer than {self._config.training.accumulate};"
                " only the last before a checkpoint may be short"
            )
        self._worker.step()

    def _payload(self, name: Digest) -> bytes:
        payload = self._evidence.payloads.get(name)
        if payload is None:
            raise ProtocolViolation(f"the evidence lacks the payload {name[:16] or 'of a receipt without digest'}")
        if digest(payload) != name:
            raise ProtocolViolation(f"the evidence holds other bytes under {name[:16]}")
        return payload

    def _spacing(self, claimed: Values) -> Values | None:
        return bf16_spacing(claimed) if self._config.wire_item_bytes == BF16_BYTES else None

    def _values(self, payload: bytes) -> Values:
        return decode_payload(self._config, payload).numpy().astype(np.float64)


def _require_no_digests(receipt: Receipt) -> None:
    if receipt.input_digest != NO_DIGEST or receipt.output_digest != NO_DIGEST or receipt.loss is not None:
        raise ProtocolViolation(f"a {receipt.direction} receipt names a payload or a loss")


def _compare_change(first: CheckpointState, claimed: CheckpointState, replayed: CheckpointState) -> float:
    """Worst of params and each kind of optimizer state: what changed here against what changed in the replay.

    The state counts too: a poisoned momentum would pass for honest training in the next segment.
    """
    if claimed.num_optimizer_steps != replayed.num_optimizer_steps:
        raise ProtocolViolation(
            f"the optimizer counts {claimed.num_optimizer_steps} steps, the replay {replayed.num_optimizer_steps}"
        )
    states = first, claimed, replayed
    of_params = _apart(*(state.params for state in states))
    return max(of_params, *(_apart(*(state.state_of(kind) for state in states)) for kind in STATE_KINDS))


def _apart(before: Tensors, claimed: Tensors, replayed: Tensors) -> float:
    """Norm of the difference of two changes over that of the replayed one; 1 when nothing was trained at all.

    Tensor by tensor: three whole states in float64 took a tenth of a replay to allocate and fill.
    """
    apart = whole = 0.0
    for name, start in before.items():
        again = replayed[name].double()
        apart += float(torch.linalg.vector_norm(again - claimed[name].double())) ** 2
        whole += float(torch.linalg.vector_norm(again - start.double())) ** 2
    return ratio(math.sqrt(apart), math.sqrt(whole))


def _median(values: list[float], *, of_nothing: float = 0.0) -> float:
    return median(values) if values else of_nothing
