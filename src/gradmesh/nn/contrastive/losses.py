"""The losses, as functions and as modules with their learned parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from gradmesh.errors import ArgumentError
from gradmesh.nn.contrastive.table import (
    EXP_BOTH,
    EXP_LABELLED,
    EXP_OTHERS,
    SIGMOID,
    Gather,
    LossInputs,
    Number,
)
from gradmesh.nn.inputs import upcast
from gradmesh.ops.sizes import balanced
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import SizesLike
from gradmesh.verbs.collectives import all_reduce, reduce_scatter


def clip_loss(
    left: Tensor,
    right: Tensor,
    scale: Number,
    axis: AxisLike = None,
    *,
    dst: Convention = I,
    sizes: SizesLike = "auto",
    gather: Gather = "all",
    tile: int | None = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""CLIP loss: the symmetric cross entropy of each pair against all others of the global batch.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     s_ij = scale * left_i . right_j, of the N samples of all ranks

            1/2N sum_i (log sum_j exp s_ij - s_ii) + 1/2N sum_j (log sum_i exp s_ij - s_jj)

    Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021, figure 3. The
    value is the mean over the global batch, the same on every rank. The gradient of a rank's embeddings is complete;
    replicated tensors, such as the scale or an encoder's weights, get this rank's contribution, and the sum of these
    over the ranks is the gradient.

    Args:
        left: this rank's embeddings, used without normalization; for unit vectors, pass `normalize(x, dim=-1)`.
        right: the paired embeddings, one row for each row of `left`.
        scale: the inverse temperature, not its logarithm: a float, or a tensor of one element.
        axis: the ranks, as in every verb.
        dst: `gm.I`: the loss counts once. `gm.R`: the ranks' losses are summed; for
            `gm.objective(loss, loss_type=gm.R, ddp=model)`, or a loss that ranks use differently.
        sizes: each rank's number of samples, which may be 0, e.g. `sizes=(4, 3)`; "auto": exchanged; None: the same on
            every rank, without an exchange.
        gather: "all": every rank gathers `right` of all ranks, N rows, and as many gradients. "ring": they travel
            around the ring of ranks, N / W rows at a time, overlapped with compute, and again in backward.
        tile: number of rows and columns of s in memory at once. A table of one tile is saved for backward; with more
            tiles, backward recomputes them. None: one tile if this rank's rows of s have at most 2^22 entries on a CPU,
            2^24 elsewhere (16 and 64 MiB in float32); else tiles of 1024 on a CPU, 4096 elsewhere.
        comm_dtype: the dtype in which embeddings are sent.
        backward_dtype: the dtype in which their gradients are sent.

    Returns:
        A scalar, in float32 or, for float64 embeddings, in float64; products are computed and summed in that dtype.

    Raises:
        ArgumentError: an invalid argument, or no samples on any rank.
        ShapeError: `left` and `right` do not match.
        MismatchError: the ranks call different losses, or with different numbers of features; with sizes="auto", the
            scale differs between ranks by more than 1 %.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(3)[: 1 + gm.rank()].requires_grad_()  # 1 sample on rank 0, 2 on rank 1
        ...     loss = gm.nn.clip_loss(x, x.detach().clone(), 2.0)
        ...     loss.backward()
        ...     return round(loss.item(), 4), tuple(x.grad.shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(0.5856, (1, 3)), (0.5856, (2, 3))]
    """
    samples = {"left": left, "right": right}
    given = LossInputs("nn.clip_loss", samples, {"scale": scale}, axis, sizes, dst, gather, tile)
    factor = given.numbers["scale"]
    table = given.layout(comm_dtype, backward_dtype)
    # Scale n rows once, not every tile.
    a = upcast(left) * factor
    of_rows, of_cols, _ = table.logs(EXP_BOTH, (a,), (table.spread(right),), columns=True)
    return given.mean((of_rows + of_cols - 2 * (a * upcast(right)).sum(1)).sum() / 2)


def siglip_loss(
    left: Tensor,
    right: Tensor,
    scale: Number,
    bias: Number = 0.0,
    axis: AxisLike = None,
    *,
    dst: Convention = I,
    sizes: SizesLike = "auto",
    gather: Gather = "all",
    tile: int | None = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""SigLIP loss: the binary cross entropy of every pair of the global batch (same sample or not).

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     s_ij = scale * left_i . right_j + bias

            -1/N sum_ij log sigmoid(z_ij s_ij)     z = 1 for i = j, else -1

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023. Value and gradients are distributed as in
    `clip_loss`.

    Args:
        left: this rank's embeddings, used without normalization.
        right: the paired embeddings, one row for each row of `left`.
        scale: the inverse temperature; the paper starts with 10.
        bias: added to the scaled similarities; the paper starts with -10.
        axis, dst, sizes, gather, tile, comm_dtype, backward_dtype: as in `clip_loss`.

    Raises:
        ArgumentError, ShapeError, MismatchError: as `clip_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.siglip_loss(x, x, 10.0, -10.0).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.6933, 0.6933]
    """
    samples = {"left": left, "right": right}
    given = LossInputs(
        "nn.siglip_loss", samples, {"scale": scale, "bias": bias}, axis, sizes, dst, gather, tile
    )
    factor, offset = given.numbers["scale"], given.numbers["bias"]
    table = given.layout(comm_dtype, backward_dtype)
    a = upcast(left) * factor
    offset = offset.to(a) if isinstance(offset, Tensor) else a.new_full((), offset)
    # softplus(-s) == softplus(s) - s
    (total,) = table.total(SIGMOID, (a, table.spread(right), offset))
    return given.mean(total - ((a * upcast(right)).sum(1) + offset).sum())


def nt_xent_loss(
    left: Tensor,
    right: Tensor,
    temperature: Number = 0.5,
    axis: AxisLike = None,
    *,
    dst: Convention = I,
    sizes: SizesLike = "auto",
    gather: Gather = "all",
    tile: int | None = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""NT-Xent loss (SimCLR): the cross entropy of each view against all other views of the global batch.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     s_ij = z_i . z_j / temperature, of the 2N views z

            1/2N sum_i (log sum_{j != i} exp s_ij - s_ip)     p: the other view of i's sample

    Source: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, 2020, where the views
    are unit vectors; here they are not normalized. Value and gradients are distributed as in `clip_loss`.

    Args:
        left: this rank's embeddings of one view.
        right: this rank's embeddings of the other view, one row for each row of `left`.
        temperature: a float, or a tensor of one element.
        axis, dst, sizes, gather, tile, comm_dtype, backward_dtype: as in `clip_loss`.

    Raises:
        ArgumentError, ShapeError, MismatchError: as `clip_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.nt_xent_loss(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.5944, 0.5944]
    """
    samples = {"left": left, "right": right}
    given = LossInputs(
        "nn.nt_xent_loss", samples, {"temperature": temperature}, axis, sizes, dst, gather, tile
    )
    views = torch.stack([left, right], 1)
    return _loss(given, views, None, comm_dtype, backward_dtype)


def sup_con_loss(
    x: Tensor,
    labels: Tensor | None = None,
    temperature: Number = 0.07,
    axis: AxisLike = None,
    *,
    dst: Convention = I,
    sizes: SizesLike = "auto",
    gather: Gather = "all",
    tile: int | None = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""SupCon loss: the cross entropy of each view against all others, averaged over those of the same label.

    ::

        V -> I (or R)    shapes (n, d) or (n, v, d), (n,) -> ()     s_ij = z_i . z_j / temperature, of the v N views z

            1/(v N) sum_i 1/|P_i| sum_{p in P_i} (log sum_{j != i} exp s_ij - s_ip)     P_i: others of i's label

    Source: Khosla et al., Supervised Contrastive Learning, 2020, equation 2. A view without another view of its label
    counts in N and contributes 0. Value and gradients are distributed as in `clip_loss`.

    Args:
        x: this rank's embeddings, not normalized; with several views, shape (n, v, d), v the same on every rank.
        labels: integers, one for each sample. None (on every rank): each sample has a distinct label.
        temperature: a float, or a tensor of one element.
        axis, dst, sizes, gather, tile, comm_dtype, backward_dtype: as in `clip_loss`.

    Raises:
        ArgumentError: `labels` is not an integer tensor with one label for each sample; and as `clip_loss`.
        ShapeError, MismatchError: as `clip_loss`; and labels on some ranks only.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(3)[: 1 + gm.rank()]
        ...     return round(gm.nn.sup_con_loss(x, torch.tensor([7, 8])[: 1 + gm.rank()], 1.0).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.2088, 0.2088]
    """
    given = LossInputs(
        "nn.sup_con_loss",
        {"x": x},
        {"temperature": temperature},
        axis,
        sizes,
        dst,
        gather,
        tile,
        dims=(2, 3),
        extra=f", {'without' if labels is None else 'with'} labels",
    )
    if labels is not None and (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.shape != x.shape[:1]
        or labels.device != x.device
    ):
        is_tensor = isinstance(labels, Tensor)
        given.call.fail(
            "labels does not have one integer for each sample",
            expected=f"an integer tensor of shape [{x.shape[0]}] on {x.device}",
            got=f"{labels.dtype} of shape {list(labels.shape)} on {labels.device}"
            if is_tensor
            else type(labels).__name__,
            remedy="pass e.g. labels=torch.tensor([0, 1, 1]) for 3 samples; convert class ids with .long()",
        )
    views = x if x.dim() == 3 else x.unsqueeze(1)
    return _loss(given, views, labels, comm_dtype, backward_dtype)


def _loss(
    given: LossInputs,
    views: Tensor,
    labels: Tensor | None,
    comm_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Tensor:
    """The loss of views of shape (n, v, d)."""
    each = views.shape[1]
    table = given.layout(comm_dtype, backward_dtype, each)
    z = views.flatten(0, 1)
    a = upcast(z) / given.numbers["temperature"]
    number = _numbers(given, each, z)
    columns, numbers = table.spread(z), table.spread(number)
    if labels is None:
        # Only views of the same sample are positives, and these are local.
        logs, _, _ = table.logs(EXP_OTHERS, (a, number), (columns, numbers), columns=False)
        with torch.autocast(z.device.type, enabled=False):
            of_sample = a.view(views.shape) @ upcast(views).mT
        itself = torch.eye(each, dtype=torch.bool, device=z.device)
        positives = torch.where(itself, 0, of_sample).sum(2).flatten()
        count = torch.full_like(number, each - 1)
    else:
        label = labels.long().repeat_interleave(each)
        logs, _, (positives, count) = table.logs(
            EXP_LABELLED, (a, number, label), (columns, numbers, table.spread(label)), columns=False
        )
    share = torch.where(count > 0, logs - positives / count.clamp(min=1), 0).sum()
    return given.mean(share, given.total * each)


def _numbers(given: LossInputs, views: int, z: Tensor) -> Tensor:
    """The global indices of this rank's views."""
    each = given.sizes or (given.rows,) * given.axis.size
    first = given.axis.offset(each) * views
    return torch.arange(first, first + len(z), device=z.device)


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
    given = LossInputs("nn.vic_reg_loss", {"left": left, "right": right}, {}, axis, sizes, dst)
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
    given = LossInputs("nn.barlow_twins_loss", {"left": left, "right": right}, {}, axis, sizes, dst)
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
        raise ArgumentError.of(
            "cannot compute the variance of one sample",
            op=given.op,
            axis=str(given.axis),
            expected="at least 2 samples over all ranks",
            got="1 sample",
            remedy="skip this step on every rank",
        )


class _Loss(nn.Module):
    """A loss with the options of its function."""

    def __init__(self, axis: AxisLike = None, **options: Any) -> None:
        super().__init__()
        self.options = {"axis": axis, **options}

    def extra_repr(self) -> str:
        """The options that are not None."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)

    def _hold(self, name: str, value: float, learnable: bool) -> None:
        """Register a number with shape (1,): wrappers that shard parameters reject 0-dim ones."""
        number = torch.tensor([value])
        if learnable:
            self.register_parameter(name, nn.Parameter(number))
        else:
            self.register_buffer(name, number)


class _ScaledLoss(_Loss):
    """A loss with a scale of the similarities, stored as its logarithm."""

    log_scale: Tensor

    def __init__(
        self, scale: float, max_scale: float, axis: AxisLike, learnable: bool, options: dict[str, Any]
    ) -> None:
        super().__init__(axis, **options)
        self._largest = math.log(max_scale)
        self._hold("log_scale", math.log(scale), learnable)

    @property
    def scale(self) -> Tensor:
        """The scale, a tensor of one element."""
        return self.log_scale.exp()

    def _bounded(self) -> Tensor:
        """The scale; in training a learned one is first clamped to `max_scale`."""
        if not (self.training and self.log_scale.requires_grad):
            return self.scale
        if not self.log_scale.is_leaf:  # a view of a wrapper's gathered buffer, which must not be written
            return (self.log_scale - (self.log_scale.detach() - self._largest).clamp(min=0)).exp()
        with torch.no_grad():
            self.log_scale.clamp_(max=self._largest)
        return self.scale


class ClipLoss(_ScaledLoss):
    """`gradmesh.nn.clip_loss` with a learned scale.

    Args:
        scale: the initial inverse temperature.
        axis: the ranks.
        learnable: True makes it a parameter, `log_scale`; put the loss into the module that DDP or FSDP wraps.
        max_scale: upper bound in training, as in the paper. The parameter is clamped; if FSDP shards it, only the value
            in use is.
        options: as in `clip_loss`.

    Example:
        >>> def on_each_rank():
        ...     loss = gm.nn.ClipLoss(sizes=None)
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(loss.scale.item(), 2), round(loss(x, x).item(), 6)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(14.29, 2e-06), (14.29, 2e-06)]
    """

    def __init__(
        self,
        scale: float = 1 / 0.07,
        axis: AxisLike = None,
        *,
        learnable: bool = True,
        max_scale: float = 100.0,
        **options: Any,
    ) -> None:
        super().__init__(scale, max_scale, axis, learnable, options)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings."""
        return clip_loss(left, right, self._bounded(), **self.options)


class SigLipLoss(_ScaledLoss):
    """`gradmesh.nn.siglip_loss` with a learned scale and bias.

    Args:
        scale: the initial inverse temperature.
        bias: the initial value that is added to the scaled similarities.
        axis: the ranks.
        learnable: True makes them parameters, `log_scale` and `bias`; put the loss into the module that DDP or FSDP
            wraps.
        max_scale: upper bound of the scale in training.
        options: as in `siglip_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.SigLipLoss()(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.6933, 0.6933]
    """

    bias: Tensor

    def __init__(
        self,
        scale: float = 10.0,
        bias: float = -10.0,
        axis: AxisLike = None,
        *,
        learnable: bool = True,
        max_scale: float = math.inf,
        **options: Any,
    ) -> None:
        super().__init__(scale, max_scale, axis, learnable, options)
        self._hold("bias", bias, learnable)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings."""
        return siglip_loss(left, right, self._bounded(), self.bias, **self.options)


class NTXentLoss(_ScaledLoss):
    """`gradmesh.nn.nt_xent_loss`.

    Args:
        temperature: the initial temperature.
        axis: the ranks.
        learnable: True makes it a parameter, `log_scale` = -log(temperature).
        options: as in `nt_xent_loss`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.NTXentLoss()(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.5944, 0.5944]
    """

    def __init__(
        self, temperature: float = 0.5, axis: AxisLike = None, *, learnable: bool = False, **options: Any
    ) -> None:
        super().__init__(1 / temperature, math.inf, axis, learnable, options)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings of the two views."""
        return nt_xent_loss(left, right, 1 / self._bounded(), **self.options)


class SupConLoss(_ScaledLoss):
    """`gradmesh.nn.sup_con_loss`.

    Args:
        temperature: the initial temperature.
        axis: the ranks.
        learnable: True makes it a parameter, `log_scale` = -log(temperature).
        options: as in `sup_con_loss`.

    Example:
        >>> def on_each_rank():
        ...     x, labels = torch.eye(4)[2 * gm.rank() :][:2], torch.tensor([0, 1])
        ...     return round(gm.nn.SupConLoss(1.0)(x, labels).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0986, 1.0986]
    """

    def __init__(
        self, temperature: float = 0.07, axis: AxisLike = None, *, learnable: bool = False, **options: Any
    ) -> None:
        super().__init__(1 / temperature, math.inf, axis, learnable, options)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss; `x` and `labels` are this rank's embeddings and labels."""
        return sup_con_loss(x, labels, 1 / self._bounded(), **self.options)


class VicRegLoss(_Loss):
    """`gradmesh.nn.vic_reg_loss` as a module; `options` are its arguments.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.VicRegLoss(invariance=1.0)(x, x + 1).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [13.5392, 13.5392]
    """

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings of the two views."""
        return vic_reg_loss(left, right, **self.options)


class BarlowTwinsLoss(_Loss):
    """`gradmesh.nn.barlow_twins_loss` as a module; `options` are its arguments.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(4)[2 * gm.rank() :][:2]
        ...     return round(gm.nn.BarlowTwinsLoss(off_diagonal=1.0)(x, x).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.3332, 1.3332]
    """

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The loss; `left` and `right` are this rank's embeddings of the two views."""
        return barlow_twins_loss(left, right, **self.options)
