"""The gradient of one contrastive step on four ranks, gathered in the usual ways, compared with one process.

$ python -m tools.report docs/point.svg
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import gradmesh as gm

RANKS, ROWS, WIDTH = 4, 8, 16


def raw(x: Tensor) -> Tensor:
    """What `torch.distributed` has: no gradient comes back through it."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    return torch.cat(parts)


def spliced(x: Tensor) -> Tensor:
    """Every rank's rows, with this rank's put back in, as CLIP's training code does it."""
    parts = list(raw(x).split(len(x)))
    parts[dist.get_rank()] = x
    return torch.cat(parts)


class OwnSlice(torch.autograd.Function):
    """The Function that takes its own slice of the gradient, without the sum."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Gather."""
        return raw(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        """This rank's slice."""
        return grads[0].chunk(dist.get_world_size())[dist.get_rank()]


class Averaged(torch.autograd.Function):
    """The Function that averages the gradient over the ranks before it takes its slice."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Gather."""
        return raw(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        """This rank's slice of the mean."""
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


def functional_gather(x: Tensor) -> Tensor:
    """`torch.distributed.nn.functional.all_gather`, whose backward sums over the ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated from torch 2.13 on
        from torch.distributed.nn import functional as collectives

        return torch.cat(collectives.all_gather(x, group=gm.axis().group))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "dist.all_gather": raw,
    "dist.all_gather, local rows put back": spliced,
    "Function, backward returns its slice": OwnSlice.apply,
    "Function, backward averages": Averaged.apply,
    "torch.distributed.nn.functional.all_gather": functional_gather,
    "gm.all_gather": gm.all_gather,
}


def loss_of(a: Tensor, b: Tensor, first: int, scale: int) -> Tensor:
    """The share of some rows in the contrastive loss of all."""
    target = torch.arange(first, first + len(a))
    return functional.cross_entropy(4 * a @ b.T, target, reduction="sum") / scale


def deviations() -> dict[str, float]:
    """How far the gradient of the towers is from that of one process, relative to its norm."""
    torch.manual_seed(0)
    one, two = torch.randn(2, RANKS * ROWS, WIDTH, dtype=torch.float64)
    towers = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64)

    def step(gather: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, first: int) -> Tensor:
        weights = towers.clone().requires_grad_()
        a, b = (functional.normalize(rows @ weight) for rows, weight in zip((x, y), weights, strict=True))
        loss = loss_of(a, gather(b), first, len(one)) + loss_of(b, gather(a), first, len(one))
        (grad,) = torch.autograd.grad(loss, weights)
        return grad

    def on_each_rank(way: str) -> Tensor:
        rows = gm.axis().slice(len(one))
        return gm.all_reduce(step(WAYS[way], one[rows], two[rows], rows.start), dst=gm.R)

    whole = step(lambda x: x, one, two, 0)
    found = {}
    for way in WAYS:
        grad = gm.launch(on_each_rank, RANKS, backend="threads", args=(way,))[0]
        found[way] = float((grad - whole).norm() / whole.norm())
    return found


def said(far: float) -> str:
    """A deviation as the picture has it."""
    return "rounding only" if far < 1e-9 else f"{far:.0%}"


_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>Error of the gradient of a CLIP step on 4 ranks, compared with one process</title>
<style>
.card {{ fill: #ffffff }} text {{ font: 15px system-ui, sans-serif; fill: #24292f }}
.code {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace }} .value {{ font-weight: bold }}
.right {{ fill: #1f7a45 }} .wrong {{ fill: #b8402c }}
@media (prefers-color-scheme: dark) {{
  .card {{ fill: #1b1f24 }} text {{ fill: #e6edf3 }} .right {{ fill: #4fc27f }} .wrong {{ fill: #f0806c }}
}}
</style>
<rect class="card" width="{width}" height="{height}" rx="8"/>
"""


def draw(found: dict[str, float], path: Path) -> None:
    """A bar for each way, below its name: readable on a phone, and on light and dark pages."""
    width, top, row = 500, 62, 48
    lines = [_HEAD.format(width=width, height=top + row * len(found)).rstrip()]
    places = {name: top + row * place for place, name in enumerate(found)}
    names = list(found)[::-1]
    for name in names:
        lines.append(f'<text class="code" x="16" y="{places[name] + 4}">{name}</text>')
    for name in names:
        kind, length = "right" if found[name] < 1e-9 else "wrong", round(16 + 560 * found[name])
        at, height = f'x="{length + 8}" y="{places[name] + 24}"', 14
        lines.append(
            f'<rect class="{kind}" x="16" y="{places[name] + 12}" width="{max(length - 16, 2)}" height="{height}"/>'
        )
        lines.append(f'<text class="value {kind}" {at}>{said(found[name])}</text>')
    lines.append(
        '<text x="16" y="30">Gradient error of a CLIP step on 4 ranks, relative to one process</text>'
    )
    path.write_text("\n".join([*lines, "</svg>", ""]))


def main(arguments: Sequence[str] = (), into: Path | None = None) -> int:
    """Print the figures, and draw them."""
    found = deviations()
    for way, far in found.items():
        print(f"{way:45} {far:.1e}")
    if into is not None:
        draw(found, into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
