"""A worker with its receipts: every pass leaves its receipt and the payloads that would prove it (trust.md 1.1)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subnet.frames import digest
from subnet.receipts import first_head, next_head
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.types import NO_DIGEST, Checkpoint, Digest, Direction, Epoch, Hotkey, Receipt, SampleId
from subnet.validation.evidence import Evidence, payloads_named
from subnet.wire import Challenge


def tokens_digest(tokens: npt.NDArray[np.int64]) -> Digest:
    """Digest of ids as little-endian int64: the input of stage 0."""
    return digest(tokens.astype("<i8", copy=False).tobytes())


def loss_digest(loss: float) -> Digest:
    """Digest of a loss as little-endian float32: the output of the last stage, and the input of its backward."""
    return digest(np.array(loss, dtype="<f4").tobytes())


@dataclass(frozen=True, slots=True)
class Recording:
    """A closed segment: the challenge it would answer, and what its miner would present."""

    challenge: Challenge
    start: bytes
    end: bytes
    evidence: Evidence


class Recorder:
    """Runs a worker through one epoch and keeps its receipt chain and the open segment."""

    def __init__(self, worker: StageWorker, *, run_id: str, epoch: Epoch, hotkey: Hotkey) -> None:
        self.worker = worker
        self.run_id = run_id
        self.epoch = epoch
        self.hotkey = hotkey
        self.head = first_head(run_id, epoch, hotkey)
        self.num_receipts = 0
        self.num_segments = 0
        self._receipts: list[Receipt] = []
        self._payloads: dict[Digest, bytes] = {}
        self._losses: dict[SampleKey, float] = {}
        self._versions: dict[SampleKey, int] = {}
        self._start, self._start_checkpoint = self._take_checkpoint()

    def forward(self, key: SampleKey, tokens: npt.NDArray[np.int64], activation: bytes | None) -> bytes | None:
        """As the worker's; returns the payload."""
        result = self.worker.forward(key, tokens, activation)
        self._versions[key] = self.worker.num_steps
        if result.loss is not None:
            self._losses[key] = result.loss
        self._add(
            Direction.FORWARD,
            key,
            input_digest=tokens_digest(tokens) if activation is None else digest(activation),
            output_digest=self._output_digest(key, result.payload),
            loss=result.loss,
            payloads=(activation, result.payload),
        )
        return result.payload

    def backward(self, key: SampleKey, gradient: bytes | None) -> bytes | None:
        """As the worker's."""
        payload = self.worker.backward(key, gradient)
        self._add(
            Direction.BACKWARD,
            key,
            input_digest=self._output_digest(key, None) if gradient is None else digest(gradient),
            output_digest=NO_DIGEST if payload is None else digest(payload),
            payloads=(gradient, payload),
        )
        self._forget(key)
        return payload

    def drop(self, key: SampleKey) -> None:
        """As the worker's."""
        self.worker.drop(key)
        self._add(Direction.DROP, key)
        self._forget(key)

    def step(self) -> None:
        """As the worker's; the receipt carries the version that was stepped from."""
        key = (int(self.epoch), -1, 0)
        self._versions[key] = self.worker.num_steps
        self.worker.step()
        self._add(Direction.STEP, key)
        self._forget(key)

    def loss_of(self, key: SampleKey) -> float | None:
        """Loss of an open sample, on the last stage."""
        return self._losses.get(key)

    def close_segment(self) -> Recording:
        """End the segment with a checkpoint, which is where the next begins."""
        start, start_checkpoint = self._start, self._start_checkpoint
        evidence = Evidence(receipts=tuple(self._receipts), payloads=dict(self._payloads))
        self._start, self._start_checkpoint = self._take_checkpoint()
        self._receipts.clear()
        self._payloads.clear()
        challenge = Challenge(
            epoch=self.epoch,
            hotkey=self.hotkey,
            stage=self.worker.stage,
            segment=self.num_segments,
            start_checkpoint=start_checkpoint,
            end_checkpoint=self._start_checkpoint,
            deadline_s=0.0,
        )
        self.num_segments += 1
        return Recording(challenge=challenge, start=start, end=self._start, evidence=evidence)

    def _take_checkpoint(self) -> tuple[bytes, Checkpoint]:
        data = self.worker.checkpoint()
        return data, Checkpoint(
            digest=digest(data), num_steps=self.worker.num_steps, num_receipts=self.num_receipts, head=self.head
        )

    def _output_digest(self, key: SampleKey, payload: bytes | None) -> Digest:
        return loss_digest(self._losses[key]) if payload is None else digest(payload)

    def _forget(self, key: SampleKey) -> None:
        del self._versions[key]
        self._losses.pop(key, None)

    def _add(
        self,
        direction: Direction,
        key: SampleKey,
        *,
        input_digest: Digest = NO_DIGEST,
        output_digest: Digest = NO_DIGEST,
        loss: float | None = None,
        payloads: tuple[bytes | None, ...] = (),
    ) -> None:
        receipt = Receipt(
            run_id=self.run_id,
            epoch=self.epoch,
            sample=SampleId(key[1]),
            branch=key[2],
            stage=self.worker.stage,
            direction=direction,
            params_version=self._versions[key],
            input_digest=input_digest,
            output_digest=output_digest,
            loss=loss,
        )
        named = payloads_named(self.worker.config, receipt)
        present = [payload for payload in payloads if payload is not None]
        self._payloads |= dict(zip(named, present, strict=True))
        self._receipts.append(receipt)
        self.head = next_head(self.head, receipt)
        self.num_receipts += 1
