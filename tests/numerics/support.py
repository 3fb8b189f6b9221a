"""Small runs for tests of numerics: shapes that take milliseconds, text that repeats itself."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from subnet.config import AuditConfig, Bottleneck, ModelConfig, OptimizerKind, RunConfig, TrainingConfig
from subnet.draws import below
from subnet.frames import digest
from subnet.model.flat import unflatten
from subnet.model.init import initial_params
from subnet.model.partition import param_shapes
from subnet.sim.strategies import make_worker
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.types import Digest, Epoch, Hotkey, Measures, NumericMode, SampleId, StageIndex
from subnet.validation.recording import Recorder, Recording
from subnet.validation.replay import replay_segment

Tokens = npt.NDArray[np.int64]


def small_config(
    bottleneck: Bottleneck = Bottleneck.RESBM,
    *,
    num_stages: int = 3,
    num_layers: int = 4,
    anchor_ids: bool = True,
    optimizer: OptimizerKind = OptimizerKind.MUON,
    checkpoint_every: int = 2,
) -> RunConfig:
    """A model of a few thousand params; every design, grouped heads included."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=48,
            width=64,
            num_layers=num_layers,
            num_heads=4,
            num_kv_heads=2,
            ffn_width=96,
            bottleneck=bottleneck,
            bottleneck_width=4,
            anchor_ids=anchor_ids,
        ),
        training=TrainingConfig(
            num_stages=num_stages,
            microbatch_size=2,
            num_tokens=16,
            accumulate=2,
            warmup_steps=2,
            optimizer=optimizer,
            min_batches=1,
            target_batches=4,
        ),
        audit=AuditConfig(checkpoint_every=checkpoint_every),
    )


class PatternCorpus:
    """Each row counts up from a drawn start by a drawn stride, so that context helps to predict the next token."""

    def __init__(self, config: RunConfig, seed: int = 0) -> None:
        self._shape = (config.training.microbatch_size, config.training.num_tokens + 1)
        self._vocab_size = config.model.vocab_size
        self._seed = seed

    def _rows(self, kind: str, epoch: int, index: int) -> Tokens:
        rows = []
        for row in range(self._shape[0]):
            name = (self._seed, kind, epoch, index, row)
            start, stride = below(self._vocab_size, "start", *name), 1 + below(3, "stride", *name)
            rows.append((start + stride * np.arange(self._shape[1])) % self._vocab_size)
        return np.array(rows, dtype=np.int64)

    def tokens(self, epoch: Epoch, sample: SampleId) -> Tokens:
        """(B, T + 1) ids."""
        return self._rows("train", epoch, sample)

    def heldout(self, index: int) -> Tokens:
        """(B, T + 1) ids."""
        return self._rows("heldout", 0, index)

    @property
    def digest(self) -> Digest:
        """Of what the rows are drawn from."""
        return digest(f"pattern {self._seed} {self._shape} {self._vocab_size}".encode())


def make_workers(config: RunConfig, mode: NumericMode = NumericMode.FP32) -> list[StageWorker]:
    """One honest worker for each stage, at epoch 0."""
    workers = []
    for index in range(config.training.num_stages):
        worker = StageWorker(config, StageIndex(index), mode)
        worker.load(initial_params(config, StageIndex(index)))
        workers.append(worker)
    return workers


def pass_forward(workers: Sequence[StageWorker], key: SampleKey, tokens: Tokens) -> tuple[list[bytes], float]:
    """Through every stage; the payloads of each cut and the loss."""
    payloads: list[bytes] = []
    loss = None
    for worker in workers:
        result = worker.forward(key, tokens, payloads[-1] if payloads else None)
        loss = result.loss
        if result.payload is not None:
            payloads.append(result.payload)
    assert loss is not None
    return payloads, loss


def pass_backward(workers: Sequence[StageWorker], key: SampleKey) -> list[bytes]:
    """Through every stage from the last; the gradients of each cut, last cut first."""
    payloads: list[bytes] = []
    for worker in reversed(workers):
        payload = worker.backward(key, payloads[-1] if payloads else None)
        if payload is not None:
            payloads.append(payload)
    return payloads


def as_tensors(config: RunConfig, worker: StageWorker) -> dict[str, torch.Tensor]:
    """The worker's current params by name, with gradients to be taken."""
    shapes = param_shapes(config, worker.stage)
    return {name: value.requires_grad_() for name, value in unflatten(worker.params(), shapes).items()}


def record_epoch(
    config: RunConfig,
    kinds: Sequence[str | None],
    *,
    num_segments: int,
    mode: NumericMode = NumericMode.FP32,
) -> list[list[Recording]]:
    """Segments of one epoch, by number and stage; `kinds[stage]` is the cheat of that stage's miner."""
    corpus = PatternCorpus(config)
    recorders = []
    for index, kind in enumerate(kinds):
        worker = make_worker(kind, config, StageIndex(index), mode)
        worker.load(initial_params(config, StageIndex(index)))
        recorders.append(Recorder(worker, run_id="run", epoch=Epoch(0), hotkey=Hotkey(f"miner {index}")))
    segments = []
    sample = 0
    for _ in range(num_segments):
        for _ in range(config.audit.checkpoint_every * config.training.accumulate):
            record_pass(recorders, corpus, (0, sample, 0))
            sample += 1
            for recorder in recorders:
                if recorder.worker.num_accumulated == config.training.accumulate:
                    recorder.step()
        segments.append([recorder.close_segment() for recorder in recorders])
    return segments


def record_pass(recorders: Sequence[Recorder], corpus: PatternCorpus, key: SampleKey) -> None:
    """Forward and backward of one sample through all stages."""
    payload: bytes | None = None
    for recorder in recorders:
        payload = recorder.forward(key, corpus.tokens(Epoch(key[0]), SampleId(key[1])), payload)
    for recorder in reversed(recorders):
        payload = recorder.backward(key, payload)


def replay(config: RunConfig, made: Recording, mode: NumericMode = NumericMode.FP32) -> Measures:
    """Measures of a segment as presented."""
    corpus = PatternCorpus(config)
    return replay_segment(config, made, corpus, mode)
