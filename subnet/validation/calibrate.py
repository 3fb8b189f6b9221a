"""How far honest work lies from its replay on this machine, across the run's numeric modes (trust.md 2).

A validator measures it once for each machine and run and publishes it: the network's limit on distances lies well above what
its validators measured, and who measured more than that does not audit. Instruction sets cannot be changed within a process,
and move the figures far less than modes do (LOG).
"""

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from subnet.config import RunConfig, config_bytes
from subnet.frames import digest
from subnet.lanes import lanes
from subnet.model.init import initial_params
from subnet.model.partition import num_elements
from subnet.ports import Corpus
from subnet.receipts import canonical
from subnet.training.neighbours import fresh_neighbours
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.types import Digest, Epoch, Hotkey, Noise, NumericMode, SampleId, StageIndex
from subnet.validation.recording import Recorder, Recording
from subnet.validation.replay import Replayed, replay_passes
from subnet.wire import sample_key

QUANTILE = 0.999
NUM_SEGMENTS = 2
"""The first starts with a cold optimizer."""
MAX_STEPS = 2
"""Inner steps of a reference segment, however long the run's are: the figures are those of passes."""
MAX_PARAMS = 16_000_000
"""Of the reference model: with optimizer state, records and both modes it has to fit beside everything else."""
MAX_TOKENS = 1024
"""In one pass of the reference set, unless a sequence is longer."""
MAX_ACCUMULATE = 2
"""Backward passes in one inner step of the reference set."""
_EPOCH = Epoch(0)


def machine() -> str:
    """What else decides about the noise: the version of torch, and the instruction set that it chose."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def noise_name(config: RunConfig, mode: NumericMode) -> str:
    """Where a validator keeps what it measured; another torch, instruction set, mode or run has another name."""
    return f"noise-{digest(canonical([machine(), mode, digest(config_bytes(config))]))[:16]}"


def encode_noise(noise: Noise) -> bytes:
    """JSON."""
    return canonical(noise)


def decode_noise(data: bytes) -> Noise | None:
    """Inverse of `encode_noise`; None for a damaged file, which is then measured again."""
    try:
        return msgspec.json.decode(data, type=Noise)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def reference_config(config: RunConfig) -> RunConfig:
    """The run's own with few samples, and for a large model as many layers and stages at half the width, as often as needed.

    Layers are kept, because rounding adds up over them. A narrower model is a quieter one (LOG: .0165 at width 256 and .0070 at
    64 with 16 layers), so it is made no narrower than the start of a validator has time for.
    """
    training = config.training
    fewer = msgspec.structs.replace(
        training,
        microbatch_size=min(training.microbatch_size, max(1, MAX_TOKENS // training.num_tokens)),
        accumulate=min(training.accumulate, MAX_ACCUMULATE),
    )
    config = msgspec.structs.replace(config, training=fewer)
    while _num_params(config) > MAX_PARAMS:
        model = config.model
        widths = (model.width, model.ffn_width, model.num_heads, model.bottleneck_width)
        if any(width % 2 for width in widths):
            break
        width, ffn_width, num_heads, bottleneck_width = (width // 2 for width in widths)
        narrower = msgspec.structs.replace(
            model,
            width=width,
            ffn_width=ffn_width,
            num_heads=num_heads,
            num_kv_heads=max(1, model.num_kv_heads // 2),
            bottleneck_width=bottleneck_width,
        )
        config = msgspec.structs.replace(config, model=narrower)
    return config


def _num_params(config: RunConfig) -> int:
    return sum(num_elements(config, StageIndex(index)) for index in range(config.training.num_stages))


class _FirstRows:
    """A corpus whose samples have fewer rows."""

    def __init__(self, corpus: Corpus, num_rows: int) -> None:
        self._corpus = corpus
        self._num_rows = num_rows

    def tokens(self, epoch: Epoch, sample: SampleId) -> npt.NDArray[np.int64]:
        """The first rows of a sample."""
        return self._corpus.tokens(epoch, sample)[: self._num_rows]

    def heldout(self, index: int) -> npt.NDArray[np.int64]:
        """The first rows of a held-out sample."""
        return self._corpus.heldout(index)[: self._num_rows]

    @property
    def digest(self) -> Digest:
        """The whole corpus's."""
        return self._corpus.digest


def reference_segments(config: RunConfig, corpus: Corpus, mode: NumericMode) -> list[Recording]:
    """Segments of honest work by one miner for each stage, from fresh params on; stages that train apart are alike, and the
    last, which computes with all others, stands for them.
    """
    recorders = []
    *_, lane = lanes(config)
    for index in lane:
        worker = StageWorker(config, StageIndex(index), mode)
        if neighbours := fresh_neighbours(config, StageIndex(index)):
            worker.load_neighbours(neighbours)
        worker.load(initial_params(config, StageIndex(index)))
        recorders.append(Recorder(worker, run_id="calibration", epoch=_EPOCH, hotkey=Hotkey(f"stage {index}")))
    segments: list[Recording] = []
    sample = 0
    for _ in range(NUM_SEGMENTS):
        for _ in range(min(config.audit.checkpoint_every, MAX_STEPS)):
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


def measure_noise(config: RunConfig, corpus: Corpus, mode: NumericMode) -> Noise:
    """The worst over what is made in every other mode that the run allows, replayed in `mode`.

    In a run of this mode alone it is measured against itself, which is silent on one machine.
    """
    config = reference_config(config)
    corpus = _FirstRows(corpus, config.training.microbatch_size)
    others = [made for made in config.training.modes if made is not mode] or [mode]
    found = [_noise_between(config, corpus, made_in=made, replayed_in=mode) for made in others]
    return Noise(
        mode=mode,
        machine=machine(),
        rel_d=max(noise.rel_d for noise in found),
        rel_d_token=max(noise.rel_d_token for noise in found),
        rel_d_backward=max(noise.rel_d_backward for noise in found),
        rel_d_backward_token=max(noise.rel_d_backward_token for noise in found),
        rel_dw=max(noise.rel_dw for noise in found),
        loss_error=max(noise.loss_error for noise in found),
    )


def _noise_between(config: RunConfig, corpus: Corpus, *, made_in: NumericMode, replayed_in: NumericMode) -> Noise:
    replays: list[Replayed] = []
    for made in reference_segments(config, corpus, made_in):
        neighbours = fresh_neighbours(config, made.challenge.stage)
        replays.append(replay_passes(config, made, corpus, replayed_in, neighbours))
    return Noise(
        mode=replayed_in,
        machine=machine(),
        rel_d=_quantile([found.rel_d for replay in replays for found in replay.forward]),
        rel_d_token=_quantile([found.rel_d_token for replay in replays for found in replay.forward]),
        rel_d_backward=_quantile([found.rel_d for replay in replays for found in replay.backward]),
        rel_d_backward_token=_quantile([found.rel_d_token for replay in replays for found in replay.backward]),
        rel_dw=_quantile([replay.rel_dw for replay in replays]),
        loss_error=_quantile([error for replay in replays for error in replay.loss_errors]),
    )


def _quantile(values: list[float]) -> float:
    return float(np.quantile(values, QUANTILE)) if values else 0.0
