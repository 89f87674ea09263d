"""Hold every layer against its dense counterpart, and print one table.

python -m tools.layers                          # all of it: some minutes
python -m tools.layers --layer linear_cross_entropy
python -m tools.layers --beside                 # time and memory beside torch's own layers
python -m tools.report docs/reports/layers.md   # the table of the page; with --beside, the other one
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

import gradmesh as gm
from tools.layers.beside import MODELS, RANKS, Result, measured
from tools.layers.table import CASES, HEAD, row_of
from tools.pages import machine, mark, parser_of, put, table


def _table(names: list[str]) -> tuple[str, bool]:
    rows = []
    with ExitStack() as stack:
        processes = {n: stack.enter_context(gm.Ranks(n, backend="shm", timeout=300)).run for n in (1, 2, 4)}
        for name in names:
            rows.append(row_of(CASES[name], processes))
            print("  ".join(rows[-1].cells()), flush=True)
    return table(HEAD, [row.cells() for row in rows]), all(row.right for row in rows)


def _beside(repeats: int) -> tuple[str, bool]:
    rows, same = [], True
    for backend in ("shm", "gloo"):
        with gm.Ranks(RANKS, backend=backend, timeout=300) as ranks:
            for model in MODELS:
                found: list[dict[str, Result]] = ranks.run(measured, model, repeats)
                ours = max(each["gradmesh"].median for each in found) if "gradmesh" in found[0] else 0.0
                ours = ours or max(each["gradmesh, own logits"].median for each in found)
                for way in found[0]:
                    slow = max(each[way].median for each in found)
                    weight = max(each[way].megabytes for each in found)
                    rows.append(
                        [backend, model, way, f"{1e3 * slow:.1f}", f"{slow / ours:.2f}", f"{weight:.0f}"]
                    )
                    print("  ".join(rows[-1]), flush=True)
                losses = [result.loss for each in found for result in each.values()]
                same &= max(losses) - min(losses) < 1e-5 * max(losses)
    return table(("backend", "model", "way", "ms", "of gradmesh's", "MB"), rows), same


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure; 1 where a layer is further off than it may be, or an audit finds something, or losses differ."""
    parser = parser_of(__doc__, "python -m tools.layers")
    parser.add_argument("--layer", choices=list(CASES), action="append", help="all by default")
    parser.add_argument("--beside", action="store_true", help="time and memory beside torch's own layers")
    parser.add_argument("--repeats", type=int, default=15, help="steps of each way")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text, right = _beside(parsed.repeats) if parsed.beside else _table(parsed.layer or list(CASES))
    if into is not None:
        begin = mark("docs/reports/layers.md", *(["--beside"] if parsed.beside else []))
        put(into, begin, f"{text}\n\n{machine(RANKS if parsed.beside else 4)}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
