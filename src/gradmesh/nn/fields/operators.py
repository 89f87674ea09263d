"""Operators that need other ranks' data: inverses, sparse diagonals, slices, spectral normalization, cross entropy."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from torch.nn.utils import parametrize

from gradmesh.errors import ShapeError
from gradmesh.nn.clipping import mark_sharded
from gradmesh.nn.fields.halo import Cut, cut_of, window
from gradmesh.nn.inputs import HALVES, upcast
from gradmesh.ops.sizes import balanced, intervals
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import all_gather, all_reduce, sizes


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
    return tuple(max(min(end, start + length) - max(begin, start), 0) for begin, end in intervals(sizes))


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


class SpectralNorm(nn.Module):
    """The parametrization that `spectral_norm` registers; like torch's, for a sharded weight.

    Attributes:
        u, v: the estimates of the singular vectors; the one along the sharded dim is sharded. In a state dict they have
            torch's names, `_u` and `_v`.
    """

    _u: Tensor
    _v: Tensor

    def __init__(
        self,
        weight: Tensor,
        axis: AxisLike,
        n_power_iterations: int,
        eps: float,
        dim: int,
        cut: Literal["rows", "columns"],
    ) -> None:
        super().__init__()
        self.over, self.n_power_iterations, self.eps = axis, n_power_iterations, eps
        self.first, self.cut = dim, cut
        here, local = resolve(axis, "nn.fields.spectral_norm"), self._matrix(weight.detach())
        both, cut_dim = list(local.shape), 0 if cut == "rows" else 1
        self._each = each = tuple(sizes(local, here, cut_dim))
        both[cut_dim] = sum(each)
        # Draw full vectors, like torch: with equal seeds, the estimates are those of a single process.
        drawn = [normalize(local.new_empty(size).normal_(0, 1), dim=0, eps=eps) for size in both]
        drawn[cut_dim] = drawn[cut_dim][here.slice(each)]
        self.register_buffer("_u", drawn[0])
        self.register_buffer("_v", drawn[1])
        with torch.no_grad():
            self._iterate(local, here, 15)

    @property
    def u(self) -> Tensor:
        """The estimate of the left singular vector."""
        return self._u

    @u.setter
    def u(self, value: Tensor) -> None:
        self._u = value

    @property
    def v(self) -> Tensor:
        """The estimate of the right singular vector."""
        return self._v

    @v.setter
    def v(self, value: Tensor) -> None:
        self._v = value

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.first, 0).flatten(1)

    def _iterate(self, local: Tensor, here: Axis, times: int) -> None:
        for _ in range(times):
            self._u = self._unit(self._times(local, self._v, here, "columns"), here, "rows")
            self._v = self._unit(self._times(local.mH, self._u, here, "rows"), here, "columns")

    def _times(self, local: Tensor, vector: Tensor, here: Axis, summed: str) -> Tensor:
        made = local @ vector
        return all_reduce(made, here, dst=R) if self.cut == summed else made

    def _unit(self, vector: Tensor, here: Axis, dim: str) -> Tensor:
        if self.cut != dim:
            return normalize(vector, dim=0, eps=self.eps)
        squares = all_reduce((vector.abs() ** 2).sum(), here, dst=R)
        return vector / squares.sqrt().clamp_min(self.eps)

    def forward(self, weight: Tensor) -> Tensor:
        """The local shard of the weight, divided by the full weight's spectral norm."""
        here, local = resolve(self.over, "nn.fields.spectral_norm"), self._matrix(weight)
        if self.training:
            with torch.no_grad():
                self._iterate(local.detach(), here, self.n_power_iterations)
        u, v = self._u.clone(), self._v.clone()
        norm = all_reduce(torch.vdot(u, local @ v), here, dst=R)
        return weight / norm

    def _take(self, name: str, state: MutableMapping[str, Any], prefix: str) -> None:
        """Convert a state dict that is about to be loaded, in place.

        Keys may be those of torch's parametrization or of `torch.nn.utils.spectral_norm` (`weight_orig`, `weight_u`,
        `weight_v`); a full weight and full vectors are sharded.
        """
        keys = f"{prefix}parametrizations.{name}."
        older = {f"{prefix}{name}_orig": "original"}
        older |= {f"{prefix}{name}_{each}": f"0._{each}" for each in "uv"}
        older |= {f"{keys}0.{each}": f"0._{each}" for each in "uv"}
        for old, new in older.items():
            if old in state and keys + new not in state:
                state[keys + new] = state.pop(old)
        here, cut_dim = resolve(self.over, "nn.fields.spectral_norm"), 0 if self.cut == "rows" else 1
        # Columns are all other dims flattened, the first of which is sharded.
        dim = self.first if self.cut == "rows" else int(self.first == 0)
        span = here.slice(self._each)
        vector = keys + ("0._u" if self.cut == "rows" else "0._v")
        known = state.get(vector)
        if isinstance(known, Tensor) and known.shape[:1] == (sum(self._each),):
            state[vector] = known[span]
        weight = state.get(f"{keys}original")
        if here.size > 1 and isinstance(weight, Tensor) and weight.dim() > max(dim, self.first):
            whole = self._matrix(weight)
            if whole.shape[cut_dim] == sum(self._each):
                inner = whole.shape[cut_dim] // weight.shape[dim]
                part = weight.narrow(dim, span.start // inner, (span.stop - span.start) // inner)
                state[f"{keys}original"] = part

    def right_inverse(self, value: Tensor) -> Tensor:
        """The assigned weight, unchanged."""
        return value


@dataclass
class _LoadHook:
    """A load_state_dict pre-hook; an object, so that deepcopy of the module copies its reference to the norm."""

    norm: SpectralNorm
    name: str

    def __call__(self, _: nn.Module, state: MutableMapping[str, Any], prefix: str, *__: Any) -> None:
        self.norm._take(self.name, state, prefix)


def spectral_norm(
    module: nn.Module,
    name: str = "weight",
    axis: AxisLike = None,
    *,
    n_power_iterations: int = 1,
    eps: float = 1e-12,
    dim: int | None = None,
    cut: Literal["rows", "columns"] = "rows",
) -> nn.Module:
    """Spectral normalization of a sharded weight: divide it by the largest singular value of the full weight.

    ::

        V -> V    local shard of W -> local shard of W / (u W v)
                  forward: a power iteration with products and norms summed over the ranks, and the sum u W v
                  backward: the gradient of the norm is summed over the ranks

    Values and gradients are those of `torch.nn.utils.parametrizations.spectral_norm` of the full weight; u and v are
    constants, as there.

    Args:
        module: holds the local shard, for example `gm.nn.ColumnParallelLinear` (rows) or `RowParallelLinear` (columns).
        name: of the parameter.
        axis: the ranks.
        n_power_iterations: for each call in training, at least 1.
        eps: lower bound of norms.
        dim: the dim of the weight that is the matrix rows; the others are flattened to columns. None: as in torch, 1
            for transposed convolutions and 0 otherwise.
        cut: "rows" or "columns", whichever are sharded. Columns must be sharded along the first dim that is not `dim`.

    Returns:
        The module; the parametrization is registered, and its parameter counts as a shard in `gm.nn.clip_grad_norm_`.
        `load_state_dict` accepts the module's state dict, and that of the full weight with
        `torch.nn.utils.parametrizations.spectral_norm` or `torch.nn.utils.spectral_norm`, of which each rank takes its
        shard.

    Raises:
        ArgumentError: a 1-d weight, `n_power_iterations` < 1, or unknown `cut`.

    Source: Miyato et al., Spectral normalization for generative adversarial networks (arXiv:1802.05957), algorithm 1.

    Example:
        >>> def on_each_rank():
        ...     layer = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(layer.weight, (3.0, 4.0)[gm.rank()])  # full weight (3, 4), norm 5
        ...     gm.nn.fields.spectral_norm(layer)
        ...     return round(layer.weight.item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.6, 0.8]
    """
    weight: Any = getattr(module, name, None)
    call = Call("nn.fields.spectral_norm", weight, axis)
    call.choose("cut", cut, {"rows": 0, "columns": 0})
    if weight.dim() < 2:
        call.fail(
            "the weight has fewer than 2 dims",
            expected="a weight with at least 2 dims",
            got=f"shape {list(weight.shape)}",
            remedy='pass the name of a matrix, e.g. name="weight" of a linear layer',
        )
    if (integer(n_power_iterations) or 0) < 1:
        call.fail(
            "n_power_iterations must be a positive int",
            expected="e.g. n_power_iterations=1",
            got=f"n_power_iterations={n_power_iterations!r}",
            remedy="omit it for 1; to run no iterations, call module.eval()",
        )
    if dim is None:
        dim = int(isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d))
    here = SpectralNorm(
        weight, axis, n_power_iterations, eps, call.dim(dim) if call.x is weight else dim, cut
    )
    parametrize.register_parametrization(module, name, here)
    module.register_load_state_dict_pre_hook(_LoadHook(here, name))
    mark_sharded(module.parametrizations[name].original, axis)  # type: ignore[index,union-attr]  # of torch's list
    return module


def bce_with_logits(
    logits: Tensor,
    target: Tensor,
    axis: AxisLike = None,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    dst: Convention = I,
) -> Tensor:
    """Binary cross entropy of sharded logits; the mean is over the elements of all ranks.

    ::

        V -> I    local logits (n_r, ...) -> ()   the sum over all ranks, divided by the elements on all ranks
                  backward: the gradient of the local logits
        V -> V    with reduction="none": (n_r, ...) -> (n_r, ...), the losses of the local elements; sends nothing

    If ranks have different numbers of elements, this is not the mean of per-rank means. Shards may be empty.

    Args:
        logits: the local rows; or all rows of the local classes.
        target: of the same shape.
        axis: the ranks.
        weight, pos_weight: as in `torch.nn.BCEWithLogitsLoss`. They are broadcast to the local logits: if classes are
            sharded, pass those of the local classes.
        reduction: "mean", "sum" or "none".
        dst: the type of the mean or sum: `gm.I`, a loss that counts once; `gm.R` for a wrapper that averages, see
            `docs/objective.md`.

    Raises:
        ArgumentError: shapes do not match; unknown `reduction`.

    Example:
        >>> def on_each_rank():
        ...     logits = torch.zeros(1 + gm.rank(), requires_grad=True)
        ...     loss = gm.nn.fields.bce_with_logits(logits, torch.ones(1 + gm.rank()), pos_weight=torch.tensor(3.0))
        ...     loss.backward()
        ...     return round(loss.item(), 4), logits.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(2.0794, [-0.5]), (2.0794, [-0.5, -0.5])]
    """
    call = Call("nn.fields.bce_with_logits", logits, axis)
    call.choose("reduction", reduction, {"mean": 0, "sum": 0, "none": 0})
    shapes = [tuple(given.shape) for given in (weight, pos_weight) if given is not None]
    if target.shape != logits.shape or not all(_broadcasts(shape, logits.shape) for shape in shapes):
        call.fail(
            "the shapes of target or weights do not match the logits",
            expected=f"target of shape {list(logits.shape)}, and weights that broadcast to it",
            got=f"target {list(target.shape)}, weights {shapes}",
            remedy="pass the target and weights of this rank's logits, e.g. target[gm.axis().slice(n)]",
        )
    own = binary_cross_entropy_with_logits(
        upcast(logits),
        upcast(target),
        None if weight is None else upcast(weight),
        reduction="none" if reduction == "none" else "sum",
        pos_weight=None if pos_weight is None else upcast(pos_weight),
    )
    if reduction == "none":
        return own.to(logits.dtype)
    total = all_reduce(own, call.axis, dst=dst)
    if reduction == "mean":
        total = total / all_reduce(torch.full_like(total, logits.numel()).detach(), call.axis, dst=I)
    return total.to(logits.dtype) if logits.dtype in HALVES else total


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in pairs)


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """`bce_with_logits` as a module, like `torch.nn.BCEWithLogitsLoss`.

    Example:
        >>> def on_each_rank():
        ...     loss = gm.nn.fields.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0]))
        ...     return round(loss(torch.zeros(gm.rank(), 2), torch.ones(gm.rank(), 2)).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0397, 1.0397]
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        pos_weight: Tensor | None = None,
        axis: AxisLike = None,
        *,
        dst: Convention = I,
    ) -> None:
        super().__init__(weight, reduction=reduction, pos_weight=pos_weight)
        self.over, self.dst = axis, dst

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """The loss of all rows."""
        return bce_with_logits(
            input,
            target,
            self.over,
            weight=self.weight,
            pos_weight=self.pos_weight,
            reduction=self.reduction,  # type: ignore[arg-type]
            dst=self.dst,
        )
