"""Miners whose numbers are not what their stage gives (trust.md 7): found by replay, confirmed, and out of pay."""

import pytest

from neurons.roles.miner import MakeWorker
from neurons.scoring import scored
from subnet.sim.strategies import STRATEGIES
from subnet.types import Outcome
from tests.attacks.support import TWO_A_STAGE, Trial, with_worker
from tests.sim.world import NUM_STAGES, altered
from tests.strategies import (
    FalseLoss,
    HalfSteps,
    OtherStart,
    PoisonAlongGradient,
    PoisonedUpload,
    ReplayedActivation,
    Sometimes,
    ZeroUpload,
)

ONE_SEGMENT = altered(TWO_A_STAGE, audit={"checkpoint_every": 100})
"""Every audit replays a whole epoch: what shows in one place only is not a matter of luck then."""


def check_found(trial: Trial, *, within_epochs: int) -> None:
    """Two validators failed it in time, its score is gone, and nobody else was harmed."""
    assert trial.convicted_in is not None
    assert trial.convicted_in < within_epochs
    failed = [verdict for verdict in trial.verdicts if verdict.outcome is Outcome.FAIL]
    assert len({verdict.validator for verdict in failed}) >= 2, "a second validator confirms"
    scores = scored(trial.result.record)
    assert all(scores[cheat].score == 0.0 for cheat in trial.cheats)
    trial.check_honest_are_safe()
    trial.check_cheat_earns_less()


@pytest.mark.parametrize("stage", range(NUM_STAGES))
@pytest.mark.parametrize("kind", sorted(STRATEGIES))
def test_a_lazy_stage_is_found_within_two_epochs(kind: str, stage: int) -> None:
    check_found(with_worker(STRATEGIES[kind], stage), within_epochs=2)


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_the_published_rule_lets_an_identity_stage_pass(stage: int) -> None:
    """Our verdict and that of cosine > 0.9 with norm ratio > 0.8 stand side by side in the record (trust.md 2)."""
    trial = with_worker(STRATEGIES["identity"], stage)
    failed = [verdict for verdict in trial.verdicts if verdict.outcome is Outcome.FAIL]
    assert failed
    assert all(verdict.published_rule_passes for verdict in failed)


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_half_the_steps(stage: int) -> None:
    check_found(with_worker(HalfSteps, stage), within_epochs=1)


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_cheating_on_a_fifth_of_the_samples(stage: int) -> None:
    check_found(with_worker(Sometimes, stage, config=ONE_SEGMENT), within_epochs=1)


@pytest.mark.parametrize("cheat", [ReplayedActivation, PoisonAlongGradient])
def test_false_activations(cheat: MakeWorker) -> None:
    check_found(with_worker(cheat, 1, config=ONE_SEGMENT), within_epochs=1)


def test_a_false_loss() -> None:
    """It would hide the liar, and frame or shield whoever shares its pathways."""
    check_found(with_worker(FalseLoss, NUM_STAGES - 1), within_epochs=1)


@pytest.mark.parametrize("cheat", [PoisonedUpload, ZeroUpload])
def test_honest_training_with_another_upload(cheat: MakeWorker) -> None:
    """The passes replay perfectly; the audit of the epoch's last segment compares the upload, to the bit."""
    trial = with_worker(cheat, 1, config=ONE_SEGMENT)
    check_found(trial, within_epochs=1)
    assert any("upload is not what was trained" in verdict.reason for verdict in trial.verdicts)


def test_training_from_other_params_than_the_published() -> None:
    """The passes replay perfectly; the audit of the epoch's first segment compares the start, to the bit."""
    trial = with_worker(OtherStart, 1, config=ONE_SEGMENT)
    check_found(trial, within_epochs=2)
    assert any("published params" in verdict.reason for verdict in trial.verdicts)
