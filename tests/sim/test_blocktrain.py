"""Stages that train apart, whole subnets of them: the bits, who changes what, lateness, cheats, and pay (papers.md B3)."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from neurons.roles.miner import MakeWorker
from neurons.roles.ports import MinerPorts
from neurons.virtual import Kill, VirtualPlan, VirtualResult, random_kills
from subnet.adapters.corpus import make_corpus
from subnet.config import BlockTrainConfig, Objective, RunConfig, RunKind
from subnet.frames import digest
from subnet.lanes import lanes
from subnet.orchestration.ledger import CaseClosed, UpdateMergedLate
from subnet.orchestration.rounds import mean_losses, participation
from subnet.ports import Blobs
from subnet.sim.strategies import make_worker
from subnet.training.pipeline import StageWorker
from subnet.training.rounds import Rounds
from subnet.types import Digest, NumericMode, Outcome, Phase, StageIndex
from tests.sim.world import QUICK, altered, convicted, epochs, facts, simulate, stages, verdicts_on

NUM_STAGES = 3
NUM_MINERS = 5
TRAINING = {
    "num_stages": NUM_STAGES,
    "outer_learning_rate": 1.0,
    "outer_momentum": 0.0,
    "quorum": 1.0,
    "min_miners": NUM_MINERS,
    "num_epochs": 2,
}
NAMES = [*(f"m{n + 1}" for n in range(NUM_MINERS)), "v1", "v2", "orchestrator"]


def apart(objective: Objective = Objective.GREEDY, *, max_staleness: int = 0, **training: object) -> RunConfig:
    config = altered(QUICK, training=TRAINING | training)
    blocktrain = BlockTrainConfig(objective=objective, max_staleness=max_staleness)
    return msgspec.structs.replace(config, kind=RunKind.BLOCKTRAIN, blocktrain=blocktrain)


PLAN = VirtualPlan(num_miners=NUM_MINERS)
KILLED = VirtualPlan(seed=3, num_miners=NUM_MINERS, kills=random_kills(3, names=NAMES, count=4, until_s=60.0))
CODE = (
    "import torch; torch.set_num_threads(1)\n"
    "from tests.sim.test_blocktrain import KILLED, apart\n"
    "from tests.sim.world import simulate\n"
    "print(simulate(KILLED, apart(num_epochs=1)).digest)"
)


def published(result: VirtualResult) -> list[list[Digest]]:
    """Digests of each epoch's snapshots, by stage."""
    return [[ref.digest for ref in account.snapshots.snapshots] for account in epochs(result) if account.snapshots]


def once_more(result: VirtualResult, config: RunConfig) -> list[list[Digest]]:
    """The same, of the same work by plain calls in one process."""
    rounds, found = Rounds(config, make_corpus(config)), []
    for account in epochs(result):
        rounds.play(
            account.epoch,
            [
                {
                    hotkey: sorted(samples)
                    for hotkey, samples in account.units.items()
                    if account.stage_of[hotkey] == stage
                }
                for stage in range(config.training.num_stages)
            ],
        )
        found.append([digest(data) for data in rounds.snapshots])
    return found


@pytest.mark.parametrize("objective", list(Objective))
def test_the_published_params_are_those_of_one_process_to_the_bit(objective: Objective) -> None:
    config = apart(objective)
    result = simulate(PLAN, config)
    assert published(result) == once_more(result, config)
    assert not convicted(result)


def test_every_worker_does_the_same_work_and_all_of_it_is_paid() -> None:
    config = apart()
    result = simulate(PLAN, config)
    for account in epochs(result):
        assert {len(samples) for samples in account.units.values()} == {config.training.target_batches}
        assert [(one.assigned, one.accepted) for one in participation(account)] == [(1, 1), (2, 2), (2, 2)]
        assert all(loss is not None for loss in mean_losses(account, lanes(config)))
        assert not account.voided
        assert account.evaluation is not None
    assert all(fact.outcome == Outcome.PASS for fact in facts(result) if isinstance(fact, CaseClosed))
    assert set(result.expected) == {result.hotkeys[f"m{n + 1}"] for n in range(NUM_MINERS)}


# ---- late and absent workers ----


def elsewhere(result: VirtualResult, stage: int) -> list[list[Digest]]:
    """Published digests of every stage but one."""
    return [[found for at, found in enumerate(row) if at != stage] for row in published(result)]


@pytest.fixture(scope="module")
def undisturbed() -> VirtualResult:
    return simulate(PLAN, apart(Objective.DIFFUSION, max_staleness=1))


def worker_of(result: VirtualResult, stage: int) -> str:
    """A miner of a stage that has two."""
    return next(name for name, at in stages(result).items() if at == stage)


def test_a_worker_that_is_killed_for_good_changes_its_own_stage_alone(undisturbed: VirtualResult) -> None:
    name = worker_of(undisturbed, 2)
    kill = Kill(name=name, at_s=0.2, down_s=1e6, phase=Phase.TRAINING)
    result = simulate(replace(PLAN, kills=(kill,)), apart(Objective.DIFFUSION, max_staleness=1))
    assert elsewhere(result, 2) == elsewhere(undisturbed, 2)
    assert published(result) != published(undisturbed)
    first, *later = [participation(account) for account in epochs(result)]
    assert [(one.assigned, one.accepted) for one in first] == [(1, 1), (2, 2), (2, 1)]
    assert {(row[2].assigned, row[2].accepted) for row in later} == {(1, 1)}
    assert not convicted(result)


def test_a_worker_that_is_killed_and_comes_back_does_its_whole_round(undisturbed: VirtualResult) -> None:
    """What it had not kept is given to it again, and its share in the round is whole."""
    config = apart(Objective.DIFFUSION, max_staleness=1)
    name = worker_of(undisturbed, 2)
    result = simulate(replace(PLAN, kills=(Kill(name=name, at_s=0.3, down_s=3.0, phase=Phase.TRAINING),)), config)
    assert result.num_kills == 1
    assert elsewhere(result, 2) == elsewhere(undisturbed, 2)
    for account in epochs(result):
        assert {len(samples) for samples in account.units.values()} == {config.training.target_batches}


class SlowUpload:
    """A worker's way to the store on which its first pseudo-gradient takes its time."""

    def __init__(self, ports: MinerPorts, delay_s: float) -> None:
        self._blobs: Blobs = ports.blobs
        self._clock = ports.clock
        self._delays_s = [delay_s]

    async def put(self, url: str, data: bytes) -> None:
        if "/upload/" in url and self._delays_s:
            await self._clock.sleep(self._delays_s.pop())
        await self._blobs.put(url, data)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        return await self._blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        return await self._blobs.get_into(url, buffer, start=start)


def slowed(delay_s: float) -> Callable[[MinerPorts], MinerPorts]:
    return lambda ports: replace(ports, blobs=SlowUpload(ports, delay_s))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_upload_that_misses_its_round_is_merged_in_the_next_or_not_at_all(
    max_staleness: int, undisturbed: VirtualResult
) -> None:
    config = apart(Objective.DIFFUSION, max_staleness=max_staleness)
    name = worker_of(undisturbed, 2)
    result = simulate(replace(PLAN, miner_ports={name: slowed(50.0)}), config)
    assert elsewhere(result, 2) == elsewhere(undisturbed, 2)
    late = [(fact.epoch, fact.base_epoch, fact.hotkey) for fact in facts(result) if isinstance(fact, UpdateMergedLate)]
    assert late == [(1, 0, result.hotkeys[name])] * max_staleness
    first, second = [participation(account)[2] for account in epochs(result)]
    assert (first.assigned, first.accepted, first.late) == (2, 1, 0)
    assert (second.assigned, second.accepted, second.late) == (2, 2, max_staleness)
    assert not convicted(result)


@pytest.mark.parametrize("seed", [0])
def test_random_kills_leave_every_invariant_whole(seed: int) -> None:
    kills = random_kills(seed, names=NAMES, count=8, until_s=60.0)
    result = simulate(replace(PLAN, seed=seed, kills=kills), apart(max_staleness=1))
    assert result.num_kills >= 2
    assert not convicted(result)


def test_processes_with_another_hash_seed_agree() -> None:
    env = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == simulate(KILLED, apart(num_epochs=1)).digest


# ---- cheats ----


class Cheat:
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> StageWorker:
        return make_worker(self._kind, config, stage, mode)


@pytest.mark.parametrize("objective", list(Objective))
def test_every_cheat_is_convicted_within_two_epochs_and_no_honest_worker_is(objective: Objective) -> None:
    kinds = ("identity", "scale", "skip", "stale", "truncate", "zero")
    num_miners = len(kinds) + 2
    config = apart(objective, num_stages=2, min_miners=num_miners)
    workers: dict[str, MakeWorker] = {f"m{n + 1}": Cheat(kind) for n, kind in enumerate(kinds)}
    result = simulate(replace(PLAN, num_miners=num_miners, workers=workers), config)
    cheats = {result.hotkeys[name] for name in workers}
    assert convicted(result) == cheats
    fails = [fact for fact in facts(result) if isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL]
    late = cheats - {fact.hotkey for fact in fails if fact.epoch == 0}
    assert late <= {result.hotkeys["m4"]}, "what stale params change in an epoch's first segment is little"
    assert all(verdicts_on(result, hotkey) for hotkey in cheats)
    assert set(result.expected) == {result.hotkeys[f"m{num_miners - 1}"], result.hotkeys[f"m{num_miners}"]}
