"""A validator's replay of one segment against the miner's own compute for it, one thread, every stage, in turns."""

import functools

import torch

from benches.measure import Line, cpu_timed, fact, interleaved, limit
from benches.shapes import training_config
from subnet.adapters.corpus import make_corpus
from subnet.config import RunConfig
from subnet.model.init import initial_params
from subnet.training.pipeline import StageWorker
from subnet.types import Direction, Epoch, Hotkey, NumericMode, SampleId, StageIndex
from subnet.validation.recording import Recorder, Recording
from subnet.validation.replay import replay_segment
from subnet.wire import sample_key


def record(config: RunConfig) -> list[Recording]:
    """One segment of every stage, passes of one sample after the other."""
    corpus, recorders = make_corpus(config), []
    for index in range(config.training.num_stages):
        worker = StageWorker(config, StageIndex(index))
        worker.load(initial_params(config, StageIndex(index)))
        recorders.append(Recorder(worker, run_id="bench", epoch=Epoch(0), hotkey=Hotkey(f"m{index}")))
    for sample in range(config.training.accumulate * config.audit.checkpoint_every):
        key, payload = sample_key(Epoch(0), SampleId(sample), 0), None
        for recorder in recorders:
            payload = recorder.forward(key, corpus.tokens(Epoch(0), SampleId(sample)), payload)
        for recorder in reversed(recorders):
            payload = recorder.backward(key, payload)
        for recorder in recorders:
            if recorder.worker.num_accumulated == config.training.accumulate:
                recorder.step()
    return [recorder.close_segment() for recorder in recorders]


def work_again(config: RunConfig, made: Recording) -> None:
    """What the miner computed: passes, steps, and the checkpoint that ends the segment."""
    corpus, payloads = make_corpus(config), made.evidence.payloads
    worker = StageWorker(config, made.challenge.stage)
    worker.restore(made.start)
    last = made.challenge.stage == config.training.num_stages - 1
    for receipt in made.evidence.receipts:
        key = sample_key(receipt.epoch, receipt.sample, receipt.branch)
        match receipt.direction:
            case Direction.FORWARD:
                tokens = corpus.tokens(receipt.epoch, receipt.sample)
                worker.forward(key, tokens, payloads[receipt.input_digest] if made.challenge.stage else None)
            case Direction.BACKWARD:
                worker.backward(key, None if last else payloads[receipt.input_digest])
            case Direction.STEP:
                worker.step()
            case Direction.DROP:
                worker.drop(key)
    worker.checkpoint()


def bench(scale: float) -> list[Line]:
    """CPU of replay and of work, for the first, a middle and the last stage."""
    torch.set_num_threads(1)
    config = training_config(num_layers=3, microbatch_size=2, accumulate=4, checkpoint_every=2)
    corpus, lines, ratios = make_corpus(config), [], []
    for made in record(config):
        found = interleaved(
            {
                "work": functools.partial(cpu_timed, functools.partial(work_again, config, made)),
                "replay": functools.partial(
                    cpu_timed,
                    functools.partial(replay_segment, config, made, corpus, NumericMode.FP32),
                ),
            },
            repeats=max(1, round(2 * scale)),
        )
        work_s, replay_s = min(found["work"]), min(found["replay"])
        ratios.append(replay_s / work_s)
        lines.append(fact(f"stage {made.challenge.stage}", f"replay {replay_s:.2f} s, work {work_s:.2f} s of CPU"))
    return [limit("replay / the miner's compute, CPU, worst stage", max(ratios), 1.2), *lines]
