"""Adjoint checks and dense matrices of linear maps over ranks: ops, collectives, autograd Functions, layers.

Every check runs on all ranks of the axis at once and returns the same error on each rank; compare it with rounding.
The adjoint is a separate argument, so that tests can pass a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError
from gradmesh.launch import launch
from gradmesh.ops.base import LinearOp
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.runtime.mesh import axis as find_axis
from gradmesh.transport import transport
from gradmesh.types import Type


def sample(kind: Type, shape: Sequence[int], dtype: torch.dtype, axis: Axis, *, seed: int = 0) -> Tensor:
    """A random operand of a type: the same on every rank for R and I, a different one on each for V and P.

    It is on torch's default device; its values are the same on every device.

    Args:
        kind: the type of the value.
        shape: this rank's shape.
        dtype: a floating-point or complex dtype.
        axis: the ranks.
        seed: different seeds give different samples.
    """
    alike = kind in (Type.R, Type.I)
    generator = torch.Generator().manual_seed(1000 * seed + (0 if alike else 1 + axis.rank))
    x = torch.randn(tuple(shape), dtype=dtype, generator=generator, device="cpu")
    return x.to(torch.get_default_device())


def as_real(x: Tensor) -> Tensor:
    """The numbers of a tensor in double precision, complex ones as pairs of real ones."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def pairing(kind: Type, x: Tensor, y: Tensor, axis: Axis) -> Tensor:
    """<x, y>: the sum of the elementwise products over all ranks; an invariant operand counts once.

    Complex numbers are treated as pairs of real ones, as in torch's gradient convention.
    """
    local = (as_real(x) * as_real(y)).sum()
    return local if kind is Type.I else transport(axis).sum(local)


def inner_product_error(
    op: LinearOp, shape: Sequence[int], dtype: torch.dtype = torch.float64, *, adjoint: LinearOp | None = None
) -> float:
    """|<A x, y> - <x, A* y>| on random x and y, relative to the size of the terms.

    Args:
        op: the op A.
        shape: this rank's operand shape.
        dtype: the operands' dtype.
        adjoint: the candidate for A*; defaults to `op.adjoint`.
    """
    back = adjoint or op.adjoint
    return law_error(op.apply, lambda _, y: back.apply(y), op.axis, shape, dtype, (op.src, op.dst))


def law_error(
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
    axis: Axis,
    shape: Sequence[int],
    dtype: torch.dtype,
    types: tuple[Type, Type],
) -> float:
    """The error of `inner_product_error`, for any map; autograd's backward depends on the point x."""
    src, dst = types
    x = sample(src, shape, dtype, axis, seed=1)
    result = forward(x)
    y = sample(dst.dual, result.shape, result.dtype, axis, seed=2)
    left = pairing(dst, result, y, axis)
    right = pairing(src, x, backward(x, y), axis)
    scale = transport(axis).sum(x.abs().double().sum() + y.abs().double().sum() + 1)
    return float((left - right).abs() / scale)


def matrix(op: LinearOp, shape: Sequence[int]) -> Tensor:
    """The op as a dense matrix over the concatenated values of all ranks, computed by applying it to unit vectors.

    Row r is an element of some rank's result, column c an element of some rank's operand. A column of an R or I
    operand sets the element on that one rank only: the matrix describes the map without types.

    Args:
        op: the op.
        shape: this rank's operand shape.
    """
    found = matrix_of(op.apply, op.axis, shape)
    if found is not None:
        return found
    rows = transport(op.axis).sum(torch.tensor(torch.Size(op.out_shape(shape)).numel()))
    return torch.zeros(int(rows), 0, dtype=torch.float64)


def matrix_of(
    forward: Callable[[Tensor], Tensor], axis: Axis, shape: Sequence[int], dtype: torch.dtype = torch.float64
) -> Tensor | None:
    """The matrix of any linear map, as in `matrix`; None if the operands of all ranks are empty."""
    size = torch.Size(shape).numel()
    columns = []
    for owner, total in enumerate(_sizes(size, axis)):
        for element in range(total):
            x = torch.zeros(size, dtype=dtype)
            if owner == axis.rank:
                x[element] = 1
            columns.append(gathered(forward(x.view(torch.Size(shape))), axis))
    return torch.stack(columns, 1) if columns else None


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """The elements of every rank's tensor, in rank order; sizes may differ."""
    return transport(axis).gather(x.reshape(-1), _sizes(x.numel(), axis))


def _sizes(own: int, axis: Axis) -> list[int]:
    sizes: list[int] = transport(axis).gather(torch.tensor([own]), [1] * axis.size).tolist()
    return sizes


def adjoint_matrix_error(op: LinearOp, shape: Sequence[int], *, adjoint: LinearOp | None = None) -> float:
    """The largest difference between the adjoint's matrix and the transpose of the op's, on operands of their types.

    V and P operands may have any value; R and I operands are the same on every rank. With E the map that copies one
    value to all ranks (the identity for V and P), and w = 1/W for I, which counts once (else 1), the law reads

        w_dst E_dual(dst)^T A E_src = (w_src E_src^T A* E_dual(dst))^T

    Args:
        op: the op A.
        shape: this rank's operand shape.
        adjoint: the candidate for A*; defaults to `op.adjoint`.
    """
    adjoint = adjoint or op.adjoint
    size = op.axis.size
    forward = matrix(op, shape)
    backward = matrix(adjoint, op.out_shape(shape))
    cotangent = op.dst.dual
    left = _weight(op.dst, size) * _folded(cotangent, size, _folded(op.src, size, forward.T).T)
    right = _weight(op.src, size) * _folded(op.src, size, _folded(cotangent, size, backward.T).T)
    return float((left - right.T).abs().max()) if left.numel() else 0.0


def _folded(kind: Type, size: int, m: Tensor) -> Tensor:
    """E^T m: sum the rows that belong to the copies of one value."""
    if kind in (Type.V, Type.P) or m.numel() == 0:
        return m
    return m.reshape(size, -1, m.shape[1]).sum(0)


def _weight(kind: Type, size: int) -> float:
    """The weight by which an invariant pairing counts once."""
    return 1 / size if kind is Type.I else 1


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
            wrong = nonlinearity(found, fn, here, own, dtype)
            if wrong is None:
                return found
            raise ArgumentError.of(
                "the function is not linear",
                op="verify.as_matrix",
                axis=str(here),
                expected="fn(0) == 0, and fn(x) == matrix @ x at any operand x",
                got=wrong,
                remedy="pass a linear function; for any other pass its derivative, e.g. "
                "lambda v: torch.func.jvp(fn, (x,), (v,))[1]",
            )
        raise ArgumentError.of(
            "the operands of all ranks are empty",
            op="verify.as_matrix",
            axis=str(here),
            expected="at least one element on at least one rank",
            got=f"shape {list(own)}",
            remedy="pass a shape with elements, e.g. shape=(2,)",
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
        raise ArgumentError.of(
            "the function does not return a tensor",
            op="verify.as_matrix",
            expected="one tensor on every rank",
            got=type(y).__name__,
            remedy="return one tensor; join several with torch.cat([a.flatten(), b.flatten()])",
        )

    return detached


def nonlinearity(
    found: Tensor, fn: Map, axis: Axis, shape: Sequence[int], dtype: torch.dtype = torch.float64
) -> str | None:
    """How far the matrix computed at unit vectors is from the function at other operands, as text; None if it fits."""
    origin = fn(torch.zeros(tuple(shape), dtype=dtype)).detach()
    x = 8 * sample(Type.V, shape, dtype, axis)  # far from the unit vectors
    y = fn(x.clone()).detach()
    everyones = [gathered(each, axis) for each in (origin, x, y)]
    zero, x, y = (each.to(found.dtype) for each in everyones)
    allowed = 1e-3 if dtype in (torch.float32, torch.complex64) else 1e-9
    if dtype in (torch.float16, torch.bfloat16):
        allowed = 0.1
    scale = 1 + float((found.abs() @ x.abs()).abs().max()) if found.shape[0] else 1.0
    off = {"at zero": zero, "at a random operand": y - found @ x if y.shape == found.shape[:1] else None}
    for where, error in off.items():
        size = float("inf") if error is None else float(error.abs().max()) if error.numel() else 0.0
        if not size <= allowed * scale:
            return f"an error of {size:.3g} {where}"
    return None


def _detached(fn: Map) -> Map:
    return lambda x: fn(x).detach()


def _backward(fn: Map) -> Callable[[Tensor, Tensor], Tensor]:
    """The vector-Jacobian product of autograd, as a function of the point and the cotangent."""

    def back(x: Tensor, y: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            result = fn(leaf)
        if not result.requires_grad:
            raise ArgumentError.of(
                "the result of the function does not require grad",
                op="verify.adjoint_error",
                expected="a function that autograd can differentiate",
                got="a result with requires_grad=False",
                remedy="pass the adjoint explicitly, e.g. adjoint=lambda y: gm.reduce_scatter(y) for an all_gather",
            )
        (found,) = torch.autograd.grad(result, leaf, y, allow_unused=True)
        return torch.zeros_like(x) if found is None else found

    return back
