"""Miners and validators whose numbers are right and whose dealings are not (trust.md 7)."""

from collections.abc import Callable

import pytest

from neurons.roles.ports import MinerPorts
from neurons.virtual import VirtualPlan
from subnet.frames import Frame
from subnet.orchestration.ledger import Absent, CaseClosed, ShardMerged
from subnet.sim.strategies import STRATEGIES
from subnet.types import NO_DIGEST, Outcome
from tests.attacks.support import NUM_MINERS, Trial, with_ports
from tests.sim.world import QUICK, altered, cheat_at, convicted, epochs, facts, simulate, verdicts_on
from tests.strategies import (
    absent_from_challenges,
    always,
    choosing_partners,
    contradicting_itself,
    cut_short,
    forging_evidence,
    full_of_nan,
    sending,
    silent_after_the_merge,
    silent_reducer,
    storing_other_bytes,
    storing_zeros,
)

CONFIG = altered(QUICK, training={"min_miners": NUM_MINERS})
THREE_EPOCHS = altered(CONFIG, training={"num_epochs": 3})


def test_absence_from_challenges_is_void_once_and_a_fail_twice() -> None:
    trial = with_ports(absent_from_challenges, stage=1, config=THREE_EPOCHS)
    assert [fact.epoch for fact in trial.facts if isinstance(fact, Absent)][:2] == [0, 1]
    assert trial.convicted_in == 1
    assert trial.pay[0] == 0.0
    trial.check_honest_are_safe()


def test_evidence_forged_after_the_draw_contradicts_what_was_committed() -> None:
    trial = with_ports(forging_evidence, stage=1, config=CONFIG)
    assert trial.convicted_in == 0
    trial.check_honest_are_safe()
    trial.check_cheat_earns_less()


def refereed(trial: Trial) -> list[ShardMerged]:
    return [fact for fact in trial.facts if isinstance(fact, ShardMerged) and fact.is_refereed]


def test_a_corrupt_reducer_changes_nothing_and_loses_the_epoch() -> None:
    trial = with_ports(storing_zeros("shard"), stage=1, config=CONFIG)
    assert len(refereed(trial)) == CONFIG.training.num_epochs
    for account in epochs(trial.result):
        assert set(account.false_reducers) == trial.cheats
        assert trial.cheats <= set(account.voided)
    trial.check_honest_are_safe()
    assert trial.pay[0] == 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_shard_that_is_not_what_its_digest_says_costs_nobody_else_the_epoch(seed: int) -> None:
    """The liar's copy is the accepted one. Once all others of its stage could not step from it and were not paid."""
    trial = with_ports(storing_other_bytes("shard"), stage=1, config=CONFIG, seed=seed)
    for account in epochs(trial.result):
        assert any(cheat in shard.accepted.key for cheat in trial.cheats for shard in account.shards)
        assert not account.missed
    assert trial.pay[1] > 0.0
    trial.check_honest_are_safe()


def test_the_referee_takes_no_bytes_that_are_not_what_their_digest_says() -> None:
    """A stage's miners store other bytes and leave the outer step to the orchestrator, which once published what came of them."""

    def leave(ports: MinerPorts) -> MinerPorts:
        return silent_after_the_merge(storing_other_bytes("shard")(ports))

    published = []
    for dealing in (silent_after_the_merge, leave):
        first = epochs(with_ports(dealing, dealing, stage=1, config=CONFIG).result)[0]
        assert first.snapshots is not None
        published.append(first.snapshots.snapshots[1].digest)
    assert published[0] == published[1]


def test_a_reducer_that_reports_nothing_holds_up_no_merge() -> None:
    trial = with_ports(silent_reducer, stage=1, config=CONFIG)
    for shard in refereed(trial):
        assert NO_DIGEST in shard.reported
        assert [digest for digest in shard.reported if digest != NO_DIGEST] == [shard.accepted.digest]
    assert len(refereed(trial)) == CONFIG.training.num_epochs
    check_missed(trial)


def check_missed(trial: Trial) -> None:
    """Its part was missing in every epoch, and no epoch is paid; nobody is banned for what may be a slow line."""
    for account in epochs(trial.result):
        assert set(account.missed) == trial.cheats
    assert trial.pay[0] == 0.0
    assert not convicted(trial.result)


def test_who_never_reports_its_outer_step_is_not_paid_either() -> None:
    check_missed(with_ports(silent_after_the_merge, stage=1, config=CONFIG))


def test_an_upload_that_its_own_commitment_contradicts_is_left_out_and_unpaid() -> None:
    trial = with_ports(contradicting_itself, stage=1, config=CONFIG)
    for account in epochs(trial.result):
        assert set(account.rejected) == trial.cheats
    assert trial.pay[0] == 0.0
    assert not convicted(trial.result)


def test_colluding_reducers_lose_against_the_third() -> None:
    """Two of three corrupt whatever they reduce: what each shares with the honest one is refereed and names them.

    The shard that they share agrees; an audit of it, which other tests look at, would ban them before the second epoch.
    """
    config = altered(CONFIG, training={"min_miners": 9}, merge={"audit_fraction": 0.0})
    liar = storing_zeros("shard")
    trial = with_ports(liar, liar, stage=1, config=config, num_miners=9)
    for account in epochs(trial.result):
        assert set(account.false_reducers) == trial.cheats
        assert sum(shard.is_refereed for shard in account.shards) == 2
    trial.check_honest_are_safe()
    trial.check_cheat_earns_less()


@pytest.mark.parametrize("num_liars", [1, 2])
def test_a_false_snapshot_is_never_published(num_liars: int) -> None:
    """Also when both miners that were drawn to store it lie in the same way: the third's digest contradicts them."""
    config = altered(CONFIG, training={"min_miners": 9, "num_epochs": 3})
    trial = with_ports(*[storing_zeros("snapshot")] * num_liars, stage=1, config=config, num_miners=9)
    assert all(account.units for account in epochs(trial.result)), "every epoch could start from what was published"
    trial.check_honest_are_safe()


@pytest.mark.parametrize("alter", [full_of_nan, cut_short])
def test_frames_that_are_not_what_was_announced_earn_nothing(alter: Callable[[Frame], Frame]) -> None:
    trial = with_ports(sending(alter), stage=1, config=CONFIG)
    assert trial.pay[0] == 0.0
    assert trial.pay[1] > 0.0
    trial.check_honest_are_safe()


def test_a_neighbour_that_refuses_delivery_loses_the_work() -> None:
    trial = with_ports(choosing_partners(lambda _: False), stage=1, config=CONFIG)
    trial.check_honest_are_safe()
    trial.check_cheat_earns_less()


def test_a_validator_that_always_fails_convicts_nobody() -> None:
    """Each of its verdicts is contradicted by a second validator, and a third decides."""
    plan = VirtualPlan(seed=1, num_miners=3, num_validators=3, validator_ports={"v1": always(Outcome.FAIL)})
    result = simulate(plan, QUICK)
    cases = [fact for fact in facts(result) if isinstance(fact, CaseClosed)]
    assert {case.outcome for case in cases} == {Outcome.PASS}
    assert any(len(verdicts_on(result, case.hotkey)) > QUICK.training.num_epochs for case in cases)


def test_a_validator_that_always_passes_only_delays() -> None:
    """It clears what it is asked first; as soon as an honest one is drawn, that one and a second honest one convict."""
    cheats = cheat_at(1, STRATEGIES["identity"], num_miners=NUM_MINERS)
    plan = VirtualPlan(
        seed=1,
        num_miners=NUM_MINERS,
        num_validators=3,
        workers=cheats,
        validator_ports={"v1": always(Outcome.PASS)},
    )
    result = simulate(plan, THREE_EPOCHS)
    (cheat,) = convicted(result)
    assert epochs(result)[0].stage_of[cheat] == 1
    assert cheat not in result.expected
