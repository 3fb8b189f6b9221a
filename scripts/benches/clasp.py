"""CLASP on a million samples through 8 stages: time and peak memory of attribution and flags, in a process of its own."""

import asyncio
import resource
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benches.measure import Child, Line, answer_questions, children, fact, limit
from incentives.clasp import Batch, Moments
from incentives.config import ClaspConfig
from incentives.flags import attribute, flags
from incentives.scenarios import Scenario
from subnet.types import Hotkey

NUM_SAMPLES = 1_000_000
_PART = 65_536
NUM_STAGES = 8


def _attribution(miners_per_stage: int) -> dict[str, float]:
    scenario = Scenario(num_stages=NUM_STAGES, num_miners=miners_per_stage, harm={(2, 1): 1.1}, trend=0.5)
    batch = scenario.draw(NUM_SAMPLES, np.random.default_rng(19))
    parts = [
        Batch(members_kf=batch.members_kf[at : at + _PART], loss_k=batch.loss_k[at : at + _PART])
        for at in range(0, NUM_SAMPLES, _PART)
    ]
    names = [[Hotkey(f"{stage}-{at}") for at in range(miners_per_stage)] for stage in range(NUM_STAGES)]
    input_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began, cpu_began = time.perf_counter(), time.process_time()
    attribution = attribute(
        lambda: parts, scenario.sizes, num_stages=NUM_STAGES, epoch_of_block=scenario.epoch_of_block, usual_wander=0.02
    )
    found = flags(attribution, names, ClaspConfig())
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    assert [flag.hotkey for flag in found] == ["2-1"]
    began = time.process_time()
    moments = Moments(scenario.sizes)
    for part in parts:
        moments.add(part)
    moments.mean_losses()
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "means_s": time.process_time() - began,
        "input_mb": input_mb,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def attribution_process(connection: Connection) -> None:
    """Peak memory is a process's own, so each size gets one."""

    async def reply(question: Any) -> object:
        return _attribution(int(question))

    asyncio.run(answer_questions(connection, reply))


def bench(scale: float) -> list[Line]:
    """256 miners in all, and 256 in each stage; the number of samples is fixed."""
    lines = []
    for per_stage in (256 // NUM_STAGES, 256):
        with children(Child(attribution_process)) as (child,):
            found = child.ask(per_stage)
        label = f"{NUM_SAMPLES:,} samples, {NUM_STAGES} stages of {per_stage}"
        lines += [
            limit(f"{label}, CPU of one core", found["cpu_s"], 5, unit=" s"),
            limit(f"{label}, peak memory, samples included", found["peak_mb"] / 1000, 1, unit=" GB"),
            fact(
                "beside it",
                f"wall {found['wall_s']:.2f} s; first pass alone (the paper's means) {found['means_s']:.2f} s",
            ),
        ]
    return lines
