"""The rules for operators, proven, as a page; and random programs that attack what `gm.typed` makes of them.

python -m tools.report docs/reports/operators.md
python -m tools.operators --attack 500 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.operators.attack import attack
from tools.operators.page import page, proofs, twins
from tools.pages import show


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Run it; the status is 1 where an attack found something."""
    parser = argparse.ArgumentParser(prog="python -m tools.operators")
    parser.add_argument(
        "--attack", type=int, help="how many random programs to run, in the place of the page"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=3)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if parsed.attack:
        started = time.perf_counter()
        report = attack(parsed.attack, parsed.seed, parsed.ranks)
        print(report)
        print(f"{time.perf_counter() - started:.0f} s")
        return 1 if report.wrong else 0
    show(page(proofs(), twins()), into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
