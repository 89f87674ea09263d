"""Adjoint error and dense matrix of any linear map over ranks: a collective, an autograd Function, a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from gradmesh.axis import Axis, AxisLike
from gradmesh.axis import axis as find_axis
from gradmesh.errors import ArgumentError, message
from gradmesh.launch import launch
from gradmesh.ops.base import LinearOp
from gradmesh.types import Type
from gradmesh.verify.laws import gathered, inner_product_error, law_error, matrix, matrix_of, sample

__all__ = ["adjoint_error", "as_matrix"]

Map = Callable[[Tensor], Tensor]
Shape = Sequence[int] | Callable[[int], Sequence[int]]
T = TypeVar("T")


def adjoint_error(
    op: LinearOp | Map,
    shape: Shape = (2, 3),
    *,
    src: Type = Type.V,
    dst: Type = Type.V,
    adjoint: LinearOp | Map | None = None,
    dtype: torch.dtype = torch.float64,
    axis: AxisLike = None,
    world_size: int | None = None,
    backend: str = "threads",
) -> float:
    """|<A x, y> - <x, A* y>| on random operands, relative to the size of the terms: rounding if A* is the adjoint of A.

    Args:
        op: A: a `LinearOp`, or any function that is linear in its tensor argument.
        shape: this rank's operand shape, or a function that maps a rank to its shape.
        src: the type of a function's operand. A `LinearOp` has its own types.
        dst: the type of a function's result.
        adjoint: A*. Defaults to `op.adjoint` for a `LinearOp`, and to autograd's backward for a function.
        dtype: of the operands.
        axis: the axis that a function communicates over, as in `gradmesh.axis`.
        world_size: the number of ranks to launch. None: call this on every rank of an initialized world.
        backend: as for `gradmesh.launch`.

    Returns:
        The error, the same on every rank.

    Raises:
        ArgumentError: the result of the function has no gradient.

    Example:
        >>> gathered = gm.verify.adjoint_error(gm.all_gather, (2,), dst=gm.R, world_size=2)
        >>> wrong = gm.verify.adjoint_error(gm.all_gather, (2,), dst=gm.I, world_size=2)
        >>> gathered < 1e-12, wrong > 1e-3
        (True, True)
    """

    def on_each_rank() -> float:
        own = _shape(shape, op.axis if isinstance(op, LinearOp) else axis)
        if isinstance(op, LinearOp) and (adjoint is None or isinstance(adjoint, LinearOp)):
            return inner_product_error(op, own, dtype, adjoint=adjoint)
        here = op.axis if isinstance(op, LinearOp) else find_axis(axis)
        types = (op.src, op.dst) if isinstance(op, LinearOp) else (src, dst)
        forward = _detached(op.apply if isinstance(op, LinearOp) else op)
        if adjoint is None:
            return law_error(forward, _backward(cast("Map", op)), here, own, dtype, types)
        back = _detached(adjoint.apply if isinstance(adjoint, LinearOp) else adjoint)
        return law_error(forward, lambda _, y: back(y), here, own, dtype, types)

    return _everywhere(on_each_rank, world_size, backend)


def as_matrix(
    fn: LinearOp | Map,
    shape: Shape = (2,),
    *,
    dtype: torch.dtype = torch.float64,
    axis: AxisLike = None,
    world_size: int | None = None,
    backend: str = "threads",
) -> Tensor:
    """The dense matrix of a linear map over the values of all ranks, computed by applying it to unit vectors.

    Row r is an element of some rank's result, in rank order, and column c an element of some rank's operand.

    Args:
        fn: a `LinearOp`, or any function that is linear in its tensor argument.
        shape: this rank's operand shape, or a function that maps a rank to its shape. Some ranks may have 0 elements.
        dtype: of the operands; a complex dtype gives a complex matrix.
        axis: the axis that a function communicates over, as in `gradmesh.axis`.
        world_size: the number of ranks to launch. None: call this on every rank of an initialized world.
        backend: as for `gradmesh.launch`.

    Returns:
        The matrix, the same on every rank.

    Raises:
        ArgumentError: the function does not return a tensor, or is not linear: it is not 0 at 0, or differs from the
            matrix at a random operand. Raised on every rank.

    Example:
        >>> gm.verify.as_matrix(lambda x: gm.scan(x), (1,), world_size=3)
        tensor([[1., 0., 0.],
                [1., 1., 0.],
                [1., 1., 1.]], dtype=torch.float64)
    """

    def on_each_rank() -> Tensor:
        if isinstance(fn, LinearOp):
            return matrix(fn, _shape(shape, fn.axis))
        here = find_axis(axis)
        own = _shape(shape, here)
        found = matrix_of(_of_tensors(fn), here, own, dtype)
        if found is not None:
            _refuse_nonlinear(found, fn, here, own, dtype)
            return found
        raise ArgumentError(
            message(
                "the operands of all ranks are empty",
                op="verify.as_matrix",
                axis=str(here),
                expected="at least one element on at least one rank",
                got=f"shape {list(own)}",
                remedy="pass a shape with elements, e.g. shape=(2,)",
            )
        )

    return _everywhere(on_each_rank, world_size, backend)


def _everywhere(on_each_rank: Callable[[], T], world_size: int | None, backend: str) -> T:
    return on_each_rank() if world_size is None else launch(on_each_rank, world_size, backend=backend)[0]


def _shape(shape: Shape, axis: AxisLike) -> Sequence[int]:
    return shape(find_axis(axis).rank) if callable(shape) else shape


def _of_tensors(fn: Map) -> Map:
    """Wrap the function: detach its result; raise if it does not return a tensor."""

    def detached(x: Tensor) -> Tensor:
        y: object = fn(x)
        if isinstance(y, Tensor):
            return y.detach()
        raise ArgumentError(
            message(
                "the function does not return a tensor",
                op="verify.as_matrix",
                expected="one tensor on every rank",
                got=type(y).__name__,
                remedy="return one tensor; join several with torch.cat([a.flatten(), b.flatten()])",
            )
        )

    return detached


def _refuse_nonlinear(found: Tensor, fn: Map, axis: Axis, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise if the matrix computed at unit vectors does not describe the function at other operands."""
    origin = fn(torch.zeros(tuple(shape), dtype=dtype)).detach()
    x = 8 * sample(Type.V, shape, dtype, axis)  # far from the unit vectors
    y = fn(x.clone()).detach()
    everyones = [gathered(each, axis) for each in (origin, x, y)]
    zero, x, y = (each.to(found.dtype) for each in everyones)
    allowed = 1e-3 if dtype in (torch.float32, torch.complex64) else 1e-9
    if dtype in (torch.float16, torch.bfloat16):
        allowed = 0.1
    scale = 1 + float((found.abs() @ x.abs()).abs().max()) if found.shape[0] else 1.0
    off = {
        "at zero": zero,
        "at a random operand": y - found @ x if y.shape == found.shape[:1] else None,
    }
    for where, error in off.items():
        size = float("inf") if error is None else float(error.abs().max()) if error.numel() else 0.0
        if not size <= allowed * scale:
            raise ArgumentError(
                message(
                    "the function is not linear",
                    op="verify.as_matrix",
                    axis=str(axis),
                    expected="fn(0) == 0, and fn(x) == matrix @ x at any operand x",
                    got=f"an error of {size:.3g} {where}",
                    remedy="pass a linear function; for any other pass its derivative, e.g. "
                    "lambda v: torch.func.jvp(fn, (x,), (v,))[1]",
                )
            )


def _detached(fn: Map) -> Map:
    return lambda x: fn(x).detach()


def _backward(fn: Map) -> Callable[[Tensor, Tensor], Tensor]:
    """The vector-Jacobian product of autograd, as a function of the point and the cotangent."""

    def back(x: Tensor, y: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            result = fn(leaf)
        if not result.requires_grad:
            raise ArgumentError(
                message(
                    "the result of the function does not require grad",
                    op="verify.adjoint_error",
                    expected="a function that autograd can differentiate",
                    got="a result with requires_grad=False",
                    remedy="pass the adjoint explicitly, e.g. adjoint=lambda y: gm.reduce_scatter(y) for an all_gather",
                )
            )
        (found,) = torch.autograd.grad(result, leaf, y, allow_unused=True)
        return torch.zeros_like(x) if found is None else found

    return back
