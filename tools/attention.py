"""Measure attention over a cut sequence: memory of each rank, time, and what the ring hides of a slow wire.

python -m tools.attention                              # the tables
python -m tools.report docs/reports/attention.md       # into the page
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gradmesh as gm
from benchmarks.peak import peak
from gradmesh.nn.sequence import Order
from gradmesh.verify import Link, delayed
from tools.pages import machine, mark, parser_of, put

_OPS = torch.ops.aten


class TorchRing(torch.autograd.Function):
    """What `context_parallel` runs on a GPU, called by its private name."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool) -> Tensor:
        """Attend to the keys of all ranks; balanced is what the zigzag order is here."""
        from torch.distributed.tensor.experimental import _attention as ring

        ring._cp_options.enable_load_balance = balanced
        group: Any = dist.group.WORLD
        op: Any = _OPS._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(group, 2, op, q, k, v, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.balanced = causal, balanced
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of this rank's queries, keys and values."""
        from torch.distributed.tensor.experimental import _attention as ring
        from torch.distributed.tensor.experimental._context_parallel import _attention as inside

        ring._cp_options.enable_load_balance = ctx.balanced
        q, k, v, out, lse = ctx.saved_tensors
        op: Any = _OPS._scaled_dot_product_flash_attention_for_cpu_backward
        group: Any = dist.group.WORLD
        grads = inside._templated_ring_attention_backward(
            group, 2, op, grad, "grad_out", q, k, v, out, lse, ctx.causal, dropout_p=0.0
        )
        return *grads[:3], None, None


@dataclass(frozen=True)
class Case:
    """What is computed."""

    length: int = 4096  # of the whole sequence
    heads: int = 16  # how many
    features: int = 64  # of a head
    causal: bool = False  # whether a place sees only places up to itself

    def inputs(self) -> list[Tensor]:
        """This rank's queries, keys and values, and the gradient of what it sees, all drawn."""
        generator = torch.Generator().manual_seed(gm.rank())
        part = self.length // gm.world_size()
        shape = 1, self.heads, part, self.features
        *leaves, grad = (torch.randn(shape, generator=generator) for _ in range(4))
        return [*(leaf.requires_grad_() for leaf in leaves), grad]


def step(case: Case, way: str) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """A step of a way: what it returns is what the queries see, and the gradients."""
    forward = WAYS[way]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        q, k, v, grad = inputs
        seen = forward(q, k, v, case.causal)
        return [seen, *torch.autograd.grad(seen, (q, k, v), grad)]

    return run


def _ring(order: Order) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    return lambda q, k, v, causal: gm.nn.ring_attention(q, k, v, causal=causal, order=order)


def _gathered(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Everyone's keys and values on every rank, by one gather each."""
    k, v = (gm.all_gather(x, dim=2) for x in (k, v))
    if not causal:
        return scaled_dot_product_attention(q, k, v)
    rows = gm.rank() * q.shape[2] + torch.arange(q.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=rows[:, None] >= torch.arange(k.shape[2]))


def _made(x: object) -> Tensor:
    return x  # type: ignore[return-value]  # torch does not say what a Function returns


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "ring": _ring("plain"),
    "ring, zigzag": _ring("zigzag"),
    "ulysses": lambda q, k, v, causal: gm.nn.ulysses_attention(q, k, v, causal=causal),
    "gathered keys": _gathered,
    "torch's ring": lambda q, k, v, causal: _made(TorchRing.apply(q, k, v, causal, False)),  # type: ignore[no-untyped-call]
    "torch's ring, balanced": lambda q, k, v, causal: _made(TorchRing.apply(q, k, v, causal, causal)),  # type: ignore[no-untyped-call]
    "dense": lambda q, k, v, causal: scaled_dot_product_attention(q, k, v, is_causal=causal),
}


def peaks(case: Case, way: str) -> float:
    """The peak of forward and backward on this rank above its inputs, in MB.

    The inputs are the rank's part of the sequence, and the gradient of its result.
    """
    torch.set_num_threads(1)
    run = step(case, way)
    inputs = case.inputs()
    run(inputs)  # what is loaded and set up once, such as the memory that the ranks share
    return peak(lambda: run(inputs), gm.barrier) / 2**20


def times(case: Case, ways: tuple[str, ...], rounds: int, link: Link | None = None) -> dict[str, list[float]]:
    """The seconds of each step on this rank, by way."""
    torch.set_num_threads(1)
    inputs, found = case.inputs(), {way: [0.0] * 0 for way in ways}
    with contextlib.nullcontext() if link is None else delayed(link):
        for number in range(rounds + 1):
            for way in ways:
                run = step(case, way)
                gm.barrier()
                started = time.perf_counter()
                run(inputs)
                gm.barrier()
                if number:  # the first one is not counted
                    found[way].append(time.perf_counter() - started)
    return found


SIZES = (1, 2, 4)
KEPT = ("ring", "ring, zigzag", "ulysses", "gathered keys")
TIMED = ("ring", "ring, zigzag", "ulysses", "torch's ring", "torch's ring, balanced", "gathered keys")


def memory(case: Case) -> str:
    """A row for each way, with a rank's peak for each number of ranks."""
    most: dict[tuple[str, int], float] = {}
    for size in SIZES:
        with gm.Ranks(size, backend="shm", prefix=False) as ranks:
            for way in (*KEPT, "dense") if size == 1 else KEPT:
                most[way, size] = max(ranks.run(peaks, case, way))
    rows = [["MB above the inputs", *(f"W = {size}" for size in SIZES)]]
    rows.append(["one process, torch's fused kernel", f"{most['dense', 1]:.0f}", *[""] * (len(SIZES) - 1)])
    rows += [[way, *(f"{most[way, size]:.0f}" for size in SIZES)] for way in KEPT]
    return _table(rows)


def timed(case: Case, rounds: int) -> str:
    """A row for each way, with the fastest step of two ranks, with and without a causal mask."""
    with gm.Ranks(1, backend="gloo", prefix=False) as one, gm.Ranks(2, backend="gloo", prefix=False) as two:
        found = []
        for causal in (False, True):
            this = dataclasses.replace(case, causal=causal)
            best: dict[str, float] = {}
            for _ in range(rounds):  # one process and two in turn
                seen = dict(one.run(times, this, ("dense",), 1)[0])
                for mine in two.run(times, this, TIMED, 1):
                    seen |= {way: [max(seen.get(way, [0.0])[0], mine[way][0])] for way in mine}
                best = {way: min(best.get(way, 1e9), took[0]) for way, took in seen.items()}
            found.append(best)
    rows = [["ms of a step", "whole", "of one process", "causal", "of one process"]]
    for way in ("dense", *TIMED):
        cells = [[f"{1e3 * each[way]:.0f}", f"{each[way] / each['dense']:.2f}"] for each in found]
        rows.append(["one process, torch's fused kernel" if way == "dense" else way, *cells[0], *cells[1]])
    return _table(rows)


def hidden(case: Case, rounds: int) -> str:
    """What a wire with a delay adds to a step."""
    with gm.Ranks(2, backend="shm", prefix=False) as ranks:
        plain = _fastest(ranks, case, rounds, None)
        block = 4 * 2 * case.heads * case.length // 2 * case.features
        link = Link(200, float(f"{block / (0.2 * plain) / 1e9:.2g}"))
        slow = _fastest(ranks, case, rounds, link)
    calls = 4 * (200e-6 + block / (link.gbytes_per_s * 1e9))
    return (
        f"The ring on 2 ranks takes {1e3 * plain:.0f} ms a step on the wire as it is, and {1e3 * slow:.0f} ms on one "
        f"of {1e3 * link.gbytes_per_s:.0f} MB/s, where its 4 calls take {1e3 * calls:.0f} ms: "
        f"{100 * (1 - (slow - plain) / calls):.0f} % of them are hidden. The last one cannot be hidden: it returns "
        "the gradients of the local keys."
    )


def _fastest(ranks: gm.Ranks, case: Case, rounds: int, link: Link | None) -> float:
    found = ranks.run(times, case, ("ring",), rounds, link)
    rounds_of_ranks: list[list[float]] = [mine["ring"] for mine in found]
    return float(min(max(each) for each in zip(*rounds_of_ranks, strict=True)))


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure, and print or write the tables."""
    parser = parser_of(__doc__, "python -m tools.attention")
    parser.add_argument("--length", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="steps of each way")
    parsed = parser.parse_args(arguments)
    case = Case(parsed.length, parsed.heads)
    intro = (
        f"{machine()}, ranks with one thread each; a sequence of {case.length}, {case.heads} heads of {case.features}, "
        "float32; forward and backward. Memory is the peak of the rank that takes most, by what the kernel of the "
        "system says, of a step behind another one, on shm; time is the fastest step, on Gloo, all ways in turn."
    )
    parts = [intro]
    for measure in (
        memory,
        lambda case: timed(case, parsed.rounds),
        lambda case: hidden(case, parsed.rounds),
    ):
        parts.append(measure(case))
        print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    if into is not None:
        put(into, mark("docs/reports/attention.md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
