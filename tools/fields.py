"""The command that prints what fields in parts cost and how far they are from whole ones, and writes the tables.

python -m tools.fields [--programs 40] [--only deviations]
python -m tools.report docs/reports/fields.md [--programs 40] [--only deviations]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from tests import field_programs, fourier_programs
from tools.pages import mark, put

WORLDS = (1, 2, 4)
SHAPE = (4, 8, 256, 256)
"""Of the field whose cost is measured, on all ranks; float32."""

fields = gm.nn.fields


def worst(kind: str, programs: int) -> tuple[float, float, float]:
    """The largest deviations of value, first and second derivative over so many random programs of a kind."""
    source: Any = fourier_programs if kind in fourier_programs.KINDS else field_programs
    found = [(0.0, 0.0, 0.0)]
    for seed in range(5000, 5000 + programs):
        ranks, program = source.random_program(seed, kind)
        found += gm.launch(source.deviations, ranks, backend="threads", args=(program,), timeout=120)
    value, first, second = (max(column) for column in zip(*found, strict=True))
    return value, first, second


AUDITED: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "conv": lambda: gm.nn.HaloConv1d(2, 2, 3, padding=1).double().requires_grad_(False),
    "transposed": lambda: gm.nn.HaloConvTranspose1d(2, 2, 3, stride=2).double().requires_grad_(False),
    "max_pool": lambda: gm.nn.HaloMaxPool(2, stride=1),
    "avg_pool": lambda: gm.nn.HaloAvgPool(2, stride=1),
    "interpolate": lambda: lambda x: fields.interpolate(x, 5, mode="linear"),
    "spectral": lambda: gm.nn.SpectralConv(2, 2, 2, dtype=torch.float64).requires_grad_(False),
    "fftn": lambda: lambda x: fields.fftn(x, dim=2, dims=(1, 2)),
    "ifftn": lambda: lambda x: fields.ifftn(x, dim=2, dims=(1, 2)),
    "rfftn": lambda: lambda x: fields.rfftn(x, dim=2, dims=(1, 2)),
    "irfftn": lambda: lambda x: fields.irfftn(x, dim=2, dims=(1, 2)),
}


def findings(kind: str) -> int:
    """How much the audit finds wrong."""

    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        made = AUDITED[kind]()
        if isinstance(made, torch.nn.Module):  # the same on every rank
            for number, parameter in enumerate(made.parameters()):
                draw = torch.Generator().manual_seed(number)
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
        draw = torch.Generator().manual_seed(gm.rank())
        dtype = torch.complex128 if kind == "irfftn" else torch.float64
        return made, torch.randn(1, 2, 3, generator=draw, dtype=dtype).requires_grad_()

    return len(gm.verify.audit(build, world_size=2).findings)


COSTS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "HaloConv2d, 3 x 3": lambda: gm.nn.HaloConv2d(8, 8, 3, padding=1),
    "HaloConvTranspose2d, 4 x 4, stride 2": lambda: gm.nn.HaloConvTranspose2d(8, 8, 4, stride=2, padding=1),
    "HaloMaxPool, 3 x 3, stride 2": lambda: gm.nn.HaloMaxPool(3, stride=2, padding=1),
    "interpolate, bilinear to 384 x 384": lambda: lambda x: fields.interpolate(x, 384, mode="bilinear"),
    "SpectralConv, 12 x 12 modes": lambda: gm.nn.SpectralConv(8, 8, (12, 12)),
    "rfftn and irfftn, 256 x 256": lambda: _there_and_back,
}


def _there_and_back(x: Tensor) -> Tensor:
    y = fields.rfftn(x, dim=2, dims=(2, 3), out_dim=3)
    sizes = gm.sizes(y, dim=3)
    return fields.irfftn(y, n=SHAPE[3], dim=3, dims=(2, 3), out_dim=2, sizes=sizes)


def _on_rank(name: str, repeats: int) -> tuple[int, list[float]]:
    """Bytes that a rank keeps for backward, and seconds forward and backward."""
    torch.set_num_threads(1)
    layer = COSTS[name]()
    shape = (*SHAPE[:2], SHAPE[2] // gm.world_size(), SHAPE[3])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(gm.rank())).requires_grad_()
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = layer(x)
    seconds = []
    del y
    for _ in range(repeats):
        gm.barrier()
        begin = time.perf_counter()
        layer(x).sum().backward()
        seconds.append(time.perf_counter() - begin)
    return sum(kept.values()), seconds


def costs(repeats: int = 7) -> dict[str, list[tuple[float, float]]]:
    """For each layer and world: MiB that a rank keeps for backward, and milliseconds of a step."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COSTS}
    for world in WORLDS:
        with gm.Ranks(world, backend="shm") as ranks:
            for name in COSTS:
                each = ranks.run(_on_rank, name, repeats)
                most = max(kept for kept, _ in each) / 2**20
                middle = statistics.median(max(times) for times in zip(*(t for _, t in each), strict=True))
                found[name].append((most, 1000 * middle))
    return found


def table_of_deviations(programs: int) -> str:
    """How far random programs are from dense ones, in Markdown."""
    lines = [
        f"Of {programs} random programs of each kind (1 to 4 ranks, uneven and empty parts, a rank that leaves its "
        "rows out), the largest deviation from torch's on the whole field, relative to its largest value (float64):",
        "",
        "| kind | value | first derivative | second derivative | findings of the audit |",
        "|---|---|---|---|---|",
    ]
    for kind in AUDITED:
        value, first, second = worst(kind, programs)
        lines.append(f"| {kind} | {value:.0e} | {first:.0e} | {second:.0e} | {findings(kind)} |")
    return "\n".join(lines)


def table_of_costs() -> str:
    """What a rank keeps for backward and how long a step takes, in Markdown."""
    head = " | ".join(f"MiB kept, {n} rank{'s' * (n > 1)}" for n in WORLDS)
    times = " | ".join(f"ms, {n}" for n in WORLDS)
    lines = [
        f"A field of 4 x 8 x 256 x 256 float32 on all ranks together; torch {torch.__version__}, {os.cpu_count()} "
        "cores, each rank a process with one thread, on shm; forward and backward, the median of 7, of the slowest:",
        "",
        f"| layer | {head} | {times} |",
        "|" + "---|" * (1 + 2 * len(WORLDS)),
    ]
    for name, each in costs().items():
        kept, took = (" | ".join(f"{pair[n]:.1f}" for pair in each) for n in (0, 1))
        lines.append(f"| {name} | {kept} | {took} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print how far sharded fields are from whole ones and what they cost, or write the tables into the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.fields")
    parser.add_argument("--programs", type=int, default=40, help="random programs of each kind")
    parser.add_argument("--only", choices=("deviations", "costs"), help="one table of the two")
    parsed = parser.parse_args(arguments)
    tables = {"deviations": lambda: table_of_deviations(parsed.programs), "costs": table_of_costs}
    for name in [parsed.only] if parsed.only else tables:
        table = tables[name]()
        print(table, end="\n\n", flush=True)
        if into is not None:
            put(into, mark("docs/reports/fields.md", "--only", name), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
