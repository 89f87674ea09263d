"""Count what gradient accumulation sends with and without `gm.no_sync`, and how far the gradients are apart.

    python -m tools.no_sync                   # printed
    python -m tools.report docs/no_sync.md    # into the page

Layers whose parameters every rank has (`replicate`), that are sharded over the ranks (`all_gather`), or both with a
broadcast, uneven shards and a gradient that travels in float32, go through k micro-batches on ranks that are simulated.
Events are those of one rank going backward in one optimizer step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import gradmesh as gm
from gradmesh.verify import simulate

RANKS, WIDTH = 4, 64
MICRO_BATCHES = (1, 2, 4, 8)

Layers = list[tuple[Tensor, Callable[[Tensor], Tensor]]]
"""The leaves of a model, each with the verb that makes what is multiplied with of it."""


def _leaf(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator) / WIDTH)


def replicated() -> Layers:
    """Parameters that every rank has."""
    return [(_leaf(WIDTH, seed), gm.replicate) for seed in range(4)]


def sharded() -> Layers:
    """Parameters of which every rank has a part."""
    return [(_leaf(WIDTH // RANKS, 10 * gm.rank() + seed), gm.all_gather) for seed in range(4)]


def mixed() -> Layers:
    """Some of all kinds."""
    sizes = [WIDTH // RANKS + shift for shift in (-3, -1, 1, 3)]
    return [
        *replicated()[:2],
        *sharded()[:2],
        (_leaf(WIDTH, 50), lambda w: gm.replicate(w, backward_dtype=torch.float32)),
        (_leaf(sizes[gm.rank()], 60 + gm.rank()), lambda w: gm.all_gather(w, sizes=sizes)),
        (_leaf(WIDTH, 70), gm.broadcast),
    ]


MODELS: dict[str, Callable[[], Layers]] = {
    "every rank has all (`replicate`)": replicated,
    "sharded over the ranks (`all_gather`)": sharded,
    "of all kinds": mixed,
}


def step(layers: Layers, micro_batches: int, off: bool) -> list[Tensor]:
    """The gradients of one optimizer step."""
    for number in range(micro_batches):
        generator = torch.Generator().manual_seed(1000 * number + gm.rank())
        x = torch.randn(8, WIDTH, dtype=torch.float64, generator=generator)
        last = number == micro_batches - 1
        with contextlib.nullcontext() if last or not off else gm.no_sync():
            for leaf, whole in layers:
                x = torch.tanh(x @ whole(leaf))
            loss = gm.objective(x.square().mean(), steps=micro_batches)
        loss.backward()
    return [leaf.grad for leaf, _ in layers if leaf.grad is not None]


def on_rank(model: str, micro_batches: int, off: bool) -> list[Tensor]:
    """One step of a new model."""
    return step(MODELS[model](), micro_batches, off)


def counted(model: str, micro_batches: int, off: bool) -> tuple[int, int, list[list[Tensor]]]:
    """Messages and bytes of rank 0 going backward in one step, and every rank's gradients."""
    done = simulate(on_rank, RANKS, args=(model, micro_batches, off))
    events = done.events.select(rank=0, phase="backward")
    return len(list(events)), sum(event.payload for event in events), list(done.results)


def deviation(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """The largest difference of two lists of gradients, relative to the largest entry of each gradient."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def table() -> str:
    """What is sent, in Markdown."""
    lines = [
        "| parameters | micro-batches | messages without | with | bytes without | with | with / without | deviation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for k in MICRO_BATCHES:
            (many, much, plain), (few, little, ours) = counted(model, k, False), counted(model, k, True)
            lines.append(
                f"| {model} | {k} | {many} | {few} | {much:,} | {little:,} | {little / much:.4f} | "
                f"{deviation(ours, plain):.0e} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] = (), into: Path | None = None) -> int:
    """Count what accumulation sends with and without `gm.no_sync`; print it, or write it into the page."""
    text = table()
    print(text)
    if into is not None:
        above, _, _ = into.read_text().rpartition("\n| parameters |")
        into.write_text(f"{above}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
