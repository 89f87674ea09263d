"""The simulator put to the test, and its figures.

python -m tools.simulator attack --programs 200 --seed 1
python -m tools.simulator figures [shm] --write docs/reports/simulator.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from tools.simulator.attack import attack
from tools.simulator.figures import PARTS, with_figures


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
    shown = commands.add_parser("figures", help="what docs/reports/simulator.md shows")
    shown.add_argument("part", choices=[[], *PARTS], nargs="*", help="which; all by default")
    shown.add_argument("--write", type=Path, help="the page to write them into")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    if parsed.command == "figures":
        for part in parsed.part or PARTS:
            text = PARTS[part]()
            print(f"{text}\n")
            if parsed.write is not None:
                parsed.write.write_text(with_figures(parsed.write.read_text(), part, text))
        return 0
    start = time.perf_counter()
    report = attack(parsed.programs, parsed.seed, parsed.schedules)
    print(report)
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
