"""The simulator put to the test, and its figures.

python -m tools.simulator attack --programs 200 --seed 1
python -m tools.simulator figures [shm]
python -m tools.report docs/reports/simulator.md [shm]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tools.simulator import figures
from tools.simulator.attack import attack


def main() -> int:
    """Run a command; the status is 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulator")
    commands = parser.add_subparsers(dest="command", required=True)
    attacked = commands.add_parser("attack", help="random programs under random schedules")
    attacked.add_argument("--programs", type=int, default=100, help="how many of each kind")
    attacked.add_argument("--seed", type=int, default=0)
    attacked.add_argument(
        "--schedules", type=int, default=2, help="under how many schedules each is run, twice each"
    )
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    report = attack(parsed.programs, parsed.seed, parsed.schedules)
    print(report)
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(figures.main(sys.argv[2:]) if sys.argv[1:2] == ["figures"] else main())
