"""Few miners, many, leaving and joining; a network that loses messages; pay that is equal for equal work."""

import math

import pytest

from neurons.scoring import outcomes, scored
from neurons.virtual import Kill, VirtualPlan
from subnet.orchestration.ledger import Assigned, Credited, EpochStarted
from subnet.sim.network import NetworkConfig
from subnet.types import Phase
from tests.sim.world import NUM_STAGES, QUICK, altered, convicted, epochs, facts, simulate, stages

FOREVER_S = 1e6


@pytest.mark.parametrize("seed", range(4))
def test_a_network_that_loses_every_twentieth_message(seed: int) -> None:
    result = simulate(VirtualPlan(seed=seed, num_miners=5, network=NetworkConfig(loss=0.05)), QUICK)
    assert not convicted(result)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_number_of_replicas_merges(replicas: int) -> None:
    """A lone miner keeps its params; two make one shard, three make three, and both copies of each are equal."""
    plan = VirtualPlan(num_miners=NUM_STAGES * replicas)
    result = simulate(plan, altered(QUICK, training={"min_miners": NUM_STAGES * replicas}))
    for account in epochs(result):
        assert account.snapshots is not None
        assert [len(stage) for stage in account.snapshots.participants] == [replicas] * NUM_STAGES
        assert len(account.shards) == NUM_STAGES * max(1, replicas * (replicas - 1) // 2)
        for shard in account.shards:
            assert set(shard.reported) == {shard.accepted.digest}
            assert shard.is_refereed == (replicas == 1), "a single copy is compared with the orchestrator's own"


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_the_last_miner_of_a_stage_leaves_and_a_spare_moves_in(stage: int) -> None:
    """Who holds the stage goes for good in training; a miner of the fullest stage holds it in the next epoch."""
    config = altered(QUICK, training={"num_epochs": 3, "min_miners": 5})
    undisturbed = simulate(VirtualPlan(num_miners=5), config)
    leaving = [name for name, at in stages(undisturbed).items() if at == stage]
    kills = [Kill(name=name, at_s=0.2, down_s=FOREVER_S, phase=Phase.TRAINING) for name in leaving]
    result = simulate(VirtualPlan(num_miners=5, kills=tuple(kills)), config)
    gone = {result.hotkeys[name] for name in leaving}
    rosters = [fact.roster for fact in facts(result) if isinstance(fact, EpochStarted)]
    assert set(rosters[0][stage]) == gone
    for roster in rosters[1:]:
        assert roster[stage] and not gone.intersection(roster[stage])
    moves = [fact for fact in facts(result) if isinstance(fact, Assigned)]
    assert len(moves) == 5 + 1, "one spare moves, once, and nobody else does"
    assert not convicted(result)


def test_the_only_miner_of_a_stage_is_waited_for() -> None:
    """No spare anywhere: the run stands still until it is back, and then goes on; nobody is convicted for the wait."""
    kill = Kill(name="m1", at_s=0.2, down_s=1000.0, phase=Phase.TRAINING)
    result = simulate(VirtualPlan(num_miners=3, kills=(kill,)), QUICK)
    assert result.num_kills == 1
    assert epochs(result)[-1].units
    assert not convicted(result)


def test_a_late_joiner_works_in_the_next_epoch() -> None:
    config = altered(QUICK, training={"num_epochs": 3})
    result = simulate(VirtualPlan(num_miners=4, late_s={"m4": 3.0}), config)
    late = result.hotkeys["m4"]
    (assigned,) = [fact for fact in facts(result) if isinstance(fact, Assigned) and fact.hotkey == late]
    assert assigned.first_epoch == 1
    units = [len(account.units.get(late, {})) for account in epochs(result)]
    assert units[0] == 0
    assert units[1] >= config.training.min_batches
    assert units[2] >= config.training.min_batches


def test_credit_adds_up_and_equal_work_earns_equally() -> None:
    """Every completed sample is one unit of each stage; a score is the decayed sum of units times the stage's FLOPs."""
    result = simulate(VirtualPlan(seed=4, num_miners=6), altered(QUICK, training={"min_miners": 6}))
    for account in epochs(result):
        credits = [fact for fact in facts(result) if isinstance(fact, Credited) and fact.epoch == account.epoch]
        assert len(credits) == NUM_STAGES * len(account.losses)
        assert sum(len(units) for units in account.units.values()) == len(credits)
    created = result.record.accounts.created
    assert created is not None
    histories: dict[tuple[object, ...], set[float]] = {}
    for hotkey, score in scored(result.record).items():
        units = tuple(len(account.units.get(hotkey, {})) for account in epochs(result))
        stage = epochs(result)[0].stage_of[hotkey]
        kept = 1.0 - 1.0 / result.record.incentives().window_epochs
        share = created.stage_flops[stage] / min(created.stage_flops)
        by_hand = math.fsum(count * share * kept ** (len(units) - 1 - age) for age, count in enumerate(units))
        assert score.score == pytest.approx(by_hand, rel=1e-12)
        histories.setdefault((stage, units), set()).add(score.score)
    assert len(histories) < 6, "some miners of a stage did equal work in every epoch"
    assert all(len(scores) == 1 for scores in histories.values())
    assert len(outcomes(result.record.accounts)) == QUICK.training.num_epochs
