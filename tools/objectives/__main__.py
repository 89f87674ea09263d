"""The command that prints the table of objectives, and writes its page."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import gradmesh as gm
from tools.objectives import MASKS, MESHES, RANKS, WRAPPERS, on_rank, tensor_parallel, tensor_parallel_masks


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{RANKS} ranks on shm\n",
        f"| mesh | micro-batches | mask | {' | '.join(WRAPPERS)} |",
        f"|---|---|---|{'---|' * len(WRAPPERS)}",
    ]
    with gm.Ranks(RANKS, backend="shm") as ranks:
        for mesh, sizes in MESHES.items():
            for steps in (1, 3):
                for name, mask in MASKS.items():
                    cells = [
                        max(found for found, _ in ranks.run(on_rank, wrapper, sizes, mask, steps))
                        for wrapper in WRAPPERS
                    ]
                    shown = " | ".join(f"{cell:.0e}" for cell in cells)
                    lines.append(f"| {mesh} | {steps} | {name} | {shown} |")
        for name, mask in tensor_parallel_masks().items():
            cell = f"{max(ranks.run(tensor_parallel, mask)):.0e}"
            lines.append(f"| data 2 x tensor 2 | 1 | {name} | | {cell} | | |")
    return "\n".join(lines)


def main(arguments: Sequence[str] = (), into: Path | None = None) -> int:
    """Compare the gradients of `gm.objective` with one process; print the table, or write it into the page."""
    text = table()
    print(text)
    if into is not None:
        above, _, _ = into.read_text().rpartition("\ntorch ")
        into.write_text(f"{above}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
