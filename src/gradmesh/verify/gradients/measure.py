"""Measurements on one rank: its gradients, and its part of the objective for perturbed inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.errors import GradmeshError
from gradmesh.types import Type
from gradmesh.verify.gradients.directions import direction, unit
from gradmesh.verify.gradients.input_errors import Kept, disagreement, raise_first, unsteady, unusable
from gradmesh.verify.gradients.inputs import RankInputs, local_part, refuse_wrong_call
from gradmesh.verify.gradients.program import Objective, Part, Program

__all__ = ["Measured", "Move", "Options", "exchanged", "measure", "prepared"]


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
    """The measurements of one rank.

    Attributes:
        rank: the rank.
        leaves: its leaves by name.
        loss: its loss.
        moves: all perturbations, the same on every rank.
        gradients: for each order, its gradients by name.
        parts: for each order, perturbation and direction, its part of the value at -eps and at +eps.
        tangents: for each joint direction, the tangent of its loss, and its parts at -eps and at +eps.
        problem: the error that prevented the measurement.
    """

    rank: int
    leaves: dict[str, Kept] = field(default_factory=dict)
    loss: float = math.nan
    moves: list[Move] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    parts: dict[int, list[list[tuple[Part, Part]]]] = field(default_factory=dict)
    tangents: list[tuple[Part, Part, Part]] = field(default_factory=list)
    problem: GradmeshError | None = None


def exchanged(mine: Any) -> list[Any]:
    """all_gather_object: every rank's object, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def prepared(
    fn: Callable[..., Tensor], inputs: Callable[[int], object], options: Options
) -> tuple[Program, list[list[Kept]], float]:
    """The program of this rank, the leaves of every rank, and this rank's loss.

    Raises:
        GradmeshError: some rank's inputs or loss are invalid; the same error on every rank.
    """
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
    program = Program(fn, cast("RankInputs", taken), options.objective, options.seed, options.in_order)
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
    address = 0 if leaf.parameter is None else local_part(leaf.parameter.detach()).data_ptr()
    memory = (os.getpid(), address) if address else None
    return Kept(leaf.name, leaf.type, tuple(leaf.base.shape), leaf.base.dtype, mark, memory)
