"""Miners that cannot be dialled, in whole subnets: they train, are audited, merge and are paid (users.md 39, DESIGN D84)."""

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from neurons.local.simulated import behind_nat
from neurons.roles.ports import MinerPorts
from neurons.virtual import Kill, VirtualPlan, VirtualResult
from subnet.orchestration.ledger import CaseClosed, Leased, SampleDropped
from subnet.sim.network import CutPeers
from subnet.types import Outcome, Phase
from tests.sim.world import NUM_STAGES, QUICK, altered, convicted, epochs, facts, simulate, stages

FOREVER_S = 1e6
CONFIG = altered(QUICK, training={"min_miners": 6})


def unreachable(*names: str, num_miners: int, seed: int = 0) -> VirtualPlan:
    return VirtualPlan(seed=seed, num_miners=num_miners, miner_ports=dict.fromkeys(names, behind_nat))


def num_units(result: VirtualResult, name: str) -> int:
    return sum(len(account.units.get(result.hotkeys[name], {})) for account in epochs(result))


@functools.cache
def undisturbed() -> VirtualResult:
    """Six miners that reach each other, two for each stage."""
    return simulate(VirtualPlan(num_miners=6), CONFIG)


def miners_of(stage: int) -> list[str]:
    """Who is given `stage` there, and in every run of as many miners."""
    return [name for name, at in stages(undisturbed()).items() if at == stage]


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_a_miner_that_nobody_can_dial_trains_is_audited_merges_and_is_paid(stage: int) -> None:
    """At both ends and in the middle: activations come by the store, or gradients, or both."""
    name = miners_of(stage)[0]
    result = simulate(unreachable(name, num_miners=6), CONFIG)
    hotkey = result.hotkeys[name]
    assert stages(result)[name] == stage
    audits = [fact.outcome for fact in facts(result) if isinstance(fact, CaseClosed) and fact.hotkey == hotkey]
    assert audits and set(audits) == {Outcome.PASS}
    for account in epochs(result):
        assert account.snapshots is not None
        assert hotkey in account.snapshots.participants[stage]
        assert len(account.units[hotkey]) >= CONFIG.training.min_batches
    assert result.expected[hotkey] > 0.0
    assert not [fact for fact in facts(result) if isinstance(fact, SampleDropped)]
    assert not convicted(result)


def test_a_lone_miner_of_its_stage_and_all_others_may_be_behind_a_nat() -> None:
    """Nothing at all can be pushed; every sample is trained on all the same."""
    names = [f"m{n + 1}" for n in range(NUM_STAGES)]
    result = simulate(unreachable(*names, num_miners=NUM_STAGES), QUICK)
    assert result.num_payload_bytes == 0 < undisturbed().num_payload_bytes
    assert all(num_units(result, name) >= 2 * QUICK.training.target_batches for name in names)
    assert not [fact for fact in facts(result) if isinstance(fact, SampleDropped)]
    assert not [fact for fact in facts(result) if isinstance(fact, Leased) and fact.attempt > 0]


PLAN = unreachable("m2", num_miners=3, seed=5)
CODE = (
    "import torch; torch.set_num_threads(1)\n"
    "from tests.sim.test_detours import PLAN\n"
    "from tests.sim.world import QUICK, simulate\n"
    "print(simulate(PLAN, QUICK).digest)"
)


def test_same_seed_same_digest() -> None:
    env = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == simulate(PLAN, QUICK).digest


def test_a_way_that_is_cut_for_a_while_heals() -> None:
    """A miner cannot dial those of stage 1 for 4 s: they hear from it by the store, and then it pushes again."""
    config = altered(CONFIG, training={"target_batches": 16})
    seconds = tuple(undisturbed().hotkeys[name] for name in miners_of(1))
    made: list[CutPeers] = []

    def cut(ports: MinerPorts) -> MinerPorts:
        since_s = ports.clock.now() + 1.0
        peers = CutPeers(
            peers=ports.peers, clock=ports.clock, unreachable=seconds, since_s=since_s, until_s=since_s + 4.0
        )
        made.append(peers)
        return replace(ports, peers=peers)

    first = miners_of(0)[0]
    result = simulate(VirtualPlan(num_miners=6, miner_ports={first: cut}), config)
    (peers,) = made
    assert peers.num_cut and peers.num_healed
    assert peers.num_cut < num_units(result, first) / 2, "not every frame is tried in vain"
    assert num_units(result, first) >= 2 * config.training.min_batches
    assert not [fact for fact in facts(result) if isinstance(fact, SampleDropped)]
    assert not convicted(result)


def test_a_restarted_orchestrator_has_forgotten_the_frames_and_loses_nothing_but_time() -> None:
    kill = Kill(name="orchestrator", at_s=1.0, down_s=2.0, phase=Phase.TRAINING)
    plan = replace(unreachable("m1", "m2", "m3", num_miners=3), kills=(kill,))
    result = simulate(plan, QUICK)
    assert result.num_kills == 1
    assert all(num_units(result, f"m{n}") >= 2 * QUICK.training.min_batches for n in (1, 2, 3))
    assert not convicted(result)


def test_a_miner_that_is_gone_is_routed_around_as_ever() -> None:
    """Who does not collect either is dead: its neighbours give their samples to the replica."""
    kill = Kill(name=miners_of(1)[0], at_s=1.0, down_s=FOREVER_S, phase=Phase.TRAINING)
    result = simulate(VirtualPlan(num_miners=6, kills=(kill,)), CONFIG)
    assert [fact for fact in facts(result) if isinstance(fact, Leased) and fact.attempt > 0]
    assert epochs(result)[-1].losses
    assert not convicted(result)
