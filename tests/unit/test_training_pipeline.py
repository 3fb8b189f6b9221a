"""The worker: inner steps leave open samples alone, state survives a checkpoint, bad input costs the peer only."""

import gc
import math

import msgspec
import numpy as np
import pytest
import torch

from subnet.config import Bottleneck, OptimizerKind, RunConfig
from subnet.errors import InvariantBroken, ProtocolViolation
from subnet.model.init import initial_params
from subnet.model.partition import num_elements
from subnet.training.optimizers import clip_limit
from subnet.training.pipeline import StageWorker
from subnet.training.schedule import warmup
from subnet.types import Epoch, NumericMode, SampleId, StageIndex
from tests.numerics.support import PatternCorpus, Tokens, make_workers, pass_backward, pass_forward, small_config

KEY = (0, 0, 0)


def tokens_of(config: RunConfig, sample: int = 0) -> Tokens:
    return PatternCorpus(config).tokens(Epoch(0), SampleId(sample))


def train(workers: list[StageWorker], *, first: int, count: int) -> list[float]:
    """`count` samples, a step after each two."""
    losses = []
    for sample in range(first, first + count):
        _, loss = pass_forward(workers, (0, sample, 0), tokens_of(workers[0].config, sample))
        pass_backward(workers, (0, sample, 0))
        losses.append(loss)
        if workers[0].num_accumulated == 2:
            for worker in workers:
                worker.step()
    return losses


@pytest.mark.parametrize("mode", list(NumericMode))
@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("bottleneck", [Bottleneck.RESBM, Bottleneck.IOTA, Bottleneck.NONE])
def test_the_loss_falls(bottleneck: Bottleneck, optimizer: OptimizerKind, mode: NumericMode) -> None:
    workers = make_workers(small_config(bottleneck, optimizer=optimizer), mode)
    losses = train(workers, first=0, count=60)
    assert abs(losses[0] - math.log(48)) < 0.1
    assert sum(losses[-6:]) / 6 < 0.8 * losses[0]


def test_open_samples_keep_the_params_their_forward_used() -> None:
    config = small_config()
    plain, stepped = make_workers(config), make_workers(config)
    for workers in (plain, stepped):
        for sample in (0, 1):
            pass_forward(workers, (0, sample, 0), tokens_of(config, sample))
    pass_backward(stepped, (0, 0, 0))
    for worker in stepped:
        worker.step()
    late = pass_backward(stepped, (0, 1, 0))
    assert late == pass_backward(plain, (0, 1, 0))
    for ours, other in zip(stepped, plain, strict=True):
        assert (ours.num_steps, ours.num_accumulated, other.num_steps) == (1, 1, 0)
        assert ours._sum is not None and other._sum is not None
        for name, gradient in ours._sum.items():
            assert torch.equal(gradient, other._sum[name]), name
        assert not np.array_equal(ours.params(), other.params())


def test_a_step_uses_the_mean_of_what_was_accumulated() -> None:
    config = small_config()
    once, twice = make_workers(config), make_workers(config)
    for workers, branches in ((once, 1), (twice, 2)):
        for branch in range(branches):
            pass_forward(workers, (0, 0, branch), tokens_of(config))
            pass_backward(workers, (0, 0, branch))
        for worker in workers:
            worker.step()
    assert all(np.array_equal(a.params(), b.params()) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("mode", list(NumericMode))
@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_a_restored_worker_goes_on_with_the_same_bits(optimizer: OptimizerKind, mode: NumericMode) -> None:
    workers = make_workers(small_config(optimizer=optimizer), mode)
    train(workers, first=0, count=6)
    restored = []
    for worker in workers:
        copy = StageWorker(worker.config, worker.stage, mode)
        copy.restore(worker.checkpoint())
        assert copy.checkpoint() == worker.checkpoint()
        assert copy.num_steps == 3
        restored.append(copy)
    assert train(workers, first=6, count=6) == train(restored, first=6, count=6)
    assert [worker.checkpoint() for worker in workers] == [worker.checkpoint() for worker in restored]


def test_a_new_epoch_replaces_params_and_keeps_the_optimizer_state() -> None:
    workers = make_workers(small_config())
    train(workers, first=0, count=5)
    worker = workers[1]
    assert worker.num_accumulated == 1
    fresh = initial_params(worker.config, worker.stage)
    worker.load(fresh)
    assert (worker.num_steps, worker.num_accumulated) == (0, 0)
    assert np.array_equal(worker.params(), fresh)
    assert all(float(value.abs().sum()) > 0 for value in worker._optimizer.state().values())
    assert worker._optimizer.num_steps == 2


def test_memory_stays_flat_over_a_thousand_passes() -> None:
    config = small_config(num_stages=2, num_layers=2)
    workers = make_workers(config)

    def live_tensors() -> int:
        gc.collect()
        return sum(1 for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))

    def churn(first: int, count: int) -> None:
        for sample in range(first, first + count):
            pass_forward(workers, (0, sample, 0), tokens)
            if sample % 10 == 0:
                for worker in workers:
                    worker.drop((0, sample, 0))
                continue
            pass_backward(workers, (0, sample, 0))
            if sample % 4 == 1:
                for worker in workers:
                    worker.step()

    tokens = tokens_of(config)
    churn(0, 20)
    before = live_tensors()
    churn(20, 1000)
    assert live_tensors() == before
    assert all(worker.num_open == 0 for worker in workers)


def test_a_sample_passes_once() -> None:
    config = small_config()
    workers = make_workers(config)
    payloads, _ = pass_forward(workers, KEY, tokens_of(config))
    assert workers[0].open_keys == (KEY,)
    with pytest.raises(ProtocolViolation, match="open already"):
        workers[0].forward(KEY, tokens_of(config), None)
    pass_backward(workers, KEY)
    with pytest.raises(ProtocolViolation, match="no forward pass here"):
        workers[0].backward(KEY, payloads[0])
    with pytest.raises(ProtocolViolation, match="is not open"):
        workers[0].drop(KEY)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_worker_refuses_what_does_not_belong_to_its_place(stage: int) -> None:
    config = small_config()
    workers = make_workers(config)
    payloads, _ = pass_forward(workers, KEY, tokens_of(config))
    worker = workers[stage]
    with pytest.raises(ProtocolViolation, match="takes"):
        worker.forward((0, 1, 0), tokens_of(config), payloads[0] if stage == 0 else None)
    with pytest.raises(ProtocolViolation, match="takes"):
        worker.backward(KEY, payloads[0] if stage == 2 else None)
    assert worker.open_keys == (KEY,)


def test_a_bad_gradient_leaves_the_sample_open() -> None:
    config = small_config()
    workers = make_workers(config)
    payloads, _ = pass_forward(workers, KEY, tokens_of(config))
    for bad in (b"", payloads[0][:-1], b"\xff" * len(payloads[0])):
        with pytest.raises(ProtocolViolation):
            workers[0].backward(KEY, bad)
        with pytest.raises(ProtocolViolation):
            workers[1].forward((0, 1, 0), tokens_of(config), bad)
    assert (workers[0].open_keys, workers[1].open_keys) == ((KEY,), (KEY,))
    workers[0].backward(KEY, payloads[0])


def test_a_gradient_that_overflows_is_not_accumulated() -> None:
    config = small_config()
    workers = make_workers(config)
    workers[0].load(np.full(num_elements(config, StageIndex(0)), 1e12, dtype=np.float32))
    with pytest.raises(ProtocolViolation):
        workers[0].forward(KEY, tokens_of(config), None)
    assert (workers[0].num_open, workers[0].num_accumulated) == (0, 0)


def test_nothing_may_be_open_at_a_checkpoint_or_a_new_epoch() -> None:
    config = small_config()
    workers = make_workers(config)
    data = workers[0].checkpoint()
    pass_forward(workers, KEY, tokens_of(config))
    with pytest.raises(InvariantBroken, match="1 samples open"):
        workers[0].checkpoint()
    with pytest.raises(InvariantBroken, match="1 samples open"):
        workers[0].load(initial_params(config, StageIndex(0)))
    with pytest.raises(InvariantBroken, match="1 samples open"):
        workers[0].restore(data)
    pass_backward(workers, KEY)
    with pytest.raises(InvariantBroken, match="step first"):
        workers[0].checkpoint()


def test_a_step_needs_a_gradient() -> None:
    with pytest.raises(ProtocolViolation, match="at least one backward"):
        make_workers(small_config())[0].step()


def test_tokens_of_another_shape_are_a_mistake_of_ours() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="tokens must be int64"):
        make_workers(config)[0].forward(KEY, tokens_of(config)[:, :-1], None)


def test_the_limits_of_all_stages_make_up_the_whole() -> None:
    config = small_config()
    squares = [clip_limit(config, StageIndex(stage)) ** 2 for stage in range(3)]
    assert math.isclose(sum(squares), config.training.grad_clip**2)


def test_warm_up_rises_to_one() -> None:
    assert [warmup(done, 3) for done in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warmup(0, 0) == 1.0


def test_gradients_beyond_the_limit_are_scaled_down() -> None:
    base = small_config(optimizer=OptimizerKind.ADAMW)
    tight = msgspec.structs.replace(base, training=msgspec.structs.replace(base.training, grad_clip=1e-3))
    states = []
    for config in (base, tight):
        workers = make_workers(config)
        pass_forward(workers, KEY, tokens_of(config))
        pass_backward(workers, KEY)
        workers[1].step()
        squares = [
            float(value.double().square().sum())
            for name, value in workers[1]._optimizer.state().items()
            if name.startswith("adamw.mean.")
        ]
        states.append(math.sqrt(sum(squares)) / 0.1)
    assert math.isclose(states[1], clip_limit(tight, StageIndex(1)), rel_tol=1e-4)
    assert states[0] > states[1]
