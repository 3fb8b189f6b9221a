"""How far honest work lies from its replay on this machine, across the run's numeric modes (trust.md 2).

A validator runs this at its start and publishes the figures; thresholds must lie well above them.
"""

from dataclasses import dataclass

import numpy as np

from subnet.config import RunConfig
from subnet.model.init import initial_params
from subnet.ports import Corpus
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.types import Epoch, Hotkey, NumericMode, SampleId, StageIndex
from subnet.validation.recording import Recorder, Recording
from subnet.validation.replay import Replayed, replay_passes
from subnet.wire import sample_key

QUANTILE = 0.999
_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True)
class Noise:
    """99.9th percentiles over every pass of the reference segments; `rel_dw` over the segments."""

    rel_d: float
    rel_d_token: float
    rel_d_backward: float
    rel_d_backward_token: float
    rel_dw: float
    loss_error: float


def reference_segments(config: RunConfig, corpus: Corpus, mode: NumericMode, num_segments: int) -> list[Recording]:
    """Segments of honest work by one miner for each stage, from epoch 0 on; the first starts with a cold optimizer."""
    recorders = []
    for index in range(config.training.num_stages):
        worker = StageWorker(config, StageIndex(index), mode)
        worker.load(initial_params(config, StageIndex(index)))
        recorders.append(Recorder(worker, run_id="calibration", epoch=_EPOCH, hotkey=Hotkey(f"stage {index}")))
    segments: list[Recording] = []
    sample = 0
    for _ in range(num_segments):
        for _ in range(config.audit.checkpoint_every):
            for _ in range(config.training.accumulate):
                _pass_through(recorders, corpus, SampleId(sample))
                sample += 1
            for recorder in recorders:
                recorder.step()
        segments.extend(recorder.close_segment() for recorder in recorders)
    return segments


def _pass_through(recorders: list[Recorder], corpus: Corpus, sample: SampleId) -> None:
    key: SampleKey = sample_key(_EPOCH, sample, 0)
    payload: bytes | None = None
    for recorder in recorders:
        payload = recorder.forward(key, corpus.tokens(_EPOCH, sample), payload)
    for recorder in reversed(recorders):
        payload = recorder.backward(key, payload)


def measure_noise(
    config: RunConfig, corpus: Corpus, *, made_in: NumericMode, replayed_in: NumericMode, num_segments: int = 3
) -> Noise:
    """Record in one mode, replay in the other."""
    replays: list[Replayed] = []
    for made in reference_segments(config, corpus, made_in, num_segments):
        replays.append(replay_passes(config, made.challenge, made.start, made.end, made.evidence, corpus, replayed_in))
    return Noise(
        rel_d=_quantile([found.rel_d for replay in replays for found in replay.forward]),
        rel_d_token=_quantile([found.rel_d_token for replay in replays for found in replay.forward]),
        rel_d_backward=_quantile([found.rel_d for replay in replays for found in replay.backward]),
        rel_d_backward_token=_quantile([found.rel_d_token for replay in replays for found in replay.backward]),
        rel_dw=_quantile([replay.rel_dw for replay in replays]),
        loss_error=_quantile([error for replay in replays for error in replay.loss_errors]),
    )


def measure_noise_across_modes(config: RunConfig, corpus: Corpus, *, num_segments: int = 3) -> Noise:
    """The worst of every ordered pair of different modes that the run allows; the mode alone when it allows one."""
    modes = config.training.modes
    pairs = [(made, replayed) for made in modes for replayed in modes if made is not replayed or len(modes) == 1]
    found = [
        measure_noise(config, corpus, made_in=made, replayed_in=replayed, num_segments=num_segments)
        for made, replayed in pairs
    ]
    names = Noise.__dataclass_fields__
    return Noise(**{name: max(getattr(noise, name) for noise in found) for name in names})


def _quantile(values: list[float]) -> float:
    return float(np.quantile(values, QUANTILE)) if values else 0.0
