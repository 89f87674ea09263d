"""Losses of pairs of embeddings, one of each kind for a sample: `clip_loss` and `siglip_loss`."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.arguments import SizesLike
from gradmesh.axis import AxisLike
from gradmesh.nn.contrastive.inputs import Gather, LossInputs, Number
from gradmesh.nn.contrastive.kernels import ExpBoth, Sigmoid
from gradmesh.nn.contrastive.tiles import widened
from gradmesh.types import Convention, I

__all__ = ["clip_loss", "siglip_loss"]


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
    r"""The symmetric cross entropy of each pair against all others of the global batch.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     s_ij = scale * left_i . right_j, of the N samples of all ranks

            1/2N sum_i (log sum_j exp s_ij - s_ii) + 1/2N sum_j (log sum_i exp s_ij - s_jj)

    Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021, figure 3. The value is
    the mean over the global batch, the same on every rank. The gradient of a rank's embeddings is the whole one; what
    every rank has a copy of, such as the scale or an encoder's weights, gets this rank's share, and their sum over the
    ranks is the gradient.

    Args:
        left: this rank's embeddings of one kind, taken as they are: unit vectors come from `normalize(x, dim=-1)`.
        right: those of the other kind, a row for each of `left`'s.
        scale: the inverse temperature, not its logarithm: a float, or a tensor of one element.
        axis: the ranks, as in every verb.
        dst: `gm.I`: the loss counts once. `gm.R`: each rank's loss is a term of what is differentiated; for
            `gm.objective(loss, loss_type=gm.R, ddp=model)`, or a loss that ranks use differently.
        sizes: each rank's number of samples, 0 allowed; "auto": found by one small exchange; None: the same on every
            rank, which saves it.
        gather: "all": every rank has `right` of all ranks, N rows and as many of their gradient. "ring": they go round
            the ranks, N / W rows at a time, while the rank computes, and once more in backward.
        tile: how many rows and columns of s are in memory at once. A table of one tile is kept for backward; of more
            tiles none is kept, and backward computes them again. None: one tile where this rank's rows of s have at
            most 2^22 entries on a CPU, else 2^24 (16 and 64 MiB in float32); tiles of 1024 on a CPU, else 4096, where
            they have more.
        comm_dtype: the dtype that embeddings travel in.
        backward_dtype: the dtype that their gradients travel in.

    Returns:
        A scalar, of float32 where the embeddings are of less; products are taken and summed in that.

    Raises:
        ArgumentError: an argument that the loss does not take, or no sample on any rank.
        ShapeError: embeddings that do not fit each other.
        MismatchError: ranks that call different losses, or with other numbers of features; with sizes="auto", a scale
            that differs between ranks by more than 1 %.

    Example:
        >>> def on_each_rank():
        ...     x = torch.eye(3)[: 1 + gm.rank()].requires_grad_()  # 1 sample on rank 0, 2 on rank 1
        ...     loss = gm.nn.clip_loss(x, x.detach().clone(), 2.0)
        ...     loss.backward()
        ...     return round(loss.item(), 4), tuple(x.grad.shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(0.5856, (1, 3)), (0.5856, (2, 3))]
    """
    given = LossInputs(
        "nn.clip_loss",
        {"left": left, "right": right},
        axis,
        sizes=sizes,
        dst=dst,
        gather=gather,
        tile=tile,
        numbers={"scale": scale},
    )
    factor = given.numbers["scale"]
    table = given.layout(comm_dtype, backward_dtype)
    # Scaled where there are n rows, and not in every tile.
    a = widened(left) * factor
    everyone = table.spread(right)
    mine, theirs, _ = table.logs(ExpBoth(), (a,), (everyone,), columns=True)
    return given.mean((mine + theirs - 2 * (a * widened(right)).sum(1)).sum() / 2)


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
    r"""The binary cross entropy of every pair of the global batch: whether both are of one sample.

    ::

        V -> I (or R)    shapes (n, d), (n, d) -> ()     s_ij = scale * left_i . right_j + bias

            -1/N sum_ij log sigmoid(z_ij s_ij)     z = 1 for i = j, else -1

    Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023. Value and gradients as those of `clip_loss`.

    Args:
        left: this rank's embeddings of one kind, taken as they are.
        right: those of the other kind, a row for each of `left`'s.
        scale: the inverse temperature; the paper begins with 10.
        bias: the paper begins with -10.
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
    given = LossInputs(
        "nn.siglip_loss",
        {"left": left, "right": right},
        axis,
        sizes=sizes,
        dst=dst,
        gather=gather,
        tile=tile,
        numbers={"scale": scale, "bias": bias},
    )
    factor, offset = given.numbers["scale"], given.numbers["bias"]
    table = given.layout(comm_dtype, backward_dtype)
    a = widened(left) * factor
    offset = torch.as_tensor(offset, dtype=a.dtype, device=a.device)
    # softplus(-s) is softplus(s) - s.
    (total,) = table.total(Sigmoid(), (a, table.spread(right), offset))
    return given.mean(total - ((a * widened(right)).sum(1) + offset).sum())
