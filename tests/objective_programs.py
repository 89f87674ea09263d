"""Random programs under `gm.objective` in which a wrapper averages some parameters, and others are outside of it.

A model's parameters are averaged by a wrapper, or not; each rank uses them as they are, or by a verb that sums their
gradients over the same ranks or over some of them. Ranks have different numbers of samples. The same on one process,
which has all samples and every rank's own parameters, says what each gradient has to be.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradmesh as gm

__all__ = ["INSIDE", "OUTSIDE", "WRAPPERS", "Program", "deviations", "draw"]

T = torch.float64
WIDTH = 12
"""So that each rank has a part of what FSDP1 flattens: without one, torch makes up a gradient of another dtype."""
WRAPPERS = ("DDP", "FSDP1", "FSDP2", "HSDP2")
INSIDE = (
    "as it is",
    "replicated",
    "replicated with others",
    "replicated over some",
    "replicated over both axes",
    "both ways",
    "gathered",
    "invariant",
    "shard",
)
"""What the wrapper averages, and how the ranks use it."""
OUTSIDE = ("own", "own, as it is", "replicated", "replicated with others", "changed, replicated")
"""What it does not."""


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        seed: that it was drawn from.
        ranks: how many; 4 are a mesh of two axes.
        wrapper: which.
        inside: how each parameter in the wrapper is used.
        outside: how each one outside is.
        counts: the samples of each rank, for each micro-batch.
        local: "mean" or "sum".
        reduction: "mean" or "sum".
        ddp_kind: what `ddp` is: the wrapper alone, or a module that holds all parameters.
        deferred: whether micro-batches but the last are in `gm.no_sync`.
        checkpointed: whether the forward of the wrapped module is in a checkpoint.
        penalty: the factor of what is added behind `gm.objective`, of parameters that every rank has whole or alone.
        losses: how many objectives have parts of the loss, of one graph.
    """

    seed: int
    ranks: int
    wrapper: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    local: str
    reduction: str
    ddp_kind: str
    deferred: bool
    checkpointed: bool
    penalty: float
    losses: int


def draw(seed: int, ranks: int) -> Program:
    """A program for some ranks."""
    rng = random.Random(f"{seed}, {ranks}")
    steps = rng.choice((1, 1, 2, 3))
    local = rng.choice(("mean", "sum"))
    counts = [[rng.choice((0, 1, 2, 5)) for _ in range(ranks)] for _ in range(steps)]
    counts[-1][rng.randrange(ranks)] = 3
    wrapper = rng.choice(("DDP", "DDP", *WRAPPERS))
    return Program(
        seed,
        ranks,
        wrapper,
        tuple(rng.choice(INSIDE) for _ in range(rng.randint(1, 3))),
        tuple(rng.choice(OUTSIDE) for _ in range(rng.randint(0, 3))),
        tuple(map(tuple, counts)),
        local,
        rng.choice(("mean", "sum")),
        rng.choice(("wrapper", "all")),
        wrapper == "DDP" and rng.random() < 0.4,  # fully_shard has a no_sync of its own, and refuses this one
        rng.random() < 0.3,
        0.3 if wrapper == "DDP" and rng.random() < 0.4 else 0.0,
        rng.choice((1, 1, 2)),
    )


def _drawn(program: Program, *key: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((program.seed, *key)) % 2**31)
    return torch.randn(WIDTH, dtype=T, generator=generator)


def _samples(program: Program, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((program.seed, 7, step, rank)) % 2**31)
    return torch.randn(program.counts[step][rank], WIDTH, dtype=T, generator=generator)


def _of_rank(x: Tensor) -> Tensor:
    """A number of a rank's samples."""
    return x.sum(0).tanh() + 0.5


def _joined(z: Tensor, w: Tensor) -> Tensor:
    return (z * w).tanh() + w


class Inside(nn.Module):
    """What is wrapped."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        values = [_drawn(program, 1, number) for number in range(len(program.inside))]
        self.weights = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, x: Tensor) -> Tensor:
        """The samples, changed by each parameter in turn."""
        if self.program.checkpointed:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        z, world = x, gm.axis(torch.distributed.group.WORLD)
        some = "b" if self.program.ranks == 4 else world
        for how, w in zip(self.program.inside, self.weights, strict=True):
            if how == "replicated":
                w = gm.replicate(w, world)
            elif how == "replicated with others":
                w = gm.replicate((w * 2, w), world)[0] / 2
            elif how == "replicated over some":
                w = gm.replicate(w, some)
            elif how == "replicated over both axes":
                w = gm.replicate(gm.replicate(w, "a"), "b") if self.program.ranks == 4 else w * 1
            elif how == "both ways":
                z = _joined(z, gm.replicate(w, world))
            elif how == "gathered":
                w = gm.all_gather(w * _of_rank(x), world).view(-1, WIDTH).mean(0)
            elif how == "invariant":
                w = gm.replicate(gm.all_reduce(w * _of_rank(x), world, dst=gm.I).sin(), world)
            elif how == "shard":
                part = gm.shard(w.repeat(world.size), world)
                w = gm.all_gather(part, world).view(-1, WIDTH).mean(0)
            z = _joined(z, w)
        return z


def _dense_inside(program: Program, ws: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    zs = list(xs)
    for how, w in zip(program.inside, ws, strict=True):
        used = w
        if how == "both ways":
            zs = [_joined(z, w) for z in zs]
        elif how == "gathered":
            used = torch.stack([w * _of_rank(x) for x in xs]).mean(0)
        elif how == "invariant":
            used = sum((w * _of_rank(x) for x in xs), torch.zeros_like(w)).sin()
        zs = [_joined(z, used) for z in zs]
    return zs


class Outside(nn.Module):
    """What is not."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__()
        self.program = program
        own = [how.startswith("own") for how in program.outside]
        keys = [(2, number, rank if alone else 99) for number, alone in enumerate(own)]
        self.weights = nn.ParameterList([nn.Parameter(_drawn(program, *key)) for key in keys])

    def forward(self, z: Tensor) -> Tensor:
        """What the wrapped module made, changed by each parameter in turn."""
        world = gm.axis(torch.distributed.group.WORLD)
        for how, w in zip(self.program.outside, self.weights, strict=True):
            if how == "own":
                w = gm.all_gather(w, world).view(-1, WIDTH).mean(0)
            elif how == "own, as it is":
                w = w * 1
            elif how == "replicated":
                w = gm.replicate(w, world)
            elif how == "replicated with others":
                w = gm.replicate([w, w * 3], world)[0]
            else:
                w = gm.replicate(w * 2, world) / 2
            z = _joined(z, w)
        return z


def _dense_outside(program: Program, ws: list[list[Tensor]], zs: list[Tensor]) -> list[Tensor]:
    for number, how in enumerate(program.outside):
        each = [of_rank[number] for of_rank in ws]
        if how == "own":
            each = [torch.stack(each).mean(0)] * program.ranks
        zs = [_joined(z, w) for z, w in zip(zs, each, strict=True)]
    return zs


def _losses(program: Program, z: Tensor) -> list[Tensor]:
    """The loss of each sample, in parts."""
    whole = z.sin().sum(-1)
    return [whole] if program.losses == 1 else [whole * 0.25, whole * 0.75 + z[:, 0] ** 2]


def dense(program: Program) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The gradients of one process: of what is wrapped, and of what each rank has outside."""
    inside, outside = Inside(program), [Outside(program, rank) for rank in range(program.ranks)]
    shared = outside[0]
    own = [
        [w if how.startswith("own") else shared.weights[number] for number, (how, w) in enumerate(pairs)]
        for pairs in (zip(program.outside, each.weights, strict=True) for each in outside)
    ]
    total = sum(map(sum, program.counts))
    loss = torch.zeros((), dtype=T)
    for step in range(len(program.counts)):
        xs = [_samples(program, step, rank) for rank in range(program.ranks)]
        zs = _dense_outside(program, own, _dense_inside(program, list(inside.weights), xs))
        for z in zs:
            for part in _losses(program, z):
                # A mean weighs by the number of samples; a sum has what each rank hands in times its weight.
                loss = loss + part.sum() / (total if program.reduction == "mean" else 1)
    if program.penalty:
        for parts in (list(inside.weights), *(list(dict.fromkeys(each)) for each in _once(program, own))):
            loss = loss + program.penalty * sum((w.square().sum() for w in parts), torch.zeros((), dtype=T))
    loss.backward()

    def grads(ws: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(w) if w.grad is None else w.grad for w in ws]

    return grads(list(inside.weights)), [grads(each) for each in own]


def _once(program: Program, own: list[list[Tensor]]) -> list[list[Tensor]]:
    """Each parameter once."""
    seen: dict[int, Tensor] = {id(w): w for each in own for w in each}
    return [list(seen.values())]


@functools.cache
def _meshes(ranks: int) -> Any:
    whole = init_device_mesh("cpu", (ranks,))
    return whole, (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if ranks == 4 else whole)


def _wrapped(program: Program, inside: Inside) -> Any:
    whole, both = _meshes(program.ranks)
    if program.wrapper == "DDP":
        return DistributedDataParallel(inside)
    if program.wrapper == "FSDP1":
        return FullyShardedDataParallel(inside, use_orig_params=True, device_id=torch.device("cpu"))
    fully_shard(inside, mesh=both if program.wrapper == "HSDP2" else whole)
    return inside


def gradients(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """What this rank's parameters have in the end, in the wrapper and outside."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    world = gm.axis(torch.distributed.group.WORLD)
    inside, outside = Inside(program), Outside(program, world.rank)
    around = _wrapped(program, inside)
    ddp_kind = around if program.ddp_kind == "wrapper" else nn.ModuleList([around, outside])
    steps, total = len(program.counts), sum(map(sum, program.counts))
    blocks = gm.use_mesh(_meshes(program.ranks)[1]) if program.ranks == 4 else contextlib.nullcontext()
    with blocks:
        for step in range(steps):
            last = step == steps - 1
            with contextlib.ExitStack() as stack:
                if program.deferred and not last:
                    stack.enter_context(gm.no_sync())
                if hasattr(around, "set_requires_gradient_sync"):
                    around.set_requires_gradient_sync(last)
                elif not last:
                    stack.enter_context(around.no_sync())
                x = _samples(program, step, world.rank)
                loss = torch.zeros((), dtype=T)
                for each in _losses(program, outside(around(x))):
                    mean = program.local == "mean"
                    loss = loss + gm.objective(
                        each.mean() if mean else each.sum(),
                        world,
                        reduction=program.reduction,  # type: ignore[arg-type]
                        weights=len(x),
                        local=program.local,  # type: ignore[arg-type]
                        total=total if program.reduction == "mean" else None,
                        ddp=ddp_kind,
                    )
                if last and program.penalty:
                    whole = [*inside.weights, *outside.weights]
                    loss = loss + program.penalty * torch.stack([w.square().sum() for w in whole]).sum()
                loss.backward()
    return _collected(around, inside), [
        torch.zeros_like(w) if w.grad is None else w.grad for w in outside.weights
    ]


def _collected(around: Any, inside: Inside) -> list[Tensor]:
    if isinstance(around, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(around, with_grads=True):
            return [w.grad.clone() for w in inside.weights]
    grads = [w.grad for w in inside.weights]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def deviations(seeds: range, ranks: int) -> dict[str, str]:
    """For each program whose gradients on this rank are not those of one process, which, and by what factor."""
    wrong = {}
    for seed in seeds:
        program = draw(seed, ranks)
        expected_inside, expected_outside = dense(program)
        found_inside, found_outside = gradients(program)
        pairs = [
            *zip(program.inside, found_inside, expected_inside, strict=True),
            *zip(
                program.outside,
                found_outside,
                expected_outside[gm.rank(torch.distributed.group.WORLD)],
                strict=True,
            ),
        ]
        for how, found, expected in pairs:
            if not (found - expected).abs().max() <= 1e-12 * max(1.0, float(expected.abs().max())):
                ratio = float((found * expected).sum() / expected.square().sum())
                wrong[str(program)] = f"{how}: {ratio:.4f} times"
    return wrong
