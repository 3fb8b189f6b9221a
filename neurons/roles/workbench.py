"""A miner's work in one epoch: frames in, tensor work, frames out, receipts, inner steps, checkpoints (system.md 2, 4a).

Backward work goes first. A forward is admitted only while its backward still fits before the next checkpoint, so the miner
has drained when the checkpoint is due, and a segment starts and ends with nothing in flight.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neurons.roles.books import Attested, Books
from neurons.roles.delivery import Delivery
from neurons.roles.ports import MinerPorts
from subnet import frames, receipts, wire
from subnet.config import Bottleneck, RunConfig
from subnet.errors import Backpressure, ProtocolViolation, Refused, TransientFailure
from subnet.frames import Frame
from subnet.lanes import hop
from subnet.model.partition import is_first
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.types import NO_DIGEST, Digest, Direction, Epoch, FrameHeader, Hotkey, Lease, Receipt, SampleId, StageIndex

log = logging.getLogger("strata.miner")

IDLE_S = 0.25
LEASES_AHEAD = 2
LONG_SEGMENT = 6
"""Receipts of a segment for each backward of its quota, from which on it is closed early; the orchestrator takes 8."""
LOST_PAUSE_S = 1.0
"""After a forward that found no receiver: until a dead replica is known to be dead, samples are not to be burnt on it."""


@dataclass(slots=True)
class _Inbox:
    """Verified frames waiting for the worker; `seen` makes a repeated delivery harmless."""

    forward: deque[Frame] = field(default_factory=deque)
    backward: deque[Frame] = field(default_factory=deque)
    seen: dict[str, None] = field(default_factory=dict)
    activations: dict[Digest, SampleId] = field(default_factory=dict)
    """Each activation of the epoch, and the sample it came under."""
    samples: dict[SampleId, None] = field(default_factory=dict)
    """Every sample whose activation was taken in this epoch."""
    proven: dict[Lease, None] = field(default_factory=dict)
    """Leases whose signature was checked: an activation and its gradient come with the same."""


class Workbench:
    """Everything a miner does between an epoch's first and last checkpoint. One task calls `run`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run_id: str,
        orchestrator: Hotkey,
        worker: StageWorker,
        books: Books,
        delivery: Delivery,
        ports: MinerPorts,
    ) -> None:
        self.stage: StageIndex = books.stage
        self.num_refused = 0
        self._config = config
        self._run_id = run_id
        self._orchestrator = orchestrator
        self._worker = worker
        self._books = books
        self._delivery = delivery
        self._ports = ports
        self._epoch = Epoch(-1)
        self._inbox = _Inbox()
        self._leases: deque[Lease] = deque()
        self._open: dict[SampleKey, Lease] = {}
        self._lost: deque[SampleKey] = deque()
        self._segment_backwards = 0
        self._activity = asyncio.Event()
        self._leases_due_s = 0.0

    @property
    def open_samples(self) -> int:
        """Samples between their forward and their backward here."""
        return len(self._open)

    def begin(self, epoch: Epoch) -> None:
        """Take frames of `epoch` from now on."""
        self._epoch = epoch
        self._inbox, self._leases, self._open = _Inbox(), deque(), {}
        self._lost, self._segment_backwards, self._leases_due_s = deque(), 0, 0.0

    # ---- frames in ---------------------------------------------------------------------------------------------

    def expect(self, header: FrameHeader) -> None:
        """Shape, dtype, stage and signed lease that a frame must have, before room is given to it. Raises ProtocolViolation."""
        shape, dtype = self._config.wire_shape, self._config.wire_dtype
        if header.shape != shape or header.dtype != dtype:
            raise ProtocolViolation(f"frame is {header.dtype} {header.shape}, this run sends {dtype} {shape}")
        if header.stage != self.stage:
            raise ProtocolViolation(f"frame is for stage {header.stage}, this miner holds stage {self.stage}")
        lease, proven = header.lease, self._inbox.proven
        if lease not in proven:
            if not self._ports.signer.verify(self._orchestrator, receipts.lease_bytes(lease), lease.signature):
                raise ProtocolViolation("the lease is not signed by this run's orchestrator")
            proven[lease] = None

    def require_room(self, header: FrameHeader) -> None:
        """Raises Backpressure while this frame cannot be taken yet; a gradient, which frees memory, always can."""
        self._require_epoch(header.epoch)
        is_full = len(self._inbox.forward) >= 2 * self._config.training.max_in_flight
        if header.direction is Direction.FORWARD and is_full:
            raise Backpressure("the buffer for activations is full")

    async def take(self, sender: Hotkey, frame: Frame) -> None:
        """Put a verified frame into the inbox. Raises Backpressure, Refused, ProtocolViolation."""
        try:
            self.expect(frame.header)
            self._check_lease(sender, frame)
            frames.check_finite(frame)
        except ProtocolViolation:
            self.num_refused += 1
            raise
        if frame.pass_id in self._inbox.seen:
            return
        if frame.header.direction is Direction.FORWARD:
            self.require_room(frame.header)
            self._check_new(frame)
            self._inbox.forward.append(frame)
        else:
            self._inbox.backward.append(frame)
        self._inbox.seen[frame.pass_id] = None
        self._activity.set()

    def _check_new(self, frame: Frame) -> None:
        """Work on what came before earns nothing, and a sample worked twice fails an audit. Raises Refused.

        A sample comes again when a miner passed it on, died, and another was drawn in its place.
        """
        sample = frame.header.lease.sample
        if sample in self._inbox.samples:
            raise Refused("repeated", f"sample {sample} came here before, from another miner: a third has to take it")
        first = self._inbox.activations.setdefault(frame.header.payload_digest, sample)
        if first != sample and self._config.model.bottleneck is not Bottleneck.K0:
            raise Refused("repeated", f"the same activation came under sample {first}: it would earn nothing")
        self._inbox.samples[sample] = None

    def _require_epoch(self, epoch: Epoch) -> None:
        if epoch > self._epoch:
            raise Backpressure(f"still in epoch {self._epoch}")

    def _check_lease(self, sender: Hotkey, frame: Frame) -> None:
        lease, header = frame.header.lease, frame.header
        if lease.run_id != self._run_id or hop(self._config, lease, self.stage) is None:
            raise ProtocolViolation("the lease is of another run, or does not lead through this stage")
        self._require_epoch(lease.epoch)
        if lease.epoch < self._epoch:
            raise Refused("epoch", f"epoch {lease.epoch} is over here")
        step = -1 if header.direction is Direction.FORWARD else 1
        neighbour = hop(self._config, lease, self.stage + step)
        if header.direction not in (Direction.FORWARD, Direction.BACKWARD) or neighbour is None:
            raise ProtocolViolation("a frame moves an activation down or its gradient up")
        if hop(self._config, lease, self.stage) != self._ports.signer.hotkey or neighbour != sender:
            raise ProtocolViolation("the lease names another sender or receiver")

    # ---- the loop ----------------------------------------------------------------------------------------------

    async def run(self, is_over: Callable[[], bool], may_lease: Callable[[], bool]) -> None:
        """Work until `is_over`, then close the epoch: what is open is dropped, a last step and checkpoint are taken."""
        while not is_over():
            if not await self._work_once(may_lease):
                await self._idle()
        for key in list(self._open):
            self._drop(key)
        await self._close()

    def wake(self) -> None:
        """Something outside changed: look again."""
        self._activity.set()

    async def _idle(self) -> None:
        self._activity.clear()
        try:
            async with asyncio.timeout(IDLE_S):
                await self._activity.wait()
        except TimeoutError:
            self._drop_expired()

    async def _work_once(self, may_lease: Callable[[], bool]) -> bool:
        """Do the most urgent piece of work; False when there is none."""
        while self._lost:
            self._drop(self._lost.popleft())
        if self._inbox.backward:
            await self._backward(self._inbox.backward.popleft())
            return True
        if self._is_long and not self._open:
            await self._close()
        if not self._may_admit():
            return False
        if is_first(self._config, self.stage):
            lease = await self._next_lease(may_lease)
            if lease is None:
                return False
            await self._forward(lease, None)
            return True
        if self._inbox.forward:
            frame = self._inbox.forward.popleft()
            await self._forward(frame.header.lease, Attested(frame.payload, frame.header.payload_digest))
            return True
        return False

    def _may_admit(self) -> bool:
        has_room = len(self._open) < self._config.training.max_in_flight
        return has_room and not self._is_long and self._segment_backwards + len(self._open) < self._quota

    @property
    def _quota(self) -> int:
        """Backward passes of one segment."""
        return self._config.training.accumulate * self._config.audit.checkpoint_every

    @property
    def _is_long(self) -> bool:
        """Whether dropped samples have filled the segment with receipts; it is then closed early."""
        num_receipts = self._books.num_receipts - self._books.checkpoints[-1].num_receipts
        return num_receipts > LONG_SEGMENT * self._quota

    async def _close(self) -> None:
        """A last inner step with what has accumulated, and a checkpoint; nothing may be open."""
        if self._worker.num_accumulated:
            await self._step()
        if self._books.checkpoints[-1].num_receipts != self._books.num_receipts:
            await self._checkpoint()

    async def _next_lease(self, may_lease: Callable[[], bool]) -> Lease | None:
        if not self._leases and may_lease() and self._ports.clock.now() >= self._leases_due_s:
            try:
                answer = await self._ports.control.call(
                    wire.LeaseSamples(epoch=self._epoch, count=LEASES_AHEAD), timeout_s=5.0
                )
            except (Refused, TransientFailure) as error:
                log.info("no lease", extra={"reason": str(error)})
                answer = wire.Leases(leases=())
            if isinstance(answer, wire.Leases):
                self._leases.extend(answer.leases)
            if not self._leases:
                self._leases_due_s = self._ports.clock.now() + IDLE_S
        return self._leases.popleft() if self._leases else None

    # ---- one pass ----------------------------------------------------------------------------------------------

    async def _forward(self, lease: Lease, received: Attested | None) -> None:
        key = wire.sample_key(lease.epoch, lease.sample, lease.branch)
        if lease.deadline_s <= self._ports.clock.now() or key in self._open:
            return
        tokens = self._ports.corpus.tokens(lease.epoch, lease.sample)
        activation = None if received is None else received.data
        result = await self._ports.compute.run(lambda: self._worker.forward(key, tokens, activation))
        self._open[key] = lease
        sent = Attested.of(np.float32(result.loss).tobytes() if result.payload is None else result.payload)
        self._receipt(lease, Direction.FORWARD, received or Attested.of(_token_bytes(tokens)), sent, loss=result.loss)
        if result.payload is None:
            await self._finish(lease, None, sent)
        else:
            self._send(lease, Direction.FORWARD, sent)

    async def _backward(self, frame: Frame) -> None:
        lease = frame.header.lease
        key = wire.sample_key(lease.epoch, lease.sample, lease.branch)
        if key in self._open:
            await self._finish(lease, frame.payload, Attested(frame.payload, frame.header.payload_digest))

    async def _finish(self, lease: Lease, gradient: bytes | None, received: Attested) -> None:
        key = wire.sample_key(lease.epoch, lease.sample, lease.branch)
        payload = await self._ports.compute.run(lambda: self._worker.backward(key, gradient))
        sent = None if payload is None else Attested.of(payload)
        del self._open[key]
        self._receipt(lease, Direction.BACKWARD, received, sent)
        self._segment_backwards += 1
        if sent is not None:
            self._send(lease, Direction.BACKWARD, sent)
        if self._worker.num_accumulated >= self._config.training.accumulate:
            await self._step()
        if self._segment_backwards >= self._quota:
            await self._checkpoint()

    def _receipt(
        self,
        lease: Lease,
        direction: Direction,
        received: Attested,
        sent: Attested | None,
        *,
        loss: float | None = None,
    ) -> None:
        kept = [payload for payload in (received, sent) if payload is not None]
        if direction is Direction.FORWARD and is_first(self._config, self.stage):
            kept = kept[1:]  # token ids come from the corpus, they are no evidence
        self._books.record(
            Receipt(
                run_id=self._run_id,
                epoch=lease.epoch,
                sample=lease.sample,
                branch=lease.branch,
                stage=self.stage,
                direction=direction,
                params_version=self._worker.num_steps,
                input_digest=received.digest,
                output_digest=sent.digest if sent is not None else NO_DIGEST,
                loss=loss,
            ),
            *kept,
        )

    def _mark(self, direction: Direction, key: SampleKey = (0, -1, 0)) -> None:
        """A receipt without payloads: an inner step, or a sample given up."""
        self._books.record(
            Receipt(
                run_id=self._run_id,
                epoch=self._epoch,
                sample=SampleId(key[1]),
                branch=key[2],
                stage=self.stage,
                direction=direction,
                params_version=self._worker.num_steps,
            )
        )

    async def _step(self) -> None:
        await self._ports.compute.run(self._worker.step)
        self._mark(Direction.STEP)

    async def _checkpoint(self) -> None:
        data = await self._ports.compute.run(self._worker.checkpoint)
        await self._books.checkpoint(data, num_steps=self._worker.num_steps)
        self._segment_backwards = 0

    # ---- frames out --------------------------------------------------------------------------------------------

    def _send(self, lease: Lease, direction: Direction, sent: Attested) -> None:
        to_stage = StageIndex(self.stage + (1 if direction is Direction.FORWARD else -1))
        frame = frames.make(
            lease,
            stage=to_stage,
            direction=direction,
            shape=self._config.wire_shape,
            payload=sent.data,
            payload_digest=sent.digest,
        )
        self._delivery.start(frame, on_lost=self._on_lost, on_rerouted=self._on_rerouted)

    def _on_lost(self, lease: Lease) -> None:
        """A forward found no receiver: the sample is over here too. A lost gradient costs us nothing more."""
        self._lost.append(wire.sample_key(lease.epoch, lease.sample, lease.branch))
        self._leases_due_s = self._ports.clock.now() + LOST_PAUSE_S
        self._activity.set()

    def _on_rerouted(self, lease: Lease) -> None:
        key = wire.sample_key(lease.epoch, lease.sample, lease.branch)
        if key in self._open:
            self._open[key] = lease

    def _drop_expired(self) -> None:
        now = self._ports.clock.now()
        for key in [key for key, lease in self._open.items() if lease.deadline_s <= now]:
            self._drop(key)

    def _drop(self, key: SampleKey) -> None:
        if key in self._open:
            self._worker.drop(key)
            del self._open[key]
            self._mark(Direction.DROP, key)


def _token_bytes(tokens: npt.NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i8").tobytes()
