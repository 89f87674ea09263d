"""Hold the gradients of `gm.objective` against one process: masks, wrappers, accumulation, meshes.

    python -m tools.objectives                             # printed
    python -m tools.report docs/reports/loss-scaling.md    # into the page

Each of four ranks has tokens of its own; the loss is the mean over the tokens that a mask lets count, of all ranks and
micro-batches. `before` stands before a gather over the context-parallel ranks, `behind` behind it. A cell is the
largest deviation of any parameter's gradient from that of one process that has all tokens, in float64, relative to the
largest entry.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from tools.pages import machine

RANKS, TOKENS, WIDTH = 4, 6, 4
WRAPPERS = ("none", "DDP", "FSDP1", "FSDP2")
MESHES = {"data 4": (4, 1), "data 2 x context 2": (2, 2), "context 4": (1, 4)}


def _masks() -> dict[str, Tensor]:
    """Which tokens count: (micro-batch, rank, token)."""
    generator = torch.Generator().manual_seed(5)
    every = torch.ones(3, RANKS, TOKENS, dtype=torch.bool)
    drawn = torch.rand(3, RANKS, TOKENS, generator=generator) < 0.5
    masks = {
        name: every.clone() for name in ("all", "one rank without", "one rank alone", "one token", "padded")
    }
    masks["one rank without"][:, 1] = False
    masks["one rank alone"][:, [0, 1, 3]] = False
    masks["one token"] &= False
    masks["one token"][:, 3, 2] = True
    for rank in range(RANKS):
        masks["padded"][:, rank, rank + 1 :] = False
    masks["drawn"] = drawn
    masks["drawn, one rank without"] = drawn.clone()
    masks["drawn, one rank without"][:, 2] = False
    return masks


MASKS = _masks()


class Net(nn.Module):
    """Tokens that see their group's mean, with parameters before and behind the gather."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.behind = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of each token."""
        own = self.before(x).tanh()
        return (own + self.behind(gather(own)).sin().mean(0)).square().sum(-1)  # type: ignore[no-any-return]


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)


def dense(mask: Tensor, steps: int, context: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one process that has all tokens."""
    net = Net()
    losses = []
    for step in range(steps):
        for first in range(0, RANKS, context):
            ranks = range(first, first + context)
            x = torch.cat([_tokens(step, rank) for rank in ranks])
            losses.append(net(x, lambda own: own)[torch.cat([mask[step, rank] for rank in ranks])])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), _gradients(net)


def _gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest, relative to the largest entry of each parameter; infinite where one is missing."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())


def on_rank(wrapper: str, mesh: tuple[int, int], mask: Tensor, steps: int) -> tuple[float, float]:
    """How far this rank's gradients and the loss's value are from those of one process."""
    world, (_, context) = gm.axis(torch.distributed.group.WORLD), mesh
    rank = world.rank
    net = Net()
    around, sync = _wrapped(net, wrapper)
    total = int(mask[:steps].sum())
    value = 0.0
    with _mesh(data=mesh[0], context=context):
        for step in range(steps):
            with sync(step == steps - 1):
                losses = around(_tokens(step, rank), lambda own: gm.all_gather(own, "context"))
                counts = mask[step, rank]
                loss = gm.objective(
                    losses[counts].mean(),
                    world,
                    weights=counts.sum(),
                    total=total if steps > 1 else None,
                    ddp=around if isinstance(around, nn.Module) else False,
                )
                loss.backward()
                value += loss.item()
        expected, gradients = dense(mask, steps, context)
        return deviation(_collected(net, around, wrapper), gradients), abs(value / expected - 1)


@functools.cache
def _made(**sizes: int) -> DeviceMesh:
    """A mesh, made once: it makes process groups."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _mesh(**sizes: int) -> contextlib.AbstractContextManager[object]:
    return gm.use_mesh(_made(**sizes))


def _wrapped(net: Net, wrapper: str) -> tuple[Any, Callable[[bool], contextlib.AbstractContextManager[None]]]:
    """The model in its wrapper, and what a micro-batch runs in."""
    if wrapper == "none":

        def bare(x: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
            world = torch.distributed.group.WORLD
            shared = {name: gm.replicate(p, world) for name, p in net.named_parameters()}
            return torch.func.functional_call(net, shared, (x, gather))  # type: ignore[no-any-return]

        return bare, lambda _: contextlib.nullcontext()
    if wrapper == "FSDP2":
        mesh = _made(all=RANKS)
        fully_shard(net.before, mesh=mesh)
        fully_shard(net, mesh=mesh)

        @contextlib.contextmanager
        def sync(last: bool) -> Any:
            net.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield

        return net, sync
    around: Any = (
        DistributedDataParallel(net)
        if wrapper == "DDP"
        else FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    )
    return around, lambda last: contextlib.nullcontext() if last else around.no_sync()


def _collected(net: Net, around: Any, wrapper: str) -> dict[str, Tensor]:
    if wrapper == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(around, with_grads=True):
            return {name.removeprefix("_fsdp_wrapped_module."): g for name, g in _gradients(around).items()}
    grads = _gradients(net)
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


# ---- tensor parallelism beside data parallelism


class Block(nn.Module):
    """A layer of two matrices, its hidden units over the ranks of an axis, or whole."""

    def __init__(self, axis: gm.Axis | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.axis = axis
        self.before = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        up, down = (torch.randn(s, dtype=torch.float64) for s in ((8, WIDTH), (WIDTH, 8)))
        if axis is not None:
            up, down = up.chunk(axis.size, 0)[axis.rank], down.chunk(axis.size, 1)[axis.rank]
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())
        self.behind = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of each token."""
        x = self.before(x).tanh()
        if self.axis is not None:
            x = gm.replicate(x, self.axis)
        x = (x @ self.up.T).sin() @ self.down.T
        if self.axis is not None:
            x = gm.all_reduce(x, self.axis, dst=gm.I)
        return self.behind(x).square().sum(-1)  # type: ignore[no-any-return]


def tensor_parallel(mask: Tensor) -> float:
    """As `on_rank`: two ranks share a layer, and two such pairs share the tokens under DDP."""
    with _mesh(dp=2, tp=2):
        data, layer = gm.axis("dp"), gm.axis("tp")
        net = Block(layer)
        around = DistributedDataParallel(net, process_group=data.group)
        counts = mask[0, data.rank]
        losses = around(_tokens(0, data.rank))
        loss = gm.objective(losses[counts].mean(), layer, loss_type=gm.I)
        gm.objective(loss, data, weights=counts.sum(), ddp=around).backward()
    whole = Block(None)
    torch.cat([whole(_tokens(0, rank))[mask[0, rank]] for rank in range(2)]).mean().backward()
    expected = _gradients(whole)
    expected["up"] = expected["up"].chunk(2, 0)[layer.rank]
    expected["down"] = expected["down"].chunk(2, 1)[layer.rank]
    return deviation(_gradients(net), expected)


def tensor_parallel_masks() -> dict[str, Tensor]:
    """Those of `MASKS` that leave the first two ranks a token."""
    return {name: mask for name, mask in MASKS.items() if mask[0, :2].any()}


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"{machine()}, {RANKS} ranks on shm\n",
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
