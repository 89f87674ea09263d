"""Adjoint checks for any linear op.

Every check runs on all ranks of the op's axis at once and returns the same error on each rank; compare it with
rounding. The adjoint is a separate argument, so that tests can pass a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.ops.base import LinearOp
from gradmesh.transport import transport
from gradmesh.types import Type

__all__ = [
    "adjoint_matrix_error",
    "as_real",
    "gathered",
    "inner_product_error",
    "law_error",
    "matrix",
    "matrix_of",
    "pairing",
    "sample",
]


def sample(kind: Type, shape: Sequence[int], dtype: torch.dtype, axis: Axis, *, seed: int = 0) -> Tensor:
    """A random operand of a type: the same on every rank for R and I, a different one on each for V and P.

    Args:
        kind: the type of the value.
        shape: this rank's shape.
        dtype: a floating-point or complex dtype.
        axis: the ranks.
        seed: different seeds give different samples.
    """
    alike = kind in (Type.R, Type.I)
    generator = torch.Generator().manual_seed(1000 * seed + (0 if alike else 1 + axis.rank))
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


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
    """The error of `inner_product_error`, for any map.

    Args:
        forward: A.
        backward: the candidate for A*; called with x and y, because autograd's backward depends on the point x.
        axis: the ranks.
        shape: this rank's operand shape.
        dtype: the operands' dtype.
        types: the types of the operand and the result.
    """
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
