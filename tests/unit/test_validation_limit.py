"""The limit on distances that a network's validators come to, and who may audit under it (trust.md 2)."""

import msgspec
import pytest

from neurons.checks import Finding, History
from neurons.limit_checks import check_limits
from subnet import wire
from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.orchestration.calibration import limit_over
from subnet.orchestration.ledger import AnyFact, Calibrated, Challenged
from subnet.types import Epoch, Noise, NumericMode, Outcome, StageIndex
from subnet.validation.judging import with_limit
from tests.numerics.support import small_config
from tests.unit.orchestration import CONFIG, MINERS, STRANGER, VALIDATORS, Run
from tests.unit.recorded import Book
from tests.unit.test_trust_checks import history

FIRST = Epoch(0)


def noise(distance: float, **changes: float) -> Noise:
    figures = {
        "rel_d_token": 0.0,
        "rel_d_backward": 0.0,
        "rel_d_backward_token": 0.0,
        "rel_dw": 0.0,
        "loss_error": 0.0,
        **changes,
    }
    return Noise(mode=NumericMode.FP32, machine="a test", rel_d=distance, **figures)


def published(*distances: float) -> Run:
    """Validators publish these, then six miners are audited."""
    run = Run()
    run.begin(*MINERS)
    for validator, distance in zip(VALIDATORS, distances, strict=False):
        run.done(validator, wire.PostNoise(noise=noise(distance)))
    run.train()
    run.commit()
    return run


@pytest.mark.parametrize(
    ("distances", "limit"),
    [
        ([], 0.04),
        ([0.0], 0.03),
        ([0.012, 0.015, 0.5], 0.045),
        ([0.012, 0.016], 0.042),
        ([0.001, 0.5, 0.6], 0.08),
    ],
)
def test_three_times_the_median_within_bounds(distances: list[float], limit: float) -> None:
    assert limit_over(distances, otherwise=0.04) == pytest.approx(limit)


def test_a_challenge_carries_the_limit_of_its_moment_and_so_does_the_record() -> None:
    run = published(0.012, 0.014, 0.016)
    assert [fact.noise.rel_d for fact in run.facts(Calibrated)] == [0.012, 0.014, 0.016]
    for fact in run.facts(Challenged):
        assert fact.max_rel_d == pytest.approx(0.042)
        assert fact.mode is NumericMode.FP32
        challenge = run.state.cases[FIRST, fact.hotkey].challenge
        assert (challenge.max_rel_d, challenge.mode) == (fact.max_rel_d, fact.mode)


def test_without_a_measurement_the_runs_own_limit_stands() -> None:
    assert {fact.max_rel_d for fact in published().facts(Challenged)} == {CONFIG.audit.max_rel_d}


def test_a_noisy_validator_does_not_audit_and_is_not_asked_to_confirm() -> None:
    run = published(0.012, 0.2, 0.013)
    noisy = VALIDATORS[1]
    assert noisy not in {case.asked[0] for case in run.state.cases.values()}
    miner = MINERS[0]
    run.done(miner, run.answer(miner))
    case = run.state.cases[FIRST, miner]
    while case.outcome is None:
        run.done(case.asked[-1], run.verdict(case.asked[-1], miner, Outcome.INCONCLUSIVE))
    assert sorted(case.asked) == sorted({*VALIDATORS} - {noisy})


def test_gradients_count_as_well() -> None:
    assert noise(0.01, rel_d_backward=0.02).distance == 0.02


def test_noise_is_published_by_validators_once_and_again_when_it_changed() -> None:
    run = Run()
    run.begin(*MINERS)
    assert run.refusal(STRANGER, wire.PostNoise(noise=noise(0.0))) == "permit"
    assert run.refusal(MINERS[0], wire.PostNoise(noise=noise(0.0))) == "permit"
    negative = noise(-0.02, rel_d_backward=-0.01)
    assert run.refusal(VALIDATORS[0], wire.PostNoise(noise=negative)) == "noise"
    for distance in (0.01, 0.01, 0.02):
        run.done(VALIDATORS[0], wire.PostNoise(noise=noise(distance)))
    assert [fact.noise.rel_d for fact in run.facts(Calibrated)] == [0.01, 0.02]


@pytest.mark.parametrize("value", ["NaN", "null", '"NaN"'])
def test_noise_that_is_none_is_refused(value: str) -> None:
    body = wire.encode(wire.PostNoise(noise=noise(0.5))).replace(b"0.5", value.encode())
    with pytest.raises(ProtocolViolation, match="does not decode"):
        wire.decode(wire.PostNoise, body)


def test_a_judge_takes_the_challenges_limit() -> None:
    config = small_config()
    run = published(0.012, 0.014, 0.016)
    challenge = run.state.cases[FIRST, MINERS[0]].challenge
    assert with_limit(config, challenge).audit.max_rel_d == pytest.approx(0.042)
    assert with_limit(config, challenge).audit.max_rel_dw == config.audit.max_rel_dw
    for unlikely in (None, 0.0, 0.029, 0.09, float("inf")):
        assert with_limit(config, msgspec.structs.replace(challenge, max_rel_d=unlikely)) == config


def recorded(*facts: AnyFact) -> Finding:
    book = Book(config=RunConfig()).start(0)
    book.say(*facts)
    return check_limits(history(book))


def challenged(limit: float | None) -> Challenged:
    return Challenged(
        epoch=FIRST, hotkey=MINERS[0], stage=StageIndex(0), segment=0, auditor=VALIDATORS[0], max_rel_d=limit
    )


def test_whoever_reads_the_record_comes_to_the_same_limits() -> None:
    before, after = challenged(0.04), challenged(limit_over([0.02], otherwise=0.04))
    noisy = Calibrated(validator=VALIDATORS[0], noise=noise(0.02))
    found = recorded(before, noisy, after)
    assert (found.holds, found.detail) == (True, "2 audits, noise of 1 validators")
    found = recorded(noisy, before)
    assert found.holds is False
    assert "was judged by 0.04, the record yields 0.06" in found.detail
    assert check_limits(History(owner=STRANGER)).holds is False
