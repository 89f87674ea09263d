"""The checked program on one rank: its loss and gradients, along random directions, and what is measured."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh.autograd.ordered import Order, ordered
from gradmesh.errors import GradmeshError
from gradmesh.types import Type
from gradmesh.verify.gradients.inputs import (
    Kept,
    RankInputs,
    disagreement,
    local_gradient,
    local_shard,
    raise_first,
    refuse_wrong_call,
    unsteady,
    unusable,
)


def direction(seed: int, key: str, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A random direction: independent normally distributed elements, real and imaginary.

    Example:
        >>> a, b = (direction(0, "x", n, (2,), torch.float64) for n in (0, 1))
        >>> torch.equal(a, direction(0, "x", 0, (2,), torch.float64)), torch.equal(a, b)
        (True, False)
    """
    digest = hashlib.blake2b(f"{seed} {key} {number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


def unit(number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The unit vector of one element; for complex dtypes first the real parts, then the imaginary ones."""
    size = torch.Size(shape).numel()
    flat = torch.zeros(size, dtype=dtype)
    flat[number % size] = torch.tensor(1 if number < size else 1j)
    return flat.view(torch.Size(shape))


Objective = Literal["sum", "mean", "replicated"]


@dataclass(frozen=True)
class Part:
    """One rank's part of a value: a term that is summed over the ranks, and one that is replicated and counts once."""

    varying: float
    invariant: float

    @staticmethod
    def total(parts: list[Part]) -> float:
        """The value."""
        return sum(part.varying for part in parts) + parts[0].invariant


def inner(x: Tensor, y: Tensor) -> Tensor:
    """The real inner product: complex numbers are pairs of real ones, as in torch's gradients."""
    if x.is_complex() or y.is_complex():
        return (x.conj() * y).real.sum()
    return (x * y).sum()


@dataclass(frozen=True)
class Options:
    """The options of a measurement; see `gradcheck`."""

    objective: Objective = "sum"
    order: int = 1
    forward: bool = False
    full: bool = False
    eps: float = 1e-6
    directions: int = 2
    seed: int = 0
    in_order: bool = False
    atol: float = 1e-8
    rtol: float = 1e-6
    wide: bool = False
    """Whether to also evaluate half steps and extrapolate (Richardson)."""
    split: bool = False
    """Whether to perturb a replicated leaf on one rank at a time, to find the rank whose gradient is wrong."""


@dataclass(frozen=True)
class Program:
    """A user function with this rank's inputs."""

    fn: Callable[..., Tensor]  # returns this rank's loss
    inputs: RankInputs  # its arguments
    options: Options  # how the ranks' losses are combined, and whether it runs inside `gradmesh.ordered()`

    def loss(self, offsets: Mapping[str, Tensor] | None = None) -> object:
        """The return value of the function, not validated, with some inputs shifted."""
        with self._called(offsets) as (loss, order):
            if order is not None and (loss is None or isinstance(loss, Tensor)):
                order.join(loss)
        self.inputs.settle()
        return loss

    def part(self, offsets: Mapping[str, Tensor] | None = None) -> Part:
        """This rank's part of the objective."""
        return self._counted(self.loss(offsets))

    def gradients(
        self, offsets: Mapping[str, Tensor] | None = None, keep: Callable[[], None] | None = None
    ) -> dict[str, Tensor | None]:
        """Run backward and return the gradients of this rank's leaves."""
        with self._called(offsets) as (loss, order):
            retain = keep is not None
            if order is not None:
                order.backward(loss, retain_graph=retain)
            elif loss is not None:
                loss.backward(retain_graph=retain)
            if keep is not None:
                keep()
        return {name: leaf.grad for name, leaf in self.inputs.leaves.items()}

    def contracted(self, offsets: Mapping[str, Tensor] | None = None) -> Part:
        """The inner product of the first-order gradients with fixed random cotangents."""
        sums = {True: 0.0, False: 0.0}
        for name, grad in self.gradients(offsets).items():
            if grad is not None:
                product = float(inner(grad, self._cotangent(name, grad)))
                sums[self.inputs.leaves[name].type is Type.I] += product
        return Part(sums[False], sums[True])

    def second_gradients(self) -> dict[str, Tensor | None]:
        """The gradients of `contracted`, by double backward."""
        with self._called(None) as (loss, order):
            leaves = self.inputs.leaves
            wanted = [leaf.current for leaf in leaves.values() if leaf.current is not None]
            grad = torch.autograd.grad if order is None else order.grad
            first = grad(loss, wanted, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
            terms = [
                inner(g, self._cotangent(name, g))
                for name, g in zip(leaves, first, strict=True)
                if g is not None
            ]
            whole = torch.stack(terms).sum() if terms else None
            if order is None and (whole is None or not whole.requires_grad):
                return dict.fromkeys(leaves)
            if whole is not None and not whole.requires_grad:
                whole = None
            found = grad(whole, wanted, allow_unused=True)  # type: ignore[arg-type]
        return {name: local_gradient(x, g) for name, x, g in zip(leaves, wanted, found, strict=True)}

    def tangent(self, along: Mapping[str, Tensor]) -> Part:
        """The forward-mode derivative of this rank's part of the objective."""
        with forward_ad.dual_level(), self.inputs.duals(along) as args, self._in_order() as order:
            loss = self.fn(*args)
            moved = None if loss is None else forward_ad.unpack_dual(loss).tangent
            if order is not None:
                order.join(loss)
            return self._counted(torch.zeros(()) if moved is None else moved)

    def _cotangent(self, name: str, grad: Tensor) -> Tensor:
        """The cotangent of a gradient: the same on every rank unless the leaf varies."""
        varies = self.inputs.leaves[name].type is Type.V
        key = f"cotangent {name}" + (f" {dist.get_rank()}" if varies else "")
        return direction(self.options.seed, key, 0, grad.shape, grad.dtype)

    def _counted(self, loss: object) -> Part:
        value = float(loss.detach()) if isinstance(loss, Tensor) else 0.0 if loss is None else float("nan")
        if self.options.objective == "replicated":
            return Part(0.0, value)
        return Part(value / (dist.get_world_size() if self.options.objective == "mean" else 1), 0.0)

    @contextlib.contextmanager
    def _called(self, offsets: Mapping[str, Tensor] | None) -> Iterator[tuple[Tensor | None, Order | None]]:
        with torch.enable_grad():
            args = self.inputs.args(offsets)
            with self._in_order() as order:
                yield self.fn(*args), order

    def _in_order(self) -> contextlib.AbstractContextManager[Order | None]:
        return ordered() if self.options.in_order else contextlib.nullcontext()


@dataclass(frozen=True)
class Move:
    """The perturbation of one leaf: on one rank, or on all ranks at once if it is replicated (`owner` is None)."""

    name: str
    type: Type
    owner: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int
    """The number of directions."""
    full: bool

    def along(self, number: int, seed: int) -> Tensor:
        """The direction of that index."""
        if self.full:
            return unit(number, self.shape, self.dtype)
        return direction(seed, self.name, number, self.shape, self.dtype)


@dataclass
class Measured:
    """The measurements of one rank."""

    rank: int
    leaves: dict[str, Kept] = field(default_factory=dict)  # its leaves by name
    loss: float = math.nan
    moves: list[Move] = field(default_factory=list)  # all perturbations, the same on every rank
    # for each order, its gradients by name
    gradients: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    # for each order, perturbation and direction, its part of the value at -eps and at +eps
    parts: dict[int, list[list[tuple[Part, Part]]]] = field(default_factory=dict)
    # for each joint direction, the tangent of its loss, and its parts at -eps and at +eps
    tangents: list[tuple[Part, Part, Part]] = field(default_factory=list)
    problem: GradmeshError | None = None  # the error that prevented the measurement


Run = Callable[..., list[Any]]
"""`run(job, *args)` calls `job(fn, inputs, *args)` on every rank, for the checked program."""


def exchanged(mine: Any) -> list[Any]:
    """all_gather_object: every rank's object, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def prepared(
    fn: Callable[..., Tensor], inputs: Callable[[int], object], options: Options
) -> tuple[Program, list[list[Kept]], float]:
    """The program of this rank, the leaves of every rank, and this rank's loss."""
    rank = dist.get_rank()
    taken: RankInputs | None = None
    problem: GradmeshError | None = None
    try:
        taken = RankInputs(inputs(rank))
        refuse_wrong_call(fn, taken.args())
    except GradmeshError as error:
        problem = error
    kept = [] if taken is None else [_kept(leaf, options.seed) for leaf in taken.leaves.values()]
    received = exchanged((problem, kept))
    raise_first([problem for problem, _ in received])
    everyones = [kept for _, kept in received]
    raise_first([disagreement(everyones)])
    program = Program(fn, cast("RankInputs", taken), options)
    loss = program.loss()
    raise_first(exchanged(unusable(loss, options.in_order, rank)))
    value = float(loss.detach()) if isinstance(loss, Tensor) else 0.0
    raise_first(exchanged(unsteady(value, program.loss(), rank)))
    return program, everyones, value


def measure(fn: Callable[..., Tensor], inputs: Callable[[int], object], options: Options) -> Measured:
    """Measure on this rank; called on all ranks."""
    mine = Measured(dist.get_rank())
    try:
        program, everyones, mine.loss = prepared(fn, inputs, options)
    except GradmeshError as error:
        mine.problem = error
        return mine
    mine.leaves = {kept.name: kept for kept in everyones[mine.rank]}
    mine.moves = planned(everyones, options)
    try:
        for order in range(1, options.order + 1):
            mine.gradients[order] = program.gradients() if order == 1 else program.second_gradients()
            value = program.part if order == 1 else program.contracted
            mine.parts[order] = [_moved(value, move, options) for move in mine.moves]
        if options.forward:
            mine.tangents = [_tangent(program, mine.moves, n, options) for n in range(options.directions)]
    finally:
        program.inputs.restore()
    return mine


def planned(everyones: list[list[Kept]], options: Options) -> list[Move]:
    """All perturbations, the same on every rank: a varying leaf on each rank separately, others on all at once."""
    moves: dict[tuple[str, int | None], Move] = {}
    for rank, leaves in enumerate(everyones):
        for kept in leaves:
            one_rank = kept.type in (Type.V, Type.P) or (options.split and kept.type is Type.R)
            owner = rank if one_rank else None
            size = torch.Size(kept.shape).numel() * (2 if kept.dtype.is_complex else 1)
            full = options.full or size <= options.directions
            count = size if full else options.directions
            moves.setdefault(
                (kept.name, owner), Move(kept.name, kept.type, owner, kept.shape, kept.dtype, count, full)
            )
    return sorted(moves.values(), key=lambda move: (move.name, -1 if move.owner is None else move.owner))


def _moved(
    value: Callable[[Mapping[str, Tensor] | None], Part], move: Move, options: Options
) -> list[tuple[Part, Part]]:
    here = move.owner in (None, dist.get_rank())
    return [
        _ends(value, {move.name: move.along(number, options.seed)} if here else {}, options)
        for number in range(move.count)
    ]


def _ends(
    value: Callable[[Mapping[str, Tensor] | None], Part], along: Mapping[str, Tensor], options: Options
) -> tuple[Part, Part]:
    """A value at -eps and at +eps; extrapolated from full and half steps if `wide`."""
    ends = []
    for sign in (-1, 1):
        whole = value({name: sign * options.eps * d for name, d in along.items()})
        if options.wide:
            half = value({name: sign * options.eps / 2 * d for name, d in along.items()})
            whole = Part((8 * half.varying - whole.varying) / 3, (8 * half.invariant - whole.invariant) / 3)
        ends.append(whole)
    return ends[0], ends[1]


def _tangent(program: Program, moves: list[Move], number: int, options: Options) -> tuple[Part, Part, Part]:
    """The tangent of this rank's loss for a perturbation of all leaves, and its parts at -eps and at +eps."""
    mine = [move for move in moves if move.owner in (None, dist.get_rank())]
    along = {
        move.name: direction(
            options.seed, f"tangent {move.name} {move.owner}", number, move.shape, move.dtype
        )
        for move in mine
    }
    tangent = program.tangent(along)
    return tangent, *_ends(program.part, along, options)


def _kept(leaf: Any, seed: int) -> Kept:
    mark: tuple[float, ...] = ()
    if leaf.type in (Type.R, Type.I):
        weights = direction(seed, "mark", 0, leaf.base.shape, leaf.base.dtype)
        product = (weights * leaf.base).sum()
        mark = (float(product.real), float(product.imag)) if leaf.base.is_complex() else (float(product),)
    address = 0 if leaf.parameter is None else local_shard(leaf.parameter.detach()).data_ptr()
    memory = (os.getpid(), address) if address else None
    return Kept(leaf.name, leaf.type, tuple(leaf.base.shape), leaf.base.dtype, mark, memory)
