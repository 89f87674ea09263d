"""Losses of paired embeddings, such as images and texts: `clip_loss` and `siglip_loss`."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.nn.contrastive.inputs import Gather, LossInputs, Number
from gradmesh.nn.contrastive.kernels import ExpBoth, Sigmoid
from gradmesh.nn.plain import upcast
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import Convention, I
from gradmesh.verbs.call import SizesLike

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
    # Scale n rows once, not every tile.
    a = upcast(left) * factor
    of_rows, of_cols, _ = table.logs(ExpBoth(), (a,), (table.spread(right),), columns=True)
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
    a = upcast(left) * factor
    offset = torch.as_tensor(offset, dtype=a.dtype, device=a.device)
    # softplus(-s) == softplus(s) - s
    (total,) = table.total(Sigmoid(), (a, table.spread(right), offset))
    return given.mean(total - ((a * upcast(right)).sum(1) + offset).sum())
