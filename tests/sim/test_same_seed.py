"""Same seed, same digest: whatever the process, and however Python hashes its strings."""

import os
import subprocess
import sys

import pytest

from neurons.virtual import VirtualPlan, random_kills
from tests.sim.world import QUICK, simulate

NAMES = ["m1", "m2", "m3", "v1", "orchestrator"]
PLAN = VirtualPlan(
    seed=7,
    num_miners=3,
    num_validators=2,
    kills=random_kills(7, names=NAMES, count=3, until_s=60.0),
)
CODE = (
    "import torch; torch.set_num_threads(1)\n"
    "from tests.sim.test_same_seed import PLAN\n"
    "from tests.sim.world import QUICK, simulate\n"
    "print(simulate(PLAN, QUICK).digest)"
)


@pytest.fixture(scope="module")
def digest() -> str:
    return simulate(PLAN, QUICK).digest


@pytest.mark.parametrize("times", range(4))
def test_runs_in_one_process_agree(digest: str, times: int) -> None:
    assert {simulate(PLAN, QUICK).digest for _ in range(4)} == {digest}


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295"])
def test_processes_with_other_hash_seeds_agree(digest: str, hash_seed: str) -> None:
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digest


def test_another_seed_is_another_run(digest: str) -> None:
    plan = VirtualPlan(seed=8, num_miners=3, num_validators=2)
    assert simulate(plan, QUICK).digest != digest
