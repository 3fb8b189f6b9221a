"""Cheats that no drawn replay has to meet first: their losses stand out, or their agreeing copies are recomputed."""

from neurons.checks import History
from neurons.trust_checks import check_audit_draws, check_flags, check_shard_audits
from subnet.adapters.auth import KeypairSigner
from subnet.orchestration.ledger import CaseClosed, Challenged, Flagged, ReducerConvicted, ShardAudited, UploadCopied
from subnet.types import Outcome
from tests.attacks.support import NUM_MINERS, TWO_A_STAGE, Trial, with_ports, with_worker
from tests.coordinated import copying
from tests.sim.world import NUM_STAGES, altered, epochs
from tests.strategies import FalseLoss, storing_zeros

UNAUDITED = altered(
    TWO_A_STAGE,
    training={"num_epochs": 3, "target_batches": 24},
    audit={"probability": 0.0, "probation_epochs": 0},
    merge={"audit_fraction": 0.0},
)
"""No audit is drawn by chance."""


def check_outsider(trial: Trial) -> None:
    """Whoever reads the record comes to the same flags and the same drawn shards."""
    history = History(owner=trial.result.hotkeys["orchestrator"], record=trial.result.record)
    verify = KeypairSigner.from_uri("//reader").verify
    for finding in (check_audit_draws(history), check_flags(history, verify), check_shard_audits(history)):
        assert finding.holds, finding


def test_a_copied_update_is_seen_in_the_commitments_and_earns_neither_anything() -> None:
    trial = with_ports(*copying(), stage=1, config=altered(UNAUDITED, training={"num_epochs": 2, "target_batches": 8}))
    copies = [fact for fact in trial.facts if isinstance(fact, UploadCopied)]
    assert [(fact.epoch, set(fact.pair), fact.share > 0.5) for fact in copies] == [
        (epoch, set(trial.cheats), True) for epoch in range(2)
    ]
    assert not set(trial.result.expected) & trial.cheats
    assert len(trial.result.expected) == NUM_MINERS - 2
    assert all(not account.snapshots.participants[1] for account in epochs(trial.result) if account.snapshots)
    check_outsider(trial)


def test_a_false_loss_is_flagged_audited_and_convicted() -> None:
    trial = with_worker(FalseLoss, stage=NUM_STAGES - 1, config=UNAUDITED)
    (cheat,) = trial.cheats
    flags = [fact.flag for fact in trial.facts if isinstance(fact, Flagged)]
    assert {flag.hotkey for flag in flags} >= {cheat}
    challenged = [fact for fact in trial.facts if isinstance(fact, Challenged)]
    assert {fact.hotkey for fact in challenged} <= {flag.hotkey for flag in flags}
    assert min(fact.epoch for fact in challenged) >= 1
    closed = [fact for fact in trial.facts if isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL]
    assert {fact.hotkey for fact in closed} == {cheat}
    trial.check_cheat_earns_less()
    check_outsider(trial)


def test_colluding_reducers_are_convicted_by_the_recomputed_shard() -> None:
    """Both miners of a stage store the same zeros: their copies agree, and no comparison can see it."""
    config = altered(UNAUDITED, training={"target_batches": 8}, merge={"audit_fraction": 1.0})
    trial = with_ports(storing_zeros("shard"), storing_zeros("shard"), stage=0, config=config)
    convicted = [fact for fact in trial.facts if isinstance(fact, ReducerConvicted)]
    assert {fact.hotkey for fact in convicted} == trial.cheats
    assert {fact.epoch for fact in convicted} >= {0}
    audited = [fact for fact in trial.facts if isinstance(fact, ShardAudited)]
    assert {fact.stage for fact in audited if fact.recomputed.digest != fact.accepted.digest} == {0}
    assert len(trial.result.expected) == NUM_MINERS - 2
    assert not [fact for fact in trial.facts if isinstance(fact, UploadCopied)]
    assert all(account.is_published for account in epochs(trial.result))
    check_outsider(trial)
