"""Instructions that a verb takes around its transfer, counted by valgrind's Callgrind through torch's Timer.

$ python -m tools.report docs/profiler.md

In a world of one rank, where nothing travels: what is counted is arguments, the op, the result's memory, the graph.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from tools.pages import mark, put

LINES = {
    "torch: x.clone()": "x.clone()",
    "gm.all_gather(x)": "gm.all_gather(x)",
    "gm.all_gather(w)": "gm.all_gather(w)",
    "torch: w.clone().sum().backward()": "w.clone().sum().backward()",
    "gm.all_gather(w).sum().backward()": "gm.all_gather(w).sum().backward()",
}
"""What is counted; `w` requires grad."""

_SETUP = """
import torch, gradmesh as gm
torch.set_num_threads(1)
gm.init()
x, w = torch.ones(4), torch.ones(4, requires_grad=True)
for _ in range(10):
    {line}
"""
_CALLS = 100


def available() -> bool:
    """Whether instructions can be counted here."""
    return all(shutil.which(name) for name in ("valgrind", "callgrind_control", "callgrind_annotate"))


def counted(line: str, calls: int = _CALLS) -> float:
    """Instructions of a statement, a call; in a process of its own, which takes minutes."""
    # torch starts whatever is called python on the path.
    own = str(Path(sys.executable).parent)
    if not os.environ.get("PATH", "").startswith(own):
        os.environ["PATH"] = f"{own}{os.pathsep}{os.environ.get('PATH', '')}"
    timer = Timer(line, setup=_SETUP.format(line=line))
    stats = timer.collect_callgrind(calls, repeats=None, collect_baseline=False, retain_out_file=False)
    return float(stats.counts()) / calls


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Count, and print or write the table."""
    if not available():
        sys.exit("valgrind, callgrind_control and callgrind_annotate are needed: apt-get install valgrind")
    # What else runs does not change a count. torch also runs each statement once here, so each has a process for it.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        counts = pool.map(counted, LINES.values())
        rows = [f"| `{name}` | {count / 1000:.1f} |" for name, count in zip(LINES, counts, strict=True)]
    text = "\n".join(["| statement | thousand instructions a call |", "|---|---|", *rows])
    text += f"\n\nA world of one rank, 4 numbers of float32, torch {torch.__version__}."
    if into is None:
        print(text)
    else:
        put(into, mark("docs/profiler.md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
