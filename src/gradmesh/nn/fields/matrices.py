"""Small operators on tensors that are cut over ranks: inverses of a batch, diagonals, and a part of a range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh.arguments import Call, SizesLike, integer
from gradmesh.axis import AxisLike, balanced
from gradmesh.collectives import all_gather
from gradmesh.errors import ShapeError
from gradmesh.nn.fields.cuts import Cut, cut_of, window

__all__ = ["Inverses", "inv_ex", "narrow_copy", "narrowed_sizes", "spdiags"]


class Inverses(NamedTuple):
    """The inverses of own matrices, and of all ranks' matrices whether there is one.

    Attributes:
        inverse: of the own matrices.
        info: for each matrix of all ranks, 0, or the place of the pivot that is zero, counted from 1.
    """

    inverse: Tensor
    info: Tensor


def inv_ex(
    x: Tensor, axis: AxisLike = None, *, dim: int = 0, sizes: SizesLike = None, check_errors: bool = False
) -> Inverses:
    """The inverses of a batch of matrices that is cut over ranks: `torch.linalg.inv_ex`, its `info` on every rank.

    ::

        V -> V    matrices (n_r, k, k) -> inverses (n_r, k, k)
        V -> I    info (n,), of all ranks' matrices

    So every rank can take the same way where some matrix is singular; with torch's own, one rank alone would know.

    Args:
        x: own matrices, shape (..., k, k).
        axis: the ranks.
        dim: the dim of the batch that is cut.
        sizes: how many each rank has along it; as in `gradmesh.all_gather`.
        check_errors: raise an error on every rank where some matrix is singular on any.

    Raises:
        ArgumentError: no batch of square matrices, or a matrix that is singular.

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
            "x is no batch of square matrices that is cut along the batch",
            expected="shape (n, ..., k, k), and a dim in front of the last two",
            got=f"shape {list(x.shape)}, dim={dim!r}",
            remedy="add a batch dim",
        )
    inverse, own = torch.linalg.inv_ex(x)
    info = all_gather(own, call.axis, call.dim(dim), sizes=sizes)
    if check_errors and bool(info.any()):
        place = info.nonzero()[0].tolist()
        call.fail(
            "a matrix of the batch is singular",
            expected="matrices that have inverses",
            got=f"number {place[0] if len(place) == 1 else place} of all ranks' has a pivot of zero in its place "
            f"{int(info[tuple(place)])}",
            remedy="leave out check_errors, and look at info",
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
    """Own rows of a sparse matrix of which the diagonals are cut over ranks: `torch.sparse.spdiags`.

    ::

        V -> V    own columns of the diagonals (k, l_r), or of one (l_r,) -> own rows of the matrix (m_r, n), sparse
                  forward: the neighbours' elements that stand in own rows; backward: their gradients go home

    Element j of a diagonal stands in column j, as in torch; so a row has elements of the columns at its side.

    Args:
        diagonals: own columns of each diagonal.
        offsets: of the diagonals, the same on every rank; above the main one they are positive. A tensor of int64 of
            shape (k,), or () for one diagonal; or numbers, which a compiler needs.
        shape: of the whole matrix.
        axis: the ranks.
        sizes: how many columns of the diagonals each rank has; as in `gradmesh.all_gather`.
        rows: how many rows of the matrix each rank gets; None: an even cut.
        layout: `torch.sparse_coo`, coalesced, `torch.sparse_csr` or `torch.sparse_csc`, which torch differentiates
            once; `torch.strided` has every derivative.

    Raises:
        ArgumentError: offsets that are not those of the diagonals, or one twice; a shape or rows of no matrix.

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
    told = list(offsets) if isinstance(offsets, Sequence) else [offsets]
    places = [place for place in map(integer, told) if place is not None]
    matrix = [size for size in map(integer, shape) if size is not None and size >= 0]
    if not len(shape) == len(matrix) == 2:
        call.fail(
            "shape is that of no matrix",
            expected="two numbers of 0 or more, rows and columns of the whole",
            got=f"shape={shape!r}",
            remedy="pass (rows, columns)",
        )
    parts = balanced(shape[0], call.axis.size) if rows is None else tuple(rows)
    if diagonals.dim() != 2 or not len(set(places)) == len(told) == len(diagonals) > 0:
        call.fail(
            "there is not one offset for each diagonal",
            expected="diagonals (k, columns) or (columns,), k of 1 or more, and as many offsets, none of them twice",
            got=f"diagonals {list(diagonals.shape)}, offsets {told}",
            remedy="pass as many offsets",
        )
    if len(parts) != call.axis.size or sum(parts) != shape[0] or min(parts) < 0:
        call.fail(
            "rows is no cut of the matrix",
            expected=f"{call.axis.size} numbers with the sum {shape[0]}",
            got=f"rows={rows!r}",
            remedy="leave it out for an even cut",
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
    for number, place in enumerate(places):  # what stands in own rows is one run of each diagonal
        low = min(max(begin, first + place), end)
        high = max(min(end, first + parts[rank] + place), low)
        columns_of.append(torch.arange(low, high, device=near.device))
        rows_of.append(columns_of[-1] - (place + first))
        # As columns: to an empty part of one dim cat hands a constant for a gradient.
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
    """How much of a range of a tensor that is cut over ranks each rank has.

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
    """This rank's part of a range of a tensor that is cut over ranks, in memory of its own: `Tensor.narrow_copy`.

    ::

        V -> V    own part (n_r, ...) -> its rows among start ... start + length - 1 of the whole; nothing is sent

    Args:
        x: own part, strided or sparse COO; of a sparse one the result is coalesced.
        dim: the dim that is cut.
        start: of the range, counted in the whole tensor; negative: from its end.
        length: of the range.
        axis: the ranks.
        sizes: each rank's size along `dim`; as in `gradmesh.all_gather`.

    Returns:
        The own part, empty where the range lies elsewhere: `narrowed_sizes` tells each rank's.

    Raises:
        ShapeError: the range is not in the whole tensor.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(3) + 3 * gm.rank()
        ...     return gm.nn.fields.narrow_copy(x, 0, 2, 3).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[2], [3, 4]]
    """
    verb = "nn.fields.narrow_copy"
    sparse = isinstance(x, Tensor) and x.layout is torch.sparse_coo
    # Only its shape is needed here.
    shaped = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if sparse else x
    cut: Cut = cut_of(verb, shaped, axis, dim, sizes)
    begin, rows = integer(start), integer(length)
    if begin is not None and begin < 0:
        begin += cut.total
    if begin is None or rows is None or not 0 <= begin <= begin + rows <= cut.total:
        Call(verb, shaped, axis).fail(
            "the range is not in the tensor",
            expected=f"0 <= start <= start + length <= {cut.total}",
            got=f"start={start!r}, length={length!r}",
            remedy="count in the whole tensor, on all ranks",
            kind=ShapeError,
        )
    own = narrowed_sizes(cut.sizes, begin, rows)[cut.axis.rank]
    first = max(begin - cut.spans[cut.axis.rank][0], 0) if own else 0
    if sparse:
        return _narrowed_sparse(x.coalesce(), cut.dim, first, own)
    return x.narrow(cut.dim, first, own).clone(memory_format=torch.contiguous_format)


def _narrowed_sparse(x: Tensor, dim: int, first: int, length: int) -> Tensor:
    """The same of a coalesced tensor, of which torch's own narrow_copy has no gradient."""
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
