"""Miners that act together, or one after the other under new names, and lies about somebody else (trust.md 7)."""

import numpy as np
import pytest

from neurons.virtual import VirtualPlan
from subnet.config import MergeConfig
from subnet.merging import gates
from subnet.merging.audits import colluding_share, detection_probability
from subnet.merging.reduce import reduce_shard
from subnet.merging.schedule import shard_plans
from subnet.orchestration import merge_trust
from subnet.orchestration.events import AuditShard
from subnet.orchestration.ledger import Assigned, CaseClosed, OutputRepeated, ReducerConvicted, UploadCopied
from subnet.orchestration.state import EpochState, StageMerge, State, Turn
from subnet.sim.strategies import IdentityWorker
from subnet.types import BlobRef, Digest, Epoch, Hotkey, Outcome, StageIndex
from subnet.wire import MergePlan
from tests.attacks.support import NUM_MINERS, with_ports, with_worker
from tests.attacks.test_lying_numbers import check_found
from tests.coordinated import Gossip, LittleIsEnough, colluding, little_is_enough
from tests.sim.world import CONFIG, NUM_STAGES, QUICK, altered, convicted, epochs, facts, simulate
from tests.strategies import ReplayedActivation

LATE_S = 15.0
CLIPPED = 1.01
"""The clip of norms moves the honest uploads as well: .965 to 1.0032 times the bound was measured."""
THREE_A_STAGE = altered(QUICK, training={"min_miners": 9})


# ---- a little is enough ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_miners", "num_colluders", "z", "is_turned"),
    [(5, 2, 0.5, False), (5, 2, 1.5, False), (10, 4, 1.5, False), (20, 9, 0.5, False), (20, 9, 1.5, True)],
)
def test_what_colluders_within_the_honest_spread_can_move_is_bounded(
    num_miners: int, num_colluders: int, z: float, is_turned: bool
) -> None:
    """No gate sees them. The merge moves by their share of `z` standard deviations and no more; where that is more than
    what is learned, as with 9 of 20 at 1.5, it turns around all the same: so their uploads are compared with their work."""
    rng = np.random.default_rng([num_miners, num_colluders])
    size, noise = 4096, 1.0
    truth = rng.standard_normal(size) * 0.3
    honest = [(truth + noise * rng.standard_normal(size)).astype(np.float32) for _ in range(num_miners)]
    known = honest[:num_colluders]
    uploads = [little_is_enough(known, z)] * num_colluders + honest[num_colluders:]
    assert all(gates.agreeing(uploads, gates.norms(uploads))[:num_colluders]), (
        "the gates let them in: so replays have to find them"
    )
    fair = reduce_shard(honest, [4] * num_miners, MergeConfig())
    moved = reduce_shard(uploads, [4] * num_miners, MergeConfig())
    share = num_colluders / num_miners
    spread = float(np.linalg.norm(np.std(np.stack(known), axis=0)))
    assert float(np.linalg.norm(moved - fair)) <= CLIPPED * share * z * spread
    assert (float(np.dot(moved, fair)) < 0.0) == is_turned


def test_colluders_within_the_honest_spread_are_convicted_by_their_checkpoints() -> None:
    """Their passes replay; their uploads are not what they trained, and that is compared to the bit."""
    ring = LittleIsEnough(2, z=1.5, chunk_bytes=CONFIG.merge.chunk_bytes)
    config = altered(THREE_A_STAGE, training={"num_epochs": 1}, audit={"checkpoint_every": 100})
    trial = with_ports(ring.ports, ring.ports, stage=1, config=config, num_miners=9, worker=ring.worker)
    check_found(trial, within_epochs=1)
    assert not [fact for fact in trial.facts if isinstance(fact, UploadCopied)]
    closed = {fact.hotkey for fact in trial.facts if isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL}
    assert closed == trial.cheats
    assert any("upload is not what was trained" in verdict.reason for verdict in trial.verdicts)


# ---- mutual shards ---------------------------------------------------------------------------------------------------


def corrupt_and_drawn(num_miners: int, num_colluders: int, seed: int, fraction: float) -> tuple[float, bool]:
    """Share of a stage's shards that colluders reduce among themselves, and whether the beacon draws one of them."""
    miners = [Hotkey(f"m{number:02d}") for number in range(num_miners)]
    beacon, stage, epoch = f"beacon {seed}", StageIndex(0), Epoch(0)
    shards = shard_plans(1 << 20, miners, beacon=beacon, stage=stage, epoch=epoch, chunk_bytes=1024)
    plan = MergePlan(epoch=epoch, stage=stage, num_elements=1 << 20, uploads=(), shards=shards)
    ref = BlobRef(key="k", digest=Digest("d"), size_bytes=4)
    everything = {shard.shard: ref for shard in shards}
    merged = EpochState(
        epoch=epoch, merges=[StageMerge(plan=plan, accepted=everything, agreed=dict.fromkeys(everything))]
    )
    config = altered(QUICK, merge={"audit_fraction": fraction})
    turn = Turn(state=State(), config=config, now_s=0.0)
    merge_trust.draw_shard_audits(turn, merged.published(), beacon=f"after {beacon}")
    drawn = [effect.shard for effect in turn.effects if isinstance(effect, AuditShard)]
    ring = set(miners[:num_colluders])
    corrupt = [shard.shard for shard in shards if ring.issuperset(shard.reducers)]
    return len(corrupt) / len(shards), not set(corrupt).isdisjoint(drawn)


@pytest.mark.parametrize(("num_miners", "num_colluders"), [(4, 2), (6, 3), (8, 4)])
def test_mutual_shards_are_drawn_at_the_computed_rate(num_miners: int, num_colluders: int) -> None:
    """Over 400 merges: k(k-1)/(N(N-1)) of the shards are mutual, and an audit of them comes as often as computed."""
    fraction, num_seeds = QUICK.merge.audit_fraction, 400
    found = [corrupt_and_drawn(num_miners, num_colluders, seed, fraction) for seed in range(num_seeds)]
    assert {share for share, _ in found} == {colluding_share(num_miners, num_colluders)}
    expected = detection_probability(num_colluders * (num_colluders - 1) // 2, fraction)
    error = (expected * (1.0 - expected) / num_seeds) ** 0.5
    assert sum(is_drawn for _, is_drawn in found) / num_seeds == pytest.approx(expected, abs=3.0 * error)


def test_colluders_on_their_one_mutual_shard_agree_with_everybody_else_and_are_found() -> None:
    """Two of three in a stage: two of the three shards are honest, the third is equal in both copies and false."""
    ring = colluding()
    config = altered(THREE_A_STAGE, merge={"audit_fraction": 1.0}, audit={"probability": 0.0, "probation_epochs": 0})
    trial = with_ports(ring, ring, stage=1, config=config, num_miners=9)
    assert not any(account.false_reducers for account in epochs(trial.result)), "no comparison sees it"
    guilty = [fact for fact in trial.facts if isinstance(fact, ReducerConvicted)]
    assert {fact.hotkey for fact in guilty} == trial.cheats
    assert {fact.epoch for fact in guilty} == {0}
    assert not trial.cheats & set(trial.result.expected)
    trial.check_honest_are_safe()


# ---- lies about others, repeated work, new names ---------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_who_frames_a_miner_or_hides_one_is_convicted_and_its_victim_is_not(factor: float) -> None:
    gossip = Gossip(factor)
    config = altered(QUICK, training={"min_miners": NUM_MINERS, "num_epochs": 1}, audit={"checkpoint_every": 100})
    trial = with_ports(gossip.ports, stage=NUM_STAGES - 1, config=config, worker=gossip.worker)
    check_found(trial, within_epochs=1)


def test_who_sends_the_same_for_every_sample_is_audited_whatever_is_drawn() -> None:
    """Its neighbour refuses what it was sent before, and is paid in full for what it did."""
    config = altered(
        QUICK,
        training={"min_miners": NUM_MINERS},
        audit={"probability": 0.0, "probation_epochs": 0},
        merge={"audit_fraction": 0.0},
        deadlines={"training_s": 15.0},
    )
    trial = with_worker(ReplayedActivation, 0, config=config)
    assert {fact.hotkey for fact in trial.facts if isinstance(fact, OutputRepeated)} == trial.cheats
    assert trial.convicted_in == 0
    trial.check_honest_are_safe()
    trial.check_cheat_earns_less()


def test_a_new_hotkey_after_a_ban_is_found_again() -> None:
    """The same machine is back under another name; both names end with nothing."""
    config = altered(QUICK, training={"min_miners": NUM_MINERS, "num_epochs": 4})
    cheats = {"m1", f"m{NUM_MINERS + 1}"}
    plan = VirtualPlan(
        seed=1,
        num_miners=NUM_MINERS + 1,
        workers=dict.fromkeys(cheats, IdentityWorker),
        late_s={f"m{NUM_MINERS + 1}": LATE_S},
    )
    result = simulate(plan, config)
    names = {result.hotkeys[name] for name in cheats}
    assert convicted(result) == names
    story = [fact for fact in facts(result) if isinstance(fact, Assigned | CaseClosed) and fact.hotkey in names]
    kinds = [(type(fact), fact.hotkey == story[0].hotkey) for fact in story]
    assert kinds == [(Assigned, True), (CaseClosed, True), (Assigned, False), (CaseClosed, False)]
    assert not names & set(result.expected)
