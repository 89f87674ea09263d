"""Measure the contrastive losses beside the recipe with this rank's logits in memory, and write the page's tables.

python -m tools.contrastive                                # time and memory of a global batch of 16,384
python -m tools.contrastive large                          # of 65,536, which only tiles can do
python -m tools.contrastive recall                         # what more negatives bring, on three seeds
python -m tools.report docs/reports/contrastive.md         # all of it, into the page; some ten minutes
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import gradmesh as gm
from tools.contrastive.digits import recall_table, recalls
from tools.contrastive.measure import WAYS, Step, steps
from tools.pages import mark, put

RANKS = 2
FEATURES = 512
SAMPLES, LARGE = 16_384, 65_536
LOCAL = "local logits"


def machine() -> str:
    """Where it was measured."""
    version = torch.__version__.split("+")[0]
    return f"torch {version}, {platform.machine()}, {os.cpu_count()} cores, {RANKS} ranks with one thread each, shm"


def taken(ways: list[str], samples: int, repeats: int) -> dict[str, Step]:
    """The median of each way's steps, of the slowest and of the largest rank."""
    with gm.Ranks(RANKS, backend="shm", timeout=1800) as ranks:
        ranks.run(steps, ways, 1024, FEATURES, 1)  # what is made once
        found = ranks.run(steps, ways, samples, FEATURES, repeats)
    medians = {}
    for way in ways:
        each = list(zip(*(rank[way] for rank in found), strict=True))
        medians[way] = Step(
            statistics.median(max(step.seconds for step in at_once) for at_once in each),
            statistics.median(max(step.mib for step in at_once) for at_once in each),
        )
    return medians


def table(found: dict[str, Step], samples: int) -> str:
    """The figures, in Markdown."""
    dense = 2 * samples * samples / RANKS * 4 / 2**20
    lines = [
        f"{samples:,} samples of {FEATURES} features in float32; a rank's logits of both directions: {dense:,.0f} MiB.",
        "",
        "| way | seconds | of local logits | MiB above the inputs | of local logits |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    local = found.get(LOCAL)
    for way, step in found.items():
        time = f"{step.seconds / local.seconds:.2f}" if local else ""
        memory = f"{step.mib / local.mib:.3f}" if local else ""
        lines.append(f"| {way} | {step.seconds:.1f} | {time} | {step.mib:,.0f} | {memory} |")
    return "\n".join(lines)


def _steps(parsed: argparse.Namespace) -> tuple[str, bool]:
    found = taken(list(WAYS), SAMPLES, parsed.repeats)
    local = found.pop(LOCAL)
    worse = any(step.seconds > 1.1 * local.seconds or step.mib > local.mib / 8 for step in found.values())
    text = f"{machine()}; medians of {parsed.repeats} steps of the slowest rank, all ways in turn."
    return f"{text} {table({LOCAL: local, **found}, SAMPLES)}", worse


def _large(_: argparse.Namespace) -> tuple[str, bool]:
    found = taken([way for way in WAYS if way != LOCAL], LARGE, 1)  # some minutes for each
    return f"{machine()}; one step. {table(found, LARGE)}", any(step.mib > 1024 for step in found.values())


def _recall(parsed: argparse.Namespace) -> tuple[str, bool]:
    return recall_table(recalls(range(parsed.seeds), parsed.steps), parsed.steps), False


TABLES = {"steps": _steps, "large": _large, "recall": _recall}
"""What makes each table, and tells whether it is worse than it has to be."""


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure; 1 where tiles take 1.1 of the time or an eighth of the memory of local logits, or 1 GiB of the large."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.contrastive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", choices=[[], *TABLES], nargs="*", help="steps, or all for the page, by default"
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps of each way, in turn")
    parser.add_argument("--seeds", type=int, default=3, help="of recall")
    parser.add_argument("--steps", type=int, default=200, help="of training, for recall")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed = False
    for name in parsed.what or (["steps"] if into is None else TABLES):
        text, worse = TABLES[name](parsed)
        failed |= worse
        print(text, flush=True)
        if into is not None:
            put(into, mark("docs/reports/contrastive.md", name), text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
