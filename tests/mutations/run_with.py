"""`python -m tests.mutations.run_with`: for each defect, the exit code of its test with the defect present, as JSON.

A process of its own, because pytest does not run within pytest; one for all of them, because imports take longer than tests.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from tests.mutations.defects import DEFECTS, present

TESTS = Path(__file__).resolve().parents[1]


def exit_code(test: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", str(TESTS / test)]))


def main() -> None:
    found = {}
    for name, defect in DEFECTS.items():
        with present(defect):
            found[name] = exit_code(defect.test)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
