"""Every budget of the design as a ratio measured in one run, with the target beside it. Exits with 1 when one is missed.

    python scripts/bench.py                    all of them, each in less than a minute
    python scripts/bench.py --only hop --scale 3    one of them, three times as long
    HIVEMIND_PYTHON=.../python scripts/bench.py --only butterfly    beside hivemind, which that interpreter has

What is compared runs in turns, so that the rest of the machine's work meets both sides; the load stands beside each figure.
"""

import argparse
import importlib
import os
import platform
import sys
import time

from benches.measure import Line, load, one_thread

BENCHES = ("hop", "detour", "control", "journal", "butterfly", "pipeline", "replay", "clasp")
NOT_HERE = {
    "bottleneck 128x": "a question of training runs, not of seconds: scripts/study_local.py",
    "serving by sweeps": "needs the inference roles",
}


def run(name: str, scale: float) -> list[Line]:
    """Lines of one measurement."""
    before, began = load(), time.monotonic()
    module = importlib.import_module(f"benches.{name}")
    print(f"\n{name}: {module.__doc__}", flush=True)
    lines: list[Line] = module.bench(scale)
    for line in lines:
        print(line)
    print(f"  ({time.monotonic() - began:.0f} s; {before} -> {load()})", flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--scale", type=float, default=1.0, help="repeats, as a multiple of the default")
    options = parser.parse_args()
    one_thread()
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {load()}"
    )
    lines = [line for name in options.only or BENCHES for line in run(name, options.scale)]
    if not options.only:
        for what, where in NOT_HERE.items():
            print(f"\nnot measured here: {what}: {where}")
    judged = [line for line in lines if line.is_met is not None]
    missed = [line for line in judged if not line.is_met]
    print(
        f"\n{len(judged) - len(missed)} of {len(judged)} targets met" + "".join(f"\n  missed{line}" for line in missed)
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
