"""Operators on sharded tensors: batched inverses, sparse diagonal matrices, and slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh.errors import ShapeError
from gradmesh.nn.fields.cuts import Cut, cut_of, window
from gradmesh.runtime.mesh import AxisLike, balanced
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import all_gather

__all__ = ["Inverses", "inv_ex", "narrow_copy", "narrowed_sizes", "spdiags"]


class Inverses(NamedTuple):
    """The inverses of the local matrices, and the status of all ranks' matrices.

    Attributes:
        inverse: of the local matrices.
        info: for each matrix of all ranks, 0, or the 1-based index of the pivot that is zero.
    """

    inverse: Tensor
    info: Tensor


def inv_ex(
    x: Tensor, axis: AxisLike = None, *, dim: int = 0, sizes: SizesLike = None, check_errors: bool = False
) -> Inverses:
    """`torch.linalg.inv_ex` of a sharded batch of matrices; `info` is gathered on every rank.

    ::

        V -> V    matrices (n_r, k, k) -> inverses (n_r, k, k)
        V -> I    info (n,), of all ranks' matrices

    Every rank can take the same branch if a matrix is singular on any rank.

    Args:
        x: the local matrices, shape (..., k, k).
        axis: the ranks.
        dim: the sharded batch dim.
        sizes: each rank's size along it; as in `gradmesh.all_gather`.
        check_errors: True to raise on every rank if a matrix is singular on any rank.

    Raises:
        ArgumentError: `x` is not a batch of square matrices, or a matrix is singular.

    Example:
        >>> def on_each_rank():
        ...     found = gm.nn.fields.inv_ex(torch.eye(2).unsqueeze(0) * gm.rank())
        ...     return found.info.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1, 0], [1, 0]]
    """
    verb = "nn.fields.inv_ex"
    call = Call(verb, x, axis)
    if x.dim() < 3 or x.shape[-1] != x.shape[-2] or call.dim(dim) >= x.dim() - 2:
        call.fail(
            "x is not a batch of square matrices, or dim is not a batch dim",
            expected="shape (n, ..., k, k), and dim before the last two",
            got=f"shape {list(x.shape)}, dim={dim!r}",
            remedy="add a batch dim, e.g. x.unsqueeze(0)" if x.dim() == 2 else "pass e.g. dim=0",
        )
    inverse, local = torch.linalg.inv_ex(x)
    info = all_gather(local, call.axis, call.dim(dim), sizes=sizes)
    if check_errors and bool(info.any()):
        place = info.nonzero()[0].tolist()
        call.fail(
            "a matrix of the batch is singular",
            expected="invertible matrices",
            got=f"the matrix at index {place[0] if len(place) == 1 else place} of all ranks' batch has a zero pivot in "
            f"row {int(info[tuple(place)])}",
            remedy="omit check_errors, and handle matrices with nonzero info",
        )
    return Inverses(inverse, info)


def spdiags(
    diagonals: Tensor,
    offsets: Tensor | Sequence[int] | int,
    shape: tuple[int, int],
    axis: AxisLike = None,
    *,
    sizes: SizesLike = None,
    rows: Sequence[int] | None = None,
    layout: torch.layout = torch.sparse_coo,
) -> Tensor:
    """`torch.sparse.spdiags` of sharded diagonals: this rank's rows of a sparse matrix.

    ::

        V -> V    local columns of the diagonals (k, l_r), or of one (l_r,) -> local rows of the matrix (m_r, n), sparse
                  forward: halo exchange of the elements in local rows; backward: their gradients are sent back

    Element j of a diagonal is in column j, as in torch.

    Args:
        diagonals: the local columns of each diagonal.
        offsets: of the diagonals, the same on every rank; positive above the main diagonal. A tensor of int64 of shape
            (k,), or () for one diagonal; or ints, which torch.compile needs.
        shape: of the full matrix.
        axis: the ranks.
        sizes: each rank's number of columns of the diagonals; as in `gradmesh.all_gather`.
        rows: each rank's number of rows of the matrix, e.g. `rows=(4, 3)`; None: an even split.
        layout: `torch.sparse_coo` (coalesced), `torch.sparse_csr` or `torch.sparse_csc`, which torch differentiates
            once; `torch.strided` has every derivative.

    Raises:
        ArgumentError: offsets do not match the diagonals, or repeat; invalid `shape` or `rows`.

    Example:
        >>> def on_each_rank():
        ...     diagonals = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -1.0, -1.0]])[:, gm.axis().slice((2, 1))]
        ...     own = gm.nn.fields.spdiags(diagonals, torch.tensor([0, 1]), (3, 3), sizes=(2, 1))
        ...     return own.to_dense().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[1.0, -1.0, 0.0], [0.0, 2.0, -1.0]], [[0.0, 0.0, 3.0]]]
    """
    verb = "nn.fields.spdiags"
    if isinstance(diagonals, Tensor) and diagonals.dim() == 1:
        diagonals = diagonals.unsqueeze(0)
    call = Call(verb, diagonals, axis)
    if isinstance(offsets, Tensor):
        offsets = offsets.reshape(-1).tolist()
    given = list(offsets) if isinstance(offsets, Sequence) else [offsets]
    places = [place for place in map(integer, given) if place is not None]
    matrix = [size for size in map(integer, shape) if size is not None and size >= 0]
    if not len(shape) == len(matrix) == 2:
        call.fail(
            "shape must be two ints >= 0",
            expected="the rows and columns of the full matrix",
            got=f"shape={shape!r}",
            remedy="pass e.g. shape=(8, 8)",
        )
    parts = balanced(shape[0], call.axis.size) if rows is None else tuple(rows)
    if diagonals.dim() != 2 or not len(set(places)) == len(given) == len(diagonals) > 0:
        call.fail(
            "offsets does not have one distinct int for each diagonal",
            expected="diagonals (k, columns) or (columns,), k >= 1, and k distinct ints",
            got=f"diagonals {list(diagonals.shape)}, offsets {given}",
            remedy="pass e.g. offsets=[-1, 0, 1] for 3 diagonals",
        )
    if len(parts) != call.axis.size or sum(parts) != shape[0] or min(parts) < 0:
        call.fail(
            "rows does not match the matrix",
            expected=f"{call.axis.size} ints >= 0 that add up to {shape[0]}",
            got=f"rows={rows!r}",
            remedy=f"pass e.g. rows={balanced(shape[0], call.axis.size)}, or omit it for this even split",
        )
    layouts = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided)
    call.choose("layout", layout, dict.fromkeys(layouts, 0))
    cut = cut_of(verb, diagonals, axis, 1, sizes)
    most, ends, needs = min(cut.total, shape[1]), 0, []
    for part in parts:
        low, high = max(ends + min(places), 0), min(ends + part + max(places), most)
        needs.append((low, high) if part and low < high else (0, 0))
        ends += part
    rank = call.axis.rank
    near, _ = window(diagonals, cut, needs)
    first, begin, end = sum(parts[:rank]), needs[rank][0], needs[rank][0] + near.shape[1]
    rows_of, columns_of, values_of = [], [], []
    for number, place in enumerate(places):  # each diagonal has one interval in local rows
        low = min(max(begin, first + place), end)
        high = max(min(end, first + parts[rank] + place), low)
        columns_of.append(torch.arange(low, high, device=near.device))
        rows_of.append(columns_of[-1] - (place + first))
        # As columns: the gradient of torch.cat for an empty 1-d part is not connected to the graph.
        values_of.append(near[number].narrow(0, low - begin, high - low).unsqueeze(1))
    row, column = (torch.cat(each) for each in (rows_of, columns_of))
    values = torch.cat(values_of).view(-1)
    if layout == torch.strided:
        flat = near.new_zeros(parts[rank] * shape[1])
        return flat.index_put((row * shape[1] + column,), values).view(parts[rank], shape[1])
    indices = torch.stack((row, column))
    found = torch.sparse_coo_tensor(
        indices, values, (parts[rank], shape[1]), check_invariants=False
    ).coalesce()
    if layout == torch.sparse_coo:
        return found
    return found.to_sparse_csr() if layout == torch.sparse_csr else found.to_sparse_csc()


def narrowed_sizes(sizes: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    """Each rank's size of a slice of a sharded dim.

    Example:
        >>> gm.nn.fields.narrowed_sizes((3, 0, 4), 2, 3)
        (1, 0, 2)
    """
    found, begin = [], 0
    for size in sizes:
        found.append(max(min(begin + size, start + length) - max(begin, start), 0))
        begin += size
    return tuple(found)


def narrow_copy(
    x: Tensor, dim: int, start: int, length: int, axis: AxisLike = None, *, sizes: SizesLike = None
) -> Tensor:
    """`Tensor.narrow_copy` of a sharded tensor: a copy of this rank's part of the slice.

    ::

        V -> V    local rows (n_r, ...) -> those among start ... start + length - 1 of the full tensor; sends nothing

    Args:
        x: the local shard, strided or sparse COO; the result of a sparse one is coalesced.
        dim: the sharded dim.
        start: of the slice, in the full tensor; negative: from its end.
        length: of the slice.
        axis: the ranks.
        sizes: each rank's size along `dim`; as in `gradmesh.all_gather`.

    Returns:
        This rank's part, empty if the slice is on other ranks; `narrowed_sizes` returns each rank's size.

    Raises:
        ShapeError: the slice is out of range.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(3) + 3 * gm.rank()
        ...     return gm.nn.fields.narrow_copy(x, 0, 2, 3).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[2], [3, 4]]
    """
    verb = "nn.fields.narrow_copy"
    sparse = isinstance(x, Tensor) and x.layout is torch.sparse_coo
    # The cut only needs the shape, so avoid operations on the sparse tensor.
    shaped = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if sparse else x
    cut: Cut = cut_of(verb, shaped, axis, dim, sizes)
    begin, rows = integer(start), integer(length)
    if begin is not None and begin < 0:
        begin += cut.total
    if begin is None or rows is None or not 0 <= begin <= begin + rows <= cut.total:
        Call(verb, shaped, axis).fail(
            "start and length are out of range",
            expected=f"ints with 0 <= start <= start + length <= {cut.total}",
            got=f"start={start!r}, length={length!r}",
            remedy="use indices of the full tensor, not of the local shard",
            kind=ShapeError,
        )
    local = narrowed_sizes(cut.sizes, begin, rows)[cut.axis.rank]
    first = max(begin - cut.spans[cut.axis.rank][0], 0) if local else 0
    if sparse:
        return _narrowed_sparse(x.coalesce(), cut.dim, first, local)
    return x.narrow(cut.dim, first, local).clone(memory_format=torch.contiguous_format)


def _narrowed_sparse(x: Tensor, dim: int, first: int, length: int) -> Tensor:
    """`narrow_copy` of a coalesced tensor; torch's is not differentiable."""
    indices, values = x.indices(), x.values()
    if dim < x.sparse_dim():
        inside = (indices[dim] >= first) & (indices[dim] < first + length)
        shift = torch.zeros_like(indices[:, :1])
        shift[dim] = first
        indices, values = indices[:, inside] - shift, values[inside]
    else:
        values = values.narrow(1 + dim - x.sparse_dim(), first, length).clone()
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
