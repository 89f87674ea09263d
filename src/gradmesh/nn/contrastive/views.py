"""Losses of several views of each sample, from one encoder: `nt_xent_loss` and `sup_con_loss`."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.nn.contrastive.inputs import Gather, LossInputs, Number
from gradmesh.nn.contrastive.kernels import ExpLabelled, ExpOthers
from gradmesh.nn.plain import upcast
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import Convention, I
from gradmesh.verbs.call import SizesLike

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
        axis,
        sizes=sizes,
        dst=dst,
        gather=gather,
        tile=tile,
        dims=(2, 3),
        numbers={"temperature": temperature},
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
        given.fail(
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
        logs, _, _ = table.logs(ExpOthers(), (a, number), (columns, numbers), columns=False)
        with torch.autocast(z.device.type, enabled=False):
            of_sample = a.view(views.shape) @ upcast(views).mT
        itself = torch.eye(each, dtype=torch.bool, device=z.device)
        positives = torch.where(itself, 0, of_sample).sum(2).flatten()
        count = torch.full_like(number, each - 1)
    else:
        label = labels.long().repeat_interleave(each)
        logs, _, (positives, count) = table.logs(
            ExpLabelled(), (a, number, label), (columns, numbers, table.spread(label)), columns=False
        )
    share = torch.where(count > 0, logs - positives / count.clamp(min=1), 0).sum()
    return given.mean(share, given.total * each)


def _numbers(given: LossInputs, views: int, z: Tensor) -> Tensor:
    """The global indices of this rank's views."""
    each = given.sizes or (given.rows,) * given.axis.size
    first = given.axis.offset(each) * views
    return torch.arange(first, first + len(z), device=z.device)
