"""Measure the contrastive losses beside the recipe with this rank's logits in memory, and write the page's tables.

python -m tools.contrastive                                # time and memory of a global batch of 16,384
python -m tools.contrastive large                          # of 65,536, which only tiles can do
python -m tools.contrastive small                          # batches whose logits are one tile, NT-Xent too
python -m tools.contrastive recall                         # what more negatives bring, on three seeds
python -m tools.report docs/reports/contrastive.md         # all of it, into the page; some ten minutes
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gradmesh_demos.clip import HELD_OUT, Images, Towers, recall
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import gradmesh as gm
from benchmarks.peak import peak
from tools.pages import machine, mark, parser_of, put


def local_loss(left: Tensor, right: Tensor, scale: Tensor, *, gathered: bool = True) -> Tensor:
    """The mean over this rank's pairs, of equally many on every rank; the gradient goes through the gather."""
    n, rank = len(left), gm.rank() if gathered else 0
    places = torch.arange(n) + n * rank
    all_left, all_right = (gm.all_gather(left), gm.all_gather(right)) if gathered else (left, right)
    to_right = scale * left @ all_right.T
    to_left = scale * right @ all_left.T
    return (cross_entropy(to_right, places) + cross_entropy(to_left, places)) / 2


def local_nt_xent(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """The mean over this rank's views: the logits to all, masked where a view meets itself, and a cross entropy."""
    n, total = len(left), len(left) * gm.world_size()
    first = torch.arange(n) + n * gm.rank()
    itself, other = torch.cat([first, first + total]), torch.cat([first + total, first])
    logits = scale * torch.cat([left, right]) @ torch.cat([gm.all_gather(left), gm.all_gather(right)]).T
    return cross_entropy(logits.masked_fill(itself[:, None] == torch.arange(2 * total), -torch.inf), other)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

WAYS: dict[str, Loss] = {
    "local logits": local_loss,
    'gather="all"': lambda left, right, scale: gm.nn.clip_loss(left, right, scale),
    'gather="ring"': lambda left, right, scale: gm.nn.clip_loss(left, right, scale, gather="ring"),
}

SMALL_WAYS: dict[str, Loss] = {
    "local logits, CLIP": local_loss,
    "`clip_loss`": WAYS['gather="all"'],
    "local logits, NT-Xent": local_nt_xent,
    "`nt_xent_loss`": lambda left, right, scale: gm.nn.nt_xent_loss(left, right, 1 / scale),
}

MIB = 2**20


@dataclass(frozen=True)
class Step:
    """What a step took on this rank."""

    seconds: float  # how long
    mib: float  # the most memory of the process above what it had before, with the inputs in it


def steps(ways: Sequence[str], samples: int, features: int, repeats: int) -> dict[str, list[Step]]:
    """Take steps of each way in turn, on each rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(gm.rank())
    rows = samples // gm.world_size()
    left, right = (
        normalize(torch.randn(rows, features, generator=generator), dim=1).requires_grad_() for _ in range(2)
    )
    scale = torch.tensor(14.0, requires_grad=True)
    found: dict[str, list[Step]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            left.grad = right.grad = scale.grad = None
            seconds: list[float] = []
            most = peak(partial(_step, {**WAYS, **SMALL_WAYS}[way], (left, right, scale), seconds))
            found[way].append(Step(seconds[0], most / MIB))
    return found


def _step(loss: Loss, leaves: tuple[Tensor, Tensor, Tensor], seconds: list[float]) -> None:
    gm.barrier()
    started = time.perf_counter()
    loss(*leaves).backward()
    gm.barrier()
    seconds.append(time.perf_counter() - started)


LEARNERS = 4
CHUNK = 16
"""The samples that an encoder is given at once: those of a rank in the smallest batch."""


@dataclass(frozen=True)
class Training:
    """How to train."""

    name: str  # in words
    batch: int  # how many samples on all ranks
    gathered: bool  # whether the other ranks' samples are negatives too
    cached: bool = False  # whether encoders are given `CHUNK` samples at once


TRAININGS = (
    Training("own negatives", 64, gathered=False),
    Training("all ranks' negatives", 64, gathered=True),
    Training("all ranks' negatives, cached gradients", 512, gathered=True, cached=True),
)


def _loss(way: Training, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """This rank's term of the mean over all samples."""
    if not way.gathered:
        return local_loss(left, right, scale, gathered=False) / gm.world_size()
    return gm.nn.clip_loss(left, right, scale, sizes=None)


def _trained(way: Training, model: Towers, images: Images, steps: int, seed: int) -> tuple[float, float]:
    """The recall of the held-out halves, and the last loss, on this rank; all ranks have the same parameters."""
    model = copy.deepcopy(model)
    left, right = images.training
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    numbers = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = torch.randperm(len(left), generator=numbers)[: way.batch]
        mine = batch[gm.axis().slice(way.batch)]
        optimizer.zero_grad()
        if way.cached:
            loss = gm.nn.cached_gradients(model, (left[mine], right[mine]), lambda *z: _loss(way, *z), CHUNK)
        else:
            loss = _loss(way, *model(left[mine], right[mine]))
            loss.backward()
        own = [p.grad for p in model.parameters() if p.grad is not None]
        grads = gm.all_reduce(own, dst=gm.I)  # each rank has a share
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    return recall(model, images.held_out), float(loss.detach())


def recalls(seeds: Sequence[int], steps: int) -> dict[str, list[float]]:
    """The recall of each way and seed."""
    found: dict[str, list[float]] = {}
    with gm.Ranks(LEARNERS, backend="threads", timeout=600) as ranks:
        for seed in seeds:
            images = Images.load(seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = Towers()
            for way in TRAININGS:
                (value, _), *_ = ranks.run(_trained, way, model, images, steps, seed)
                found.setdefault(f"{way.name}, batch {way.batch}", []).append(value)
    return found


def recall_table(found: dict[str, list[float]], steps: int) -> str:
    """The table, in Markdown."""
    lines = [
        f"{LEARNERS} ranks, {steps} steps of Adam. Of {HELD_OUT} held-out halves, the part whose other half is the "
        "most similar of all, in the mean of both directions; the spread is that of the seeds, highest less lowest:",
        "",
        f"| loss | {' | '.join(f'seed {n}' for n in range(len(next(iter(found.values())))))} | mean | spread |",
        "| --- |" + " ---: |" * (len(next(iter(found.values()))) + 2),
    ]
    for name, values in found.items():
        each = " | ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {name} | {each} | {statistics.mean(values):.3f} | {max(values) - min(values):.3f} |")
    return "\n".join(lines)


RANKS = 2
FEATURES = 512
SAMPLES, LARGE = 16_384, 65_536
LOCAL = "local logits"


def taken(ways: list[str], samples: int, repeats: int, count: int = RANKS) -> dict[str, Step]:
    """The median of each way's steps, of the slowest and of the largest rank."""
    with gm.Ranks(count, backend="shm", timeout=1800) as ranks:
        ranks.run(steps, ways, 512 * count, FEATURES, 1)  # what is made once
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
    text = f"{machine(RANKS)}, shm; medians of {parsed.repeats} steps of the slowest rank, all ways in turn."
    return f"{text} {table({LOCAL: local, **found}, SAMPLES)}", worse


def _large(_: argparse.Namespace) -> tuple[str, bool]:
    found = taken([way for way in WAYS if way != LOCAL], LARGE, 1)  # some minutes for each
    return f"{machine(RANKS)}, shm; one step. {table(found, LARGE)}", any(
        step.mib > 1024 for step in found.values()
    )


def _small(parsed: argparse.Namespace) -> tuple[str, bool]:
    count, worse = 3, False
    lines = ["| samples of a rank | way | ms | of local logits |", "| ---: | --- | ---: | ---: |"]
    for samples in (64, 256, 512):
        found = taken(list(SMALL_WAYS), count * samples, 5 * parsed.repeats, count)
        for local, ours in zip(list(SMALL_WAYS)[::2], list(SMALL_WAYS)[1::2], strict=True):
            ratio = found[ours].seconds / found[local].seconds
            worse |= samples == 512 and ratio > 1.1
            lines.append(f"| {samples} | {local} | {1e3 * found[local].seconds:.1f} | |")
            lines.append(f"| {samples} | {ours} | {1e3 * found[ours].seconds:.1f} | {ratio:.2f} |")
    text = f"{machine(count)}, shm, {FEATURES} features; medians of {5 * parsed.repeats} steps of the slowest rank"
    return "\n".join([f"{text}, all ways in turn:", "", *lines]), worse


def _recall(parsed: argparse.Namespace) -> tuple[str, bool]:
    return recall_table(recalls(range(parsed.seeds), parsed.steps), parsed.steps), False


TABLES = {"steps": _steps, "large": _large, "small": _small, "recall": _recall}
"""What makes each table, and tells whether it is worse than it has to be."""


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure; 1 where the losses take 1.1 of the time, or tiles an eighth of the memory, of local logits, or 1 GiB."""
    parser = parser_of(__doc__, "python -m tools.contrastive")
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
