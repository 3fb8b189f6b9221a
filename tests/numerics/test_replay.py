"""Honest segments pass in every mode, every cheat fails wherever its work can be seen, and no byte can be changed."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import safetensors.torch
from torch import Tensor

from subnet.config import Bottleneck, OptimizerKind, RunConfig
from subnet.errors import ProtocolViolation
from subnet.frames import digest
from subnet.receipts import extend
from subnet.sim.strategies import STRATEGIES, make_worker
from subnet.types import NO_DIGEST, Direction, NumericMode, Outcome, Receipt, SampleId, StageIndex
from subnet.validation.evidence import Evidence, encode_evidence
from subnet.validation.judging import Presented, judge_segment
from subnet.validation.recording import Recorder, Recording
from subnet.validation.verdict import judge, published_rule
from tests.numerics.support import PatternCorpus, make_workers, record_epoch, record_pass, replay, small_config

HONEST: list[str | None] = [None, None, None]
NUM_SEGMENTS = 4


@pytest.mark.parametrize("mode", list(NumericMode))
@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("bottleneck", list(Bottleneck))
def test_an_honest_segment_replays_to_the_bit_in_its_own_mode(
    bottleneck: Bottleneck, optimizer: OptimizerKind, mode: NumericMode
) -> None:
    config = small_config(bottleneck, optimizer=optimizer)
    for made in record_epoch(config, HONEST, num_segments=2, mode=mode)[-1]:
        measures = replay(config, made, mode)
        assert judge(measures, config.audit)[0] is Outcome.PASS
        assert published_rule(measures)
        found = (
            measures.rel_d_max,
            measures.rel_d_token,
            measures.rel_d_backward,
            measures.rel_dw,
            measures.loss_error,
        )
        assert found == (0.0, 0.0, 0.0, 0.0, 0.0)
        assert (measures.num_passes, measures.num_failing) == (8, 0)


@pytest.mark.parametrize("made_in", list(NumericMode))
@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("bottleneck", list(Bottleneck))
def test_an_honest_segment_passes_in_the_other_mode(
    bottleneck: Bottleneck, optimizer: OptimizerKind, made_in: NumericMode
) -> None:
    config = small_config(bottleneck, optimizer=optimizer)
    (other,) = set(NumericMode) - {made_in}
    for segment in record_epoch(config, HONEST, num_segments=NUM_SEGMENTS, mode=made_in):
        for made in segment:
            measures = replay(config, made, other)
            assert judge(measures, config.audit)[0] is Outcome.PASS, measures
            assert bottleneck is Bottleneck.K0 or measures.rel_dw > 0


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("kind", list(STRATEGIES))
@pytest.mark.parametrize("bottleneck", [Bottleneck.RESBM, Bottleneck.IOTA, Bottleneck.NONE])
def test_every_cheat_fails_at_every_stage_and_its_neighbours_pass(
    bottleneck: Bottleneck, kind: str, stage: int
) -> None:
    config = small_config(bottleneck)
    kinds = [kind if index == stage else None for index in range(3)]
    segments = record_epoch(config, kinds, num_segments=NUM_SEGMENTS)
    for number, segment in enumerate(segments):
        for index, made in enumerate(segment):
            measures = replay(config, made)
            outcome, reason = judge(measures, config.audit)
            if index != stage:
                assert (outcome, measures.rel_d_max, measures.rel_dw) == (Outcome.PASS, 0.0, 0.0)
            elif kind != "stale" or number > 0:
                assert outcome is Outcome.FAIL, (number, measures)
                assert "limit" in reason or "out of bounds" in reason


def test_the_control_shows_a_cheat_only_where_something_is_computed_from_what_came() -> None:
    config = small_config(Bottleneck.K0)
    for stage in range(3):
        kinds = ["identity" if index == stage else None for index in range(3)]
        made = record_epoch(config, kinds, num_segments=2)[-1][stage]
        assert (judge(replay(config, made), config.audit)[0] is Outcome.FAIL) == (stage == 2)


def test_the_published_rule_accepts_a_stage_without_layers() -> None:
    config = small_config(Bottleneck.NONE)
    for stage in (1, 2):
        kinds = ["identity" if index == stage else None for index in range(3)]
        measures = replay(config, record_epoch(config, kinds, num_segments=NUM_SEGMENTS)[-1][stage])
        assert published_rule(measures)
        assert judge(measures, config.audit)[0] is Outcome.FAIL


def test_a_cheat_every_fifth_sample_fails() -> None:
    config = small_config(checkpoint_every=5)
    corpus = PatternCorpus(config)
    workers = make_workers(config)
    recorders = [Recorder(worker, run_id="run", epoch=0, hotkey="m") for worker in workers]  # type: ignore[arg-type]
    lazy = make_worker("identity", config, StageIndex(1), NumericMode.FP32)
    honest_module, lazy_module = workers[1]._module, lazy._module
    for sample in range(10):
        workers[1]._module = lazy_module if sample % 5 == 0 else honest_module
        record_pass(recorders, corpus, (0, sample, 0))
        if sample % 2:
            for recorder in recorders:
                recorder.step()
    measures = replay(config, recorders[1].close_segment())
    assert measures.num_failing >= 2
    assert judge(measures, config.audit)[0] is Outcome.FAIL


def test_samples_in_flight_over_a_step_drops_and_a_short_last_step_replay_to_the_bit() -> None:
    config = small_config()
    corpus = PatternCorpus(config)
    recorders = [Recorder(worker, run_id="run", epoch=0, hotkey="m") for worker in make_workers(config)]  # type: ignore[arg-type]
    for sample in range(4):
        payload: bytes | None = None
        for recorder in recorders:
            payload = recorder.forward((0, sample, 0), corpus.tokens(recorder.epoch, SampleId(sample)), payload)
    for sample in (2, 0, 1):
        payload = None
        for recorder in reversed(recorders):
            payload = recorder.backward((0, sample, 0), payload)
            if recorder.worker.num_accumulated == config.training.accumulate:
                recorder.step()
    for recorder in recorders:
        recorder.drop((0, 3, 0))
        recorder.step()
        measures = replay(config, recorder.close_segment())
        assert (measures.rel_d_max, measures.rel_dw, measures.num_passes) == (0.0, 0.0, 7)
        assert judge(measures, config.audit)[0] is Outcome.PASS


# ---- what does not hang together ----


def rechained(made: Recording, receipts: list[Receipt], payloads: dict[str, bytes] | None = None) -> Recording:
    """The segment with other receipts, its chain and counts made to fit: what a miner could have committed."""
    start = made.challenge.start_checkpoint
    end = msgspec.structs.replace(
        made.challenge.end_checkpoint,
        num_receipts=start.num_receipts + len(receipts),
        head=extend(start.head, receipts),
    )
    evidence = Evidence(receipts=tuple(receipts), payloads={**made.evidence.payloads, **(payloads or {})})  # type: ignore[dict-item]
    return Recording(
        challenge=msgspec.structs.replace(made.challenge, end_checkpoint=end),
        start=made.start,
        end=made.end,
        evidence=evidence,
    )


def changed_at(made: Recording, index: int, **changes: object) -> Recording:
    receipts = list(made.evidence.receipts)
    receipts[index] = msgspec.structs.replace(receipts[index], **changes)
    return rechained(made, receipts)


def without(made: Recording, index: int) -> Recording:
    receipts = list(made.evidence.receipts)
    del receipts[index]
    return rechained(made, receipts)


def moved(made: Recording, source: int, target: int) -> Recording:
    receipts = list(made.evidence.receipts)
    receipts.insert(target, receipts.pop(source))
    return rechained(made, receipts)


def with_a_late_step(made: Recording) -> Recording:
    receipts = list(made.evidence.receipts)
    receipts.insert(8, receipts.pop(4))
    return rechained(made, [msgspec.structs.replace(receipt, params_version=0) for receipt in receipts])


def replaced(made: Recording, **changes: object) -> Recording:
    fields = {"challenge": made.challenge, "start": made.start, "end": made.end, "evidence": made.evidence, **changes}
    return Recording(**fields)  # type: ignore[arg-type]


def with_other_params(made: Recording) -> Recording:
    return replaced(made, end=made.start)


def with_other_payload(made: Recording) -> Recording:
    name = made.evidence.receipts[0].output_digest
    payloads = {**made.evidence.payloads, name: bytes(len(made.evidence.payloads[name]))}
    return replaced(made, evidence=Evidence(receipts=made.evidence.receipts, payloads=payloads))


def with_short_payload(made: Recording) -> Recording:
    name = digest(b"short")
    receipts = [msgspec.structs.replace(made.evidence.receipts[0], output_digest=name), *made.evidence.receipts[1:]]
    return rechained(made, receipts, {name: b"short"})


def without_payload(made: Recording) -> Recording:
    name = made.evidence.receipts[0].output_digest
    payloads = {key: value for key, value in made.evidence.payloads.items() if key != name}
    return replaced(made, evidence=Evidence(receipts=made.evidence.receipts, payloads=payloads))


def with_counts(made: Recording, name: str, value: int, *, checkpoint_steps: int) -> Recording:
    tensors = safetensors.torch.load(made.end)
    tensors[name].fill_(value)
    data = safetensors.torch.save(tensors)
    end = msgspec.structs.replace(made.challenge.end_checkpoint, digest=digest(data), num_steps=checkpoint_steps)
    return replaced(made, end=data, challenge=msgspec.structs.replace(made.challenge, end_checkpoint=end))


# receipts of a segment: forward, backward, forward, backward, step, and the same again
FLAWS: list[tuple[int, Callable[[Recording], Recording], str]] = [
    (1, with_other_params, "not the one whose digest was committed"),
    (1, lambda made: with_counts(made, "count.num_steps", 7, checkpoint_steps=2), "taken at step 7, 2 was committed"),
    (
        1,
        lambda made: with_counts(made, "count.num_steps", 7, checkpoint_steps=7),
        "hold 2 steps, the checkpoints lie 7",
    ),
    (1, lambda made: with_counts(made, "count.num_optimizer_steps", 9, checkpoint_steps=2), "optimizer counts 9 steps"),
    (
        1,
        lambda made: replaced(made, evidence=Evidence(receipts=made.evidence.receipts[:-1], payloads={})),
        "receipts 0 to",
    ),
    (
        1,
        lambda made: replaced(
            made,
            evidence=Evidence(receipts=made.evidence.receipts[::-1], payloads=made.evidence.payloads),
        ),
        "do not lead from",
    ),
    (1, lambda made: changed_at(made, 0, epoch=1), "another epoch or stage"),
    (1, lambda made: changed_at(made, 0, stage=2), "another epoch or stage"),
    (1, lambda made: changed_at(made, 0, run_id="other"), "several runs"),
    (1, lambda made: without(made, 9), "hold 1 steps"),
    (1, lambda made: without(made, 8), "step with 1 backward passes fewer|samples open"),
    (1, lambda made: moved(made, 4, 2), "fewer than 2; only the last"),
    (1, with_a_late_step, "more than 2 backward passes between two steps"),
    (1, lambda made: moved(made, 0, 1), "no forward pass here"),
    (1, lambda made: changed_at(made, 0, params_version=1), "claims params version 1"),
    (1, lambda made: changed_at(made, 5, sample=0), "worked twice"),
    (1, lambda made: changed_at(made, 0, sample=-1), "worked twice in one segment, or is none"),
    (1, lambda made: changed_at(made, 1, direction=Direction.DROP), "DROP|drop receipt names a payload"),
    (1, lambda made: changed_at(made, 4, loss=1.0), "step receipt names a payload or a loss"),
    (1, with_other_payload, "other bytes under"),
    (1, without_payload, "lacks the payload"),
    (1, with_short_payload, "payload of 5 bytes"),
    (1, lambda made: changed_at(made, 0, output_digest=NO_DIGEST), "lacks the payload of a receipt without digest"),
    (0, lambda made: changed_at(made, 0, input_digest=digest(b"other text")), "not the corpus's"),
    (0, lambda made: changed_at(made, 1, output_digest=digest(b"")), "stage 0 sends no gradient"),
    (2, lambda made: changed_at(made, 0, loss=3.0), "does not have the digest of its receipt"),
    (2, lambda made: changed_at(made, 0, loss=None), "does not have the digest of its receipt"),
    (2, lambda made: changed_at(made, 1, input_digest=digest(b"")), "does not start from its loss"),
]


@pytest.fixture(scope="module")
def honest_segment() -> tuple[RunConfig, list[Recording]]:
    config = small_config()
    return config, record_epoch(config, HONEST, num_segments=1)[0]


@pytest.mark.parametrize(("stage", "flaw", "reason"), FLAWS, ids=range(len(FLAWS)))
def test_what_does_not_hang_together_is_named(
    honest_segment: tuple[RunConfig, list[Recording]], stage: int, flaw: Callable[[Recording], Recording], reason: str
) -> None:
    config, segments = honest_segment
    with pytest.raises(ProtocolViolation, match=reason):
        replay(config, flaw(segments[stage]))


def test_more_open_samples_than_the_run_allows_are_refused(honest_segment: tuple[RunConfig, list[Recording]]) -> None:
    config, segments = honest_segment
    tight = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, max_in_flight=1))
    made = moved(segments[1], 2, 1)
    assert judge(replay(config, made), config.audit)[0] is Outcome.PASS
    with pytest.raises(ProtocolViolation, match="more than 1 samples are open"):
        replay(tight, made)


def with_end(made: Recording, tensors: dict[str, Tensor]) -> Recording:
    """The segment with another checkpoint at its end, which is the one that was committed."""
    data = safetensors.torch.save(tensors)
    end = msgspec.structs.replace(made.challenge.end_checkpoint, digest=digest(data))
    return replaced(made, end=data, challenge=msgspec.structs.replace(made.challenge, end_checkpoint=end))


def test_a_poisoned_optimizer_state_shows(honest_segment: tuple[RunConfig, list[Recording]]) -> None:
    config, segments = honest_segment
    made = segments[1]
    tensors = safetensors.torch.load(made.end)
    for name, tensor in tensors.items():
        if name.startswith("muon.momentum."):
            tensor.neg_()
    measures = replay(config, with_end(made, tensors))
    assert np.isclose(measures.rel_dw, 2.0)
    assert judge(measures, config.audit)[0] is Outcome.FAIL


def test_no_training_at_all_is_one_away(honest_segment: tuple[RunConfig, list[Recording]]) -> None:
    config, segments = honest_segment
    made = segments[1]
    ended, began = safetensors.torch.load(made.end), safetensors.torch.load(made.start)
    untrained = {name: ended[name] if name.startswith("count.") else began[name] for name in ended}
    measures = replay(config, with_end(made, untrained))
    assert measures.rel_dw == 1.0
    assert judge(measures, config.audit)[0] is Outcome.FAIL


def test_what_does_not_hang_together_is_a_failed_audit(honest_segment: tuple[RunConfig, list[Recording]]) -> None:
    """Never a pass, and never an audit that did not take place."""
    config, segments = honest_segment
    made = segments[0]
    records = encode_evidence(made.evidence)
    broken = {
        "other records": Presented(start=made.start, end=made.end, evidence=b"\xff", anchor=None),
        "another start": Presented(start=made.end, end=made.end, evidence=records, anchor=None),
        "an epoch that began elsewhere": Presented(start=made.start, end=made.end, evidence=records, anchor=b"x"),
    }
    for presented in broken.values():
        outcome, reason, measures = judge_segment(
            config, made.challenge, presented, PatternCorpus(config), NumericMode.FP32
        )
        assert (outcome, measures) == (Outcome.FAIL, None)
        assert reason
    whole = Presented(start=made.start, end=made.end, evidence=records, anchor=None)
    assert judge_segment(config, made.challenge, whole, PatternCorpus(config), NumericMode.FP32)[0] is Outcome.PASS


@pytest.mark.parametrize(("cheat", "expected"), [(None, Outcome.PASS), ("scale", Outcome.FAIL)])
def test_a_fail_must_hold_in_the_miners_own_mode_too(cheat: str | None, expected: Outcome) -> None:
    """Limits below what the other mode's rounding comes to stand for training that is about to diverge."""
    config = small_config()
    audit = msgspec.structs.replace(config.audit, max_rel_d=1e-7, max_rel_dw=1e-6)
    strict = msgspec.structs.replace(config, audit=audit)
    segments = record_epoch(config, [None, cheat, None], num_segments=1, mode=NumericMode.BF16_AUTOCAST)
    made = segments[0][1]
    presented = Presented(start=made.start, end=made.end, evidence=encode_evidence(made.evidence), anchor=None)
    outcomes = [
        judge_segment(
            strict,
            msgspec.structs.replace(made.challenge, mode=declared),
            presented,
            PatternCorpus(config),
            NumericMode.FP32,
        )[0]
        for declared in (None, NumericMode.FP32, NumericMode.BF16_AUTOCAST)
    ]
    assert outcomes == [Outcome.FAIL, Outcome.FAIL, expected]


def test_a_mode_that_the_run_does_not_admit_is_not_replayed_in() -> None:
    config = small_config()
    audit = msgspec.structs.replace(config.audit, max_rel_d=1e-7, max_rel_dw=1e-6)
    training = msgspec.structs.replace(config.training, modes=(NumericMode.FP32,))
    strict = msgspec.structs.replace(config, audit=audit, training=training)
    made = record_epoch(config, HONEST, num_segments=1, mode=NumericMode.BF16_AUTOCAST)[0][1]
    challenge = msgspec.structs.replace(made.challenge, mode=NumericMode.BF16_AUTOCAST)
    presented = Presented(start=made.start, end=made.end, evidence=encode_evidence(made.evidence), anchor=None)
    outcome = judge_segment(strict, challenge, presented, PatternCorpus(config), NumericMode.FP32)[0]
    assert outcome is Outcome.FAIL


def test_a_cheat_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        ValueError, match="no cheat is called 'sleep'; there are identity, scale, skip, stale, truncate, zero"
    ):
        make_worker("sleep", small_config(), StageIndex(0), NumericMode.FP32)
