"""Losses of several views of each sample, all of one encoder: `nt_xent_loss` and `sup_con_loss`."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from gradmesh.arguments import SizesLike
from gradmesh.axis import AxisLike
from gradmesh.nn.contrastive.inputs import Gather, LossInputs, Number
from gradmesh.nn.contrastive.kernels import ExpLabelled, ExpOthers
from gradmesh.nn.contrastive.tiles import widened
from gradmesh.types import Convention, I

__all__ = ["nt_xent_loss", "sup_con_loss"]


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
    r"""The cross entropy of each view of a sample against all other views of the global batch.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     s_ij = z_i . z_j / temperature, of the 2N views z

            1/2N sum_i (log sum_{j != i} exp s_ij - s_ip)     p: the other view of i's sample

    Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, 2020, where the views are unit
    vectors; here they are taken as they are. Value and gradients as those of `clip_loss`.

    Args:
        left: this rank's embeddings of one view.
        right: those of the other view, a row for each of `left`'s.
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
    given = LossInputs(
        "nn.nt_xent_loss",
        {"left": left, "right": right},
        axis,
        sizes=sizes,
        dst=dst,
        gather=gather,
        tile=tile,
        numbers={"temperature": temperature},
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
    r"""The cross entropy of each view against all others of the global batch, for the mean of those of its label.

    ::

        V -> I (or R)    shapes (n, d) or (n, v, d), (n,) -> ()     s_ij = z_i . z_j / temperature, of the v N views z

            1/(v N) sum_i 1/|P_i| sum_{p in P_i} (log sum_{j != i} exp s_ij - s_ip)     P_i: others of i's label

    Khosla et al., Supervised Contrastive Learning, 2020, equation 2. A view of whose label there is no other counts in
    N and adds nothing. Value and gradients as those of `clip_loss`.

    Args:
        x: this rank's embeddings, taken as they are; with several views, shape (n, v, d), v the same on every rank.
        labels: whole numbers, one for each sample. None, on every rank: each sample has one of its own.
        temperature: a float, or a tensor of one element.
        axis, dst, sizes, gather, tile, comm_dtype, backward_dtype: as in `clip_loss`.

    Raises:
        ArgumentError: labels that are no whole numbers, or not one for each sample; and as `clip_loss`.
        ShapeError, MismatchError: as `clip_loss`; and labels on some ranks alone.

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
        axis,
        sizes=sizes,
        dst=dst,
        gather=gather,
        tile=tile,
        dims=(2, 3),
        numbers={"temperature": temperature},
        said=f", {'without' if labels is None else 'with'} labels",
    )
    if labels is not None and (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.shape != x.shape[:1]
        or labels.device != x.device
    ):
        is_tensor = isinstance(labels, Tensor)
        given.fail(
            "there is not one label for each sample",
            expected=f"{x.shape[0]} whole numbers on {x.device}",
            got=f"{labels.dtype} of shape {list(labels.shape)} on {labels.device}"
            if is_tensor
            else type(labels).__name__,
            remedy="pass a tensor of shape (samples,)",
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
    a = widened(z) / given.numbers["temperature"]
    number = _numbers(given, each, z)
    everyone, numbers = table.spread(z), table.spread(number)
    if labels is None:
        # Only the views of one sample are alike, which are all here.
        logs, _, _ = table.logs(ExpOthers(), (a, number), (everyone, numbers), columns=False)
        with torch.autocast(z.device.type, enabled=False):
            of_sample = a.view(views.shape) @ widened(views).mT
        itself = torch.eye(each, dtype=torch.bool, device=z.device)
        alike = torch.where(itself, 0, of_sample).sum(2).flatten()
        count = torch.full_like(number, each - 1)
    else:
        label = labels.long().repeat_interleave(each)
        logs, _, (alike, count) = table.logs(
            ExpLabelled(), (a, number, label), (everyone, numbers, table.spread(label)), columns=False
        )
    share = torch.where(count > 0, logs - alike / count.clamp(min=1), 0).sum()
    return given.mean(share, given.total * each)


def _numbers(given: LossInputs, views: int, z: Tensor) -> Tensor:
    """A number for each of this rank's views, among all."""
    each = given.sizes or (given.rows,) * given.axis.size
    begin = list(accumulate(each, initial=0))[given.axis.rank] * views
    return torch.arange(begin, begin + len(z), device=z.device)
