"""Losses of feature statistics of the global batch: `vic_reg_loss` and `barlow_twins_loss`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu

from gradmesh.errors import ArgumentError, message
from gradmesh.nn.contrastive.inputs import LossInputs
from gradmesh.nn.plain import upcast
from gradmesh.runtime.mesh import Axis, AxisLike, balanced
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import SizesLike
from gradmesh.verbs.collectives import all_reduce, reduce_scatter

__all__ = ["barlow_twins_loss", "vic_reg_loss"]


def vic_reg_loss(
    left: Tensor,
    right: Tensor,
    axis: AxisLike = None,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    eps: float = 1e-4,
    dst: Convention = I,
    sizes: SizesLike = "auto",
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""VICReg loss: two views close to each other, features of standard deviation 1 and without correlation.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     x, y of all N samples, C(z) their covariance over N - 1

            invariance * mean (x - y)^2
            + variance * (1/2d) sum_k relu(1 - sqrt(C(z)_kk + eps)), for z = x, and for z = y
            + covariance * (1/d) sum_{k != l} C(z)_kl^2, for z = x, and for z = y

    Source: Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning, 2022,
    with the factors of the authors' code, to which the default weights belong: the first term is a mean over features
    too, and the second is halved. Value and gradients are distributed as in `clip_loss`.

    Args:
        left: this rank's embeddings x of one view.
        right: this rank's embeddings y of the other view.
        axis: the ranks, as in every verb.
        invariance: weight of the first term.
        variance: weight of the second term.
        covariance: weight of the third term.
        eps: keeps the root's derivative finite.
        dst, sizes: as in `clip_loss`.
        comm_dtype, backward_dtype: the dtypes in which covariances and their gradients are sent.

    Raises:
        ArgumentError: fewer than 2 samples over all ranks; and as `clip_loss`.
        ShapeError, MismatchError: as `clip_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.vic_reg_loss(x, x + 1).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [37.5392, 37.5392]
    """
    given = LossInputs("nn.vic_reg_loss", {"left": left, "right": right}, axis, sizes=sizes, dst=dst)
    _check_total(given)
    x, y = upcast(left), upcast(right)
    features = x.shape[1]
    centred = torch.stack([x, y]) - _mean(torch.stack([x, y]), given)
    with torch.autocast(x.device.type, enabled=False):
        part = centred.mT @ centred / (given.total - 1)
    local, first = _local_rows(part, given.axis, comm_dtype, backward_dtype)
    diagonal = local.diagonal(first, 1, 2)
    spread = relu(1 - (diagonal + eps).sqrt()).sum() / (2 * features)
    correlated = (local.square().sum() - diagonal.square().sum()) / features
    close = (x - y).square().sum() / (given.total * features)
    return given.mean(invariance * close + variance * spread + covariance * correlated, 1)


def barlow_twins_loss(
    left: Tensor,
    right: Tensor,
    axis: AxisLike = None,
    *,
    off_diagonal: float = 0.0051,
    eps: float = 1e-5,
    dst: Convention = I,
    sizes: SizesLike = "auto",
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Barlow Twins loss: the cross-correlation of the features of two views should be the identity.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     C = 1/N sum_i u_i v_i^T of all N samples

            sum_k (1 - C_kk)^2 + off_diagonal * sum_{k != l} C_kl^2

        u: (x - mean) / sqrt(var + eps) of each feature of `left`, over N; v: the same of `right`

    Source: Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, 2021; features are
    normalized over the global batch, like the batch norm in the authors' code. Value and gradients are distributed as
    in `clip_loss`.

    Args:
        left: this rank's embeddings of one view.
        right: this rank's embeddings of the other view.
        axis: the ranks, as in every verb.
        off_diagonal: weight of the second term.
        eps: keeps a constant feature finite.
        dst, sizes: as in `clip_loss`.
        comm_dtype, backward_dtype: the dtypes in which correlations and their gradients are sent.

    Raises:
        ArgumentError: fewer than 2 samples over all ranks; and as `clip_loss`.
        ShapeError, MismatchError: as `clip_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.barlow_twins_loss(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.0068, 0.0068]
    """
    given = LossInputs("nn.barlow_twins_loss", {"left": left, "right": right}, axis, sizes=sizes, dst=dst)
    _check_total(given)
    both = torch.stack([upcast(left), upcast(right)])
    centred = both - _mean(both, given)
    u, v = (centred / (_mean(centred.square(), given) + eps).sqrt()).unbind()
    with torch.autocast(u.device.type, enabled=False):
        part = u.mT @ v / given.total
    local, first = _local_rows(part[None], given.axis, comm_dtype, backward_dtype)
    diagonal = local.diagonal(first, 1, 2)
    others = local.square().sum() - diagonal.square().sum()
    return given.mean((1 - diagonal).square().sum() + off_diagonal * others, 1)


def _mean(x: Tensor, given: LossInputs) -> Tensor:
    """The mean over the samples of all ranks."""
    return all_reduce(x.sum(1, keepdim=True) / given.total, given.axis, dst=R)


def _local_rows(
    part: Tensor, axis: Axis, comm_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
) -> tuple[Tensor, int]:
    """This rank's rows of the sum of the ranks' matrices, and the index of the first."""
    sizes = balanced(part.shape[1], axis.size)
    local = reduce_scatter(part, axis, 1, sizes=sizes, comm_dtype=comm_dtype, backward_dtype=backward_dtype)
    return local, axis.offset(sizes)


def _check_total(given: LossInputs) -> None:
    if given.total < 2:  # every rank raises
        raise ArgumentError(
            message(
                "cannot compute the variance of one sample",
                op=given.op,
                axis=str(given.axis),
                expected="at least 2 samples over all ranks",
                got="1 sample",
                remedy="skip this step on every rank",
            )
        )
