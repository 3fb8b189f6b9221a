"""Known defects, put back one at a time: the test named for each goes red, so it does guard against it."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.defects import DEFECTS

ROOT = Path(__file__).resolve().parents[2]
TESTS_FAILED = 1
"""Exit code of pytest; others mean that the test could not be run."""


@functools.cache
def exit_codes() -> dict[str, int]:
    line = [sys.executable, "-m", "tests.mutations.run_with"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, check=True, cwd=ROOT)
    codes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return codes


@pytest.mark.parametrize("name", DEFECTS)
def test_with_the_defect_its_test_goes_red(name: str) -> None:
    assert exit_codes()[name] == TESTS_FAILED
