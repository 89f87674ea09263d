"""Random programs of several micro-batches inside and outside of `no_sync`, and the same on one dense process.

A program has leaves on every rank, which verbs are applied to, and a loss of each rank and micro-batch that uses some
of the results. Most leaves are parameters; some are received, as a pipeline stage's inputs are: plain tensors made anew
for each micro-batch, whose gradients are read right after its backward, inside of the block where that runs there. A
verb may be called in a region that backward runs again. The dense run has every rank's leaves in one process, and a
formula for each verb. Autograd's gradient of the sum of the losses is what each rank's leaves have to have in the end.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.verify import simulate

__all__ = ["Program", "dense", "draw", "gradients", "run"]

MESHES: dict[str, dict[str, int]] = {
    "two": {"a": 2},
    "three": {"a": 3},
    "grid": {"a": 2, "b": 2},
}
DTYPES = (torch.float64, torch.complex128)
ROWS = 6
"""The rows of a leaf; those of a leaf with rows of its own are ROWS / 2 plus the rank."""


@dataclass(frozen=True)
class Use:
    """One call of each micro-batch.

    Attributes:
        leaf: which leaf.
        verb: which verb.
        axis: over which axis.
        active: in which micro-batches it is made.
        used: which ranks' losses use the result, for each micro-batch.
        direct: whether the losses use the leaf itself too.
        derived: whether the operand is computed from the leaf instead of being it.
        region: how backward runs the call again; "" if it does not.
    """

    leaf: int
    verb: str
    axis: str
    active: tuple[bool, ...]
    used: tuple[tuple[bool, ...], ...]
    direct: bool
    derived: bool
    region: str


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        seed: that it was drawn from.
        mesh: the axes.
        leaves: for each leaf its dtype and whether ranks have different numbers of rows.
        received: for each leaf whether it is an input of each micro-batch instead of a parameter.
        uses: the calls of a micro-batch, in order.
        put_off: for each micro-batch whether its forward runs inside of the block; the last does not.
        inside: whether backward runs inside of the block too.
        ordered: whether each micro-batch is in `ordered()`.
        twice: whether backward runs twice through each graph.
        late: whether all forwards of the micro-batches run before the first backward.
    """

    seed: int
    mesh: str
    leaves: tuple[tuple[int, bool], ...]
    received: tuple[bool, ...]
    uses: tuple[Use, ...]
    put_off: tuple[bool, ...]
    inside: bool
    ordered: bool
    twice: bool
    late: bool

    @property
    def axes(self) -> dict[str, int]:
        """Names and sizes of the axes."""
        return MESHES[self.mesh]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        size = 1
        for n in self.axes.values():
            size *= n
        return size


# ---- verbs: how they are called, and what they are on one process ------------------------------------------------


def _tied(xs: list[Tensor]) -> list[Tensor]:
    """Values that are the same on every rank, whose gradients every rank gets the sum of."""
    tie = sum((x - x.detach() for x in xs), torch.zeros_like(xs[0]))
    return [x.detach() + tie for x in xs]


def _gathered(xs: list[Tensor], dim: int = 0) -> list[Tensor]:
    return [torch.cat(xs, dim)] * len(xs)


def _scattered(xs: list[Tensor]) -> list[Tensor]:
    return list(sum(xs, torch.zeros_like(xs[0])).split(ROWS // len(xs)))


def _sizes(ranks: int) -> list[int]:
    return [ROWS // 2 + rank for rank in range(ranks)]


Verb = tuple[Callable[[Tensor, str], Tensor], Callable[[list[Tensor]], list[Tensor]]]

ALIKE: dict[str, Verb] = {
    "replicate": (lambda x, axis: gm.replicate(x, axis), _tied),
    "replicate, less exact": (lambda x, axis: gm.replicate(x, axis, comm_dtype=x.dtype), _tied),
    "broadcast": (lambda x, axis: gm.broadcast(x, axis, root=1), lambda xs: [xs[1]] * len(xs)),
    "all_gather": (lambda x, axis: gm.all_gather(x, axis), _gathered),
    "all_gather, dim 1": (lambda x, axis: gm.all_gather(x, axis, dim=1), lambda xs: _gathered(xs, 1)),
    "all_reduce": (
        lambda x, axis: gm.all_reduce(x, axis, dst=gm.R),
        lambda xs: [sum(xs, torch.zeros_like(xs[0]))] * len(xs),
    ),
    "mean": (
        lambda x, axis: gm.all_reduce(x, axis, dst=gm.R, op="mean"),
        lambda xs: [sum(xs, torch.zeros_like(xs[0])) / len(xs)] * len(xs),
    ),
    "reduce_scatter": (lambda x, axis: gm.reduce_scatter(x, axis), _scattered),
    "shard": (
        lambda x, axis: gm.shard(x, axis),
        lambda xs: [x.split(ROWS // len(xs))[rank] for rank, x in enumerate(_tied(xs))],
    ),
    "shift": (lambda x, axis: gm.shift(x, axis), lambda xs: [xs[rank - 1] for rank in range(len(xs))]),
    "scan": (
        lambda x, axis: gm.scan(x, axis),
        lambda xs: [sum(xs[: rank + 1], torch.zeros_like(xs[0])) for rank in range(len(xs))],
    ),
}
UNEVEN: dict[str, Verb] = {
    "all_gather, explicit": (
        lambda x, axis: gm.all_gather(x, axis, sizes=_sizes(gm.axis(axis).size)),
        _gathered,
    ),
}


# ---- regions that backward runs again ----------------------------------------------------------------------------


class Again(torch.autograd.Function):
    """Runs a function of one tensor without a graph, and once more on a detached copy when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What the function makes."""
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        """Its gradient, read off the copy."""
        copy = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(copy)
        y.backward(grad)
        return None, copy.grad


def _closed_over(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In a reentrant checkpoint that has the operand from around, and not for an input."""
    nothing = torch.zeros((), dtype=x.dtype, requires_grad=True)
    return checkpoint(lambda zero: function(x) + zero, nothing, use_reentrant=True)


REGIONS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "": lambda function, x: function(x),
    "checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "reentrant, closed over": _closed_over,
    "by hand": Again.apply,
}


# ---- programs ----------------------------------------------------------------------------------------------------


def draw(seed: int, *, wild: bool = False) -> Program:
    """A program.

    Args:
        seed: which one.
        wild: whether ranks may use different results without `ordered()`, which may be refused.
    """
    rng = random.Random(seed)
    mesh = rng.choice(list(MESHES))
    axes = list(MESHES[mesh])
    ranks = 4 if mesh == "grid" else MESHES[mesh]["a"]
    steps = rng.choice((1, 3, 3, 4))
    leaves = tuple((rng.randrange(2), rng.random() < 0.25) for _ in range(rng.randint(1, 4)))
    ordered = rng.random() < 0.5
    uses = []
    for _ in range(rng.randint(1, 6)):
        leaf = rng.randrange(len(leaves))
        verbs = UNEVEN if leaves[leaf][1] else ALIKE
        everyone = not ordered and not wild
        used = tuple(tuple(everyone or rng.random() < 0.6 for _ in range(ranks)) for _ in range(steps))
        active = tuple(rng.random() < 0.8 for _ in range(steps))
        uses.append(
            Use(
                leaf,
                rng.choice(list(verbs)),
                axes[0] if leaves[leaf][1] else rng.choice(axes),
                # Else nothing says at the end that the sums are to be taken.
                active if wild else (*active[:-1], True),
                used,
                rng.random() < 0.2,
                rng.random() < 0.15,
                region="",
            )
        )
    put_off = (*(rng.random() < 0.8 for _ in range(steps - 1)), False)
    again = random.Random(f"{seed}, run again")
    # Inside of ordered() a region that hides its calls from the chain is refused.
    regions = ("",) if wild else ("", "checkpoint") if ordered else tuple(REGIONS)
    if again.random() < 0.5:
        uses = [replace(use, region=again.choice(regions)) for use in uses]
        # A closed-over tensor is outside of the checkpoint's graph: its first backward would free it.
        uses = [replace(use, derived=use.derived and use.region != "reentrant, closed over") for use in uses]
    return Program(
        seed,
        mesh,
        leaves,
        tuple(again.random() < 0.25 for _ in leaves),
        tuple(uses),
        put_off,
        inside=rng.random() < 0.7,
        ordered=ordered,
        twice=rng.random() < 0.2,
        late=rng.random() < 0.2 and not ordered,
    )


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) % 2**31)


def _leaves(program: Program, rank: int) -> list[Tensor]:
    """The leaves of a rank. Those with the same rows everywhere have the same values, as `replicate` wants."""
    made: list[Tensor] = []
    for number, (dtype, uneven) in enumerate(program.leaves):
        place = rank if program.mesh != "grid" else rank // 2
        shape = (ROWS // 2 + place, 2) if uneven else (ROWS, 2)
        generator = _generator(program.seed, number, rank if uneven else 99)
        drawn = torch.randn(shape, dtype=DTYPES[dtype], generator=generator)
        made.append(drawn.requires_grad_() if program.received[number] else nn.Parameter(drawn))
    return made


def _term(program: Program, x: Tensor, *key: int) -> Tensor:
    """A nonlinear scalar function of a result, different for each key."""
    weights = torch.randn(x.shape, dtype=x.dtype, generator=_generator(program.seed, *key))
    found = (x * weights).sum()
    return (found.real if found.is_complex() else found).sin()


def _operand(use: Use, leaf: Tensor) -> Tensor:
    return leaf * 0.5 if use.derived else leaf


def _call(use: Use, operand: Tensor) -> Tensor:
    return ALL[use.verb][0](operand, use.axis)


def gradients(program: Program, *, off: bool = True) -> list[Tensor | None] | str:
    """What a rank's leaves have in the end; or gradmesh's error.

    Args:
        program: the program.
        off: whether sums are deferred.
    """
    try:
        return _gradients(program, off)
    except gm.GradmeshError as error:
        return f"{type(error).__name__}: {error}"


def _gradients(program: Program, off: bool) -> list[Tensor | None]:
    rank = dist.get_rank()
    parameters = _leaves(program, rank)
    whole: list[Tensor | None] = [None] * len(parameters)
    losses, inputs = [], []

    def read(leaves: list[Tensor]) -> None:
        """Read the gradients of what a micro-batch has received."""
        for number, leaf in enumerate(leaves):
            if program.received[number] and leaf.grad is not None:
                before = whole[number]
                whole[number] = leaf.grad.clone() if before is None else before + leaf.grad

    for step, wanted in enumerate(program.put_off):
        with contextlib.ExitStack() as blocks:
            block = blocks.enter_context(contextlib.ExitStack())
            if wanted and off:
                block.enter_context(gm.no_sync())
            if program.ordered:
                blocks.enter_context(gm.ordered())
            loss: Tensor | None = None
            leaves = [
                new if received else kept
                for new, kept, received in zip(
                    _leaves(program, rank), parameters, program.received, strict=True
                )
            ]
            inputs.append(leaves)
            for number, use in enumerate(program.uses):
                if not use.active[step]:
                    continue
                called = functools.partial(_call, use)
                y = REGIONS[use.region](called, _operand(use, leaves[use.leaf]))
                if use.used[step][rank]:
                    term = _term(program, y, step, number, rank)
                    if use.direct:
                        term = term + _term(program, leaves[use.leaf], step, number, rank)
                    loss = term if loss is None else loss + term
            if not program.inside:
                block.close()
            if program.late:
                losses.append(loss)
            elif program.ordered:
                gm.backward(loss, retain_graph=False)
            elif loss is not None:
                _back(program, loss)
            if not program.late:
                read(leaves)
    for loss, leaves in zip(losses, inputs, strict=False):
        if loss is not None:
            _back(program, loss)
            read(leaves)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    optimizer.step()  # raises if a sum is still deferred
    dist.barrier()  # a rank whose loss used no result is notified of errors of the others
    pairs = zip(parameters, whole, program.received, strict=True)
    return [grad if received else leaf.grad for leaf, grad, received in pairs]


def _back(program: Program, loss: Tensor) -> None:
    if program.twice:
        loss.backward(retain_graph=True)
    loss.backward()


ALL = ALIKE | UNEVEN


def dense(program: Program) -> list[list[Tensor]]:
    """What every rank's leaves have to have in the end."""
    everyone = [_leaves(program, rank) for rank in range(program.ranks)]
    total = torch.zeros((), dtype=torch.float64)
    for step in range(len(program.put_off)):
        for number, use in enumerate(program.uses):
            if not use.active[step]:
                continue
            results: list[Tensor] = [torch.zeros(0)] * program.ranks
            for group in _groups(program, use.axis):
                made = ALL[use.verb][1]([_operand(use, everyone[rank][use.leaf]) for rank in group])
                for rank, y in zip(group, made, strict=True):
                    results[rank] = y
            for rank, y in enumerate(results):
                if use.used[step][rank]:
                    total = total + _term(program, y, step, number, rank)
                    if use.direct:
                        total = total + _term(program, everyone[rank][use.leaf], step, number, rank)
    if total.requires_grad:
        (total * (2 if program.twice and not program.ordered else 1)).backward()
    return [
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves] for leaves in everyone
    ]


def _groups(program: Program, axis: str) -> Iterator[list[int]]:
    if program.mesh != "grid":
        yield list(range(program.ranks))
    elif axis == "a":
        yield from ([0, 2], [1, 3])
    else:
        yield from ([0, 1], [2, 3])


def run(program: Program, *, off: bool = True) -> tuple[list[list[Tensor | None] | str], int]:
    """What every rank's leaves have, or its error; and the bytes that rank 0 hands in going backward."""
    done = simulate(
        gradients,
        program.ranks,
        args=(program,),
        kwargs={"off": off},
        mesh=program.axes,
        seed=program.seed,
        timeout=60,
    )
    sent = [event.payload for event in done.events.select(rank=0) if event.phase == "backward"]
    return list(done.results), sum(sent)
