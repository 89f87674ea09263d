"""Stress the data path in C: python -m tools.native, some ten minutes; --calls 20000 for a minute.

Threads are the ranks of a group and make random calls, with random delays at the points of the protocol; each result is
compared with what it must be. Then again with the address and undefined-behavior sanitizers, and with the thread
sanitizer, which knows C11's memory order. It needs gcc or clang with their sanitizers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parent / "stress.c"
OPTIONS = {
    "without sanitizers": ("-O3",),
    "address and undefined behavior": (
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ),
    "threads": ("-O1", "-g", "-fsanitize=thread"),
}
RANKS = 1, 2, 3, 5
SLOWER = {"without sanitizers": 1, "address and undefined behavior": 4, "threads": 10}


def build(into: Path, options: Sequence[str], compiler: str = "cc") -> None:
    """Build the program; CalledProcessError if the compiler cannot."""
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", *options, str(SOURCE), "-o", str(into)]
    subprocess.run([*command, "-lpthread"], check=True, capture_output=True, text=True)


def run(program: Path, ranks: int, calls: int, seed: int) -> str:
    """What the program prints; the last lines of its errors if it failed."""
    command = [str(program), *map(str, (ranks, calls, seed))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-2000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and run all; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls of each rank without sanitizers")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, options in OPTIONS.items():
            program = Path(folder) / "stress"
            build(program, options)
            for ranks in RANKS:
                said = run(program, ranks, given.calls // SLOWER[name], given.seed)
                print(f"{name}: {said}", flush=True)
                failed |= said.startswith("failed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
