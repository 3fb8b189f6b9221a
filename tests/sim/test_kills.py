"""Kills of anything at any time: nothing is lost twice or paid twice, and the run goes on (trust.md 8)."""

import pytest

from neurons.virtual import Kill, VirtualPlan, VirtualSubnet, random_kills
from subnet.adapters.corpus import make_corpus
from subnet.orchestration.ledger import Credited, SampleDropped
from subnet.orchestration.stored import decode_state
from subnet.sim.loop import run
from subnet.types import Phase
from tests.sim.world import INCENTIVES, QUICK, altered, check_holds, convicted, epochs, facts, simulate

NUM_MINERS = 5
NUM_VALIDATORS = 2
NAMES = [*(f"m{n + 1}" for n in range(NUM_MINERS)), "v1", "v2", "orchestrator"]


def plan_with(*kills: Kill, seed: int = 0) -> VirtualPlan:
    return VirtualPlan(seed=seed, num_miners=NUM_MINERS, num_validators=NUM_VALIDATORS, kills=kills)


@pytest.mark.parametrize("seed", range(50))
def test_random_kills_leave_every_invariant_whole(seed: int) -> None:
    """A dozen kills over the time an undisturbed run takes; those that find their victim down already do nothing."""
    result = simulate(plan_with(*random_kills(seed, names=NAMES, count=12, until_s=60.0), seed=seed), QUICK)
    assert result.num_kills >= 3
    assert not convicted(result), "an honest node that was killed is not a cheat"


@pytest.mark.parametrize("name", ["m1", "v1", "orchestrator"])
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.FINISHED])
@pytest.mark.parametrize("at_s", [0.0, 0.3])
def test_a_kill_in_each_phase(name: str, phase: Phase, at_s: float) -> None:
    """At the phase's beginning, and a moment later when requests are under way."""
    epoch = {Phase.PUBLISHED: 1, Phase.CLOSING: 2}.get(phase, 0)
    result = simulate(plan_with(Kill(name=name, at_s=at_s, down_s=4.0, phase=phase, epoch=epoch)), QUICK)
    assert result.num_kills == 1
    assert not convicted(result)


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.COMMITTING, Phase.UPLOADING, Phase.MERGING])
def test_everything_is_killed_at_once(phase: Phase) -> None:
    kills = [Kill(name=name, at_s=0.1, down_s=1.0 + place, phase=phase) for place, name in enumerate(NAMES)]
    result = simulate(plan_with(*kills), QUICK)
    assert result.num_kills == len(NAMES)
    assert not convicted(result)


@pytest.mark.parametrize("at_s", [0.01 * step for step in range(1, 21)])
def test_the_orchestrator_is_killed_at_every_step_of_a_merge(at_s: float) -> None:
    result = simulate(plan_with(Kill(name="orchestrator", at_s=at_s, down_s=1.0, phase=Phase.MERGING)), QUICK)
    assert result.num_kills == 1
    assert not convicted(result)


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.12, 0.16, 0.22, 0.27])
def test_the_orchestrator_is_killed_around_a_seal(at_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the event that seals is written, after that and before the state is stored, and after both: each takes .1 s."""
    monkeypatch.setattr("neurons.virtual.FLUSH_S", 0.1)
    result = simulate(
        plan_with(Kill(name="orchestrator", at_s=at_s, down_s=1.0, phase=Phase.PUBLISHED, epoch=1)), QUICK
    )
    assert result.num_kills == 1
    assert not convicted(result)


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.PUBLISHED])
def test_the_orchestrator_is_away_for_longer_than_a_request_waits_when_miners_report_ready(phase: Phase) -> None:
    """Once nobody said it again, and no epoch began any more."""
    epoch = {Phase.PUBLISHED: 1}.get(phase, 0)
    result = simulate(
        plan_with(Kill(name="orchestrator", at_s=0.04, down_s=60.0, phase=phase, epoch=epoch)),
        altered(QUICK, training={"min_miners": NUM_MINERS}),
    )
    assert result.num_kills == 1
    assert not convicted(result)


def test_scores_are_posted_again_when_the_orchestrator_was_away_for_longer_than_a_request_waits() -> None:
    """Weights were set by then and are not set again, so nothing brought the scores back. The run ends when all are there."""
    result = simulate(plan_with(Kill(name="orchestrator", at_s=2.5, down_s=60.0, phase=Phase.FINISHED, epoch=2)), QUICK)
    assert result.num_kills == 1


def test_every_orchestrator_starts_from_the_state_that_the_one_before_stored() -> None:
    """What is left in the end is the whole state and a short journal, however long the run was."""
    kills = [Kill(name="orchestrator", at_s=0.2, down_s=1.0, phase=Phase.TRAINING, epoch=epoch) for epoch in range(3)]
    config = altered(QUICK, training={"num_epochs": 3})

    async def story() -> None:
        subnet = VirtualSubnet(config, INCENTIVES, make_corpus(config), plan_with(*kills))
        result = await subnet.run()
        check_holds(result, config)
        assert result.num_kills == 3
        kept = await subnet._store.get_state()
        assert kept is not None
        state = decode_state(kept.data)
        assert state.phase is Phase.FINISHED and state.ledger.head == result.record.head
        after = [entry async for entry in subnet._store.read(after=kept.at_record)]
        assert len(after) < 20 < kept.at_record

    run(story())


def test_nobody_is_killed_and_nothing_is_dropped() -> None:
    result = simulate(plan_with(), QUICK)
    assert result.num_kills == 0
    assert not [fact for fact in facts(result) if isinstance(fact, SampleDropped)]


@pytest.mark.parametrize("seed", [33, 49])
def test_samples_are_not_burnt_on_a_stage_that_cannot_be_reached(seed: int) -> None:
    """Once each miner before a dead replica leased a dozen samples a second until it was known to be dead."""
    kills = random_kills(seed, names=NAMES, count=12, until_s=60.0)
    result = simulate(plan_with(*kills, seed=seed), QUICK)
    assert sum(isinstance(fact, SampleDropped) for fact in facts(result)) < 50
    assert sum(isinstance(fact, Credited) for fact in facts(result)) > 90
    assert all(account.losses for account in epochs(result))
