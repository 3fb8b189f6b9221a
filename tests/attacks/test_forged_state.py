"""A miner that begins an epoch from the published params and with an optimizer state of its own making.

Replays start from the checkpoint they are shown, so whatever one honest step makes of that state they repeat to the bit.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from subnet.config import RunConfig
from subnet.frames import digest
from subnet.model.init import initial_params
from subnet.sim.strategies import IdentityWorker
from subnet.training.optimizers import ADAMW_BETAS
from subnet.training.outer import encode_snapshot
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, Hotkey, NumericMode, Outcome, SampleId, StageIndex
from subnet.validation.evidence import encode_evidence
from subnet.validation.judging import Presented, judge_segment
from subnet.validation.recording import Recorder, Recording
from tests.numerics.support import PatternCorpus, make_workers, record_pass, small_config

STAGE = StageIndex(1)
STEPS_BEFORE = 10_000
"""On the optimizer's own count: what corrects the bias of young means has no effect any more."""

Tensors = dict[str, torch.Tensor]


def judged(config: RunConfig, made: Recording) -> tuple[Outcome, str]:
    """What a validator says of a segment, its start compared with what was published."""
    params = initial_params(config, STAGE)
    presented = Presented(
        start=made.start,
        end=made.end,
        evidence=encode_evidence(made.evidence),
        anchor=encode_snapshot(params, np.zeros_like(params)),
    )
    outcome, reason, _ = judge_segment(config, made.challenge, presented, PatternCorpus(config), NumericMode.FP32)
    return outcome, reason


def segment_from(config: RunConfig, state: Tensors) -> Recording:
    """An epoch's first segment, worked as it should be, but from this optimizer state."""
    workers = make_workers(config)
    workers[STAGE]._optimizer.load_state(state, STEPS_BEFORE)
    return recorded(config, workers)


def recorded(config: RunConfig, workers: list[StageWorker]) -> Recording:
    """The first segment of the miner in the middle."""
    recorders = [Recorder(worker, run_id="run", epoch=Epoch(0), hotkey=Hotkey("m")) for worker in workers]
    for sample in range(config.training.accumulate):
        record_pass(recorders, PatternCorpus(config), (0, SampleId(sample), 0))
    for recorder in recorders:
        recorder.step()
    return recorders[STAGE].close_segment()


def fresh_state(config: RunConfig) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in StageWorker(config, STAGE)._optimizer.state().items()}


def leap(config: RunConfig) -> Tensors:
    """One step takes the gains of every norm to zero: the layers are then the identity and cost nothing to run."""
    state = fresh_state(config)
    square = 1e20
    mean = math.sqrt(square * ADAMW_BETAS[1]) / config.training.adamw_learning_rate / ADAMW_BETAS[0]
    for name in [name for name in state if name.startswith("adamw.mean.") and name.endswith("norm.weight")]:
        state[name].fill_(mean)
        state[name.replace("mean", "square", 1)].fill_(square)
    return state


def steering(config: RunConfig) -> Tensors:
    """Next to this momentum the gradients of a whole epoch are nothing: every step goes where the miner likes."""
    state = fresh_state(config)
    for name in [name for name in state if name.startswith("muon.momentum.")]:
        state[name].fill_(1e6)
    return state


def test_a_stage_whose_norms_are_zero_costs_nothing_and_replays() -> None:
    """Why the state matters: from such params a worker that runs no layer at all is not told from an honest one."""
    config = small_config()
    workers = make_workers(config)
    idle = IdentityWorker(config, STAGE, NumericMode.FP32)
    idle.load(initial_params(config, STAGE))
    for name, param in idle._optimizer.params.items():
        if name.endswith("layernorm.weight"):
            param.data.zero_()
    idle._version = idle._new_version()
    workers[STAGE] = idle
    made = recorded(config, workers)
    presented = Presented(start=made.start, end=made.end, evidence=encode_evidence(made.evidence), anchor=None)
    outcome, _, measures = judge_segment(config, made.challenge, presented, PatternCorpus(config), NumericMode.FP32)
    assert measures is not None
    assert (outcome, measures.rel_d_max) == (Outcome.PASS, 0.0)


@pytest.mark.parametrize("forged", [leap, steering])
def test_a_state_that_no_gradients_lead_to_is_a_failed_audit(forged: Callable[[RunConfig], Tensors]) -> None:
    config = small_config()
    assert judged(config, segment_from(config, fresh_state(config)))[0] is Outcome.PASS
    outcome, reason = judged(config, segment_from(config, forged(config)))
    assert outcome is Outcome.FAIL
    assert "optimizer" in reason


def test_a_replay_that_leaves_the_numbers_is_a_failed_audit() -> None:
    """A param of the replay goes to infinity; what lies infinitely far off is not no distance at all."""
    config = small_config()
    state = fresh_state(config)
    first = next(name for name in state if name.startswith("adamw.mean."))
    state[first].view(-1)[0] = 3e38
    start, made = segment_from(config, state).start, segment_from(config, fresh_state(config))
    named = msgspec.structs.replace(made.challenge.start_checkpoint, digest=digest(start))
    challenge = msgspec.structs.replace(made.challenge, start_checkpoint=named)
    outcome, _ = judged(config, Recording(challenge=challenge, start=start, end=made.end, evidence=made.evidence))
    assert outcome is Outcome.FAIL
