"""Binary cross entropy over all ranks' rows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gradmesh.arguments import Call
from gradmesh.axis import AxisLike
from gradmesh.collectives import all_reduce
from gradmesh.types import Convention, I

__all__ = ["BCEWithLogitsLoss", "bce_with_logits"]

_HALVES = (torch.float16, torch.bfloat16)


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
    """The binary cross entropy of logits that are cut over ranks, uneven and empty: one mean over all of them.

    ::

        V -> I    own logits (n_r, ...) -> ()     the sum over all ranks, divided by the elements on all ranks
                  backward: each rank its own logits'
        V -> V    with reduction="none": (n_r, ...) -> (n_r, ...), the losses of the local elements; nothing is sent

    A mean of the ranks' means is another number where they have unequal numbers of rows.

    Args:
        logits: own rows; or all rows of own classes.
        target: of their shape.
        axis: the ranks.
        weight, pos_weight: as in `torch.nn.BCEWithLogitsLoss`. They are broadcast to the own logits: where classes are
            cut, pass those of the own classes.
        reduction: "mean", "sum" or "none".
        dst: of the mean or sum: `gm.I`, a loss that counts once; `gm.R` for a wrapper that averages, see
            `docs/objective.md`.

    Raises:
        ArgumentError: shapes that do not fit; another reduction.

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
            "the target or a weight is not of the logits' shape",
            expected=f"a target of shape {list(logits.shape)}, and weights that broadcast to it",
            got=f"target {list(target.shape)}, weights {shapes}",
            remedy="pass those of this rank's own logits",
        )
    own = binary_cross_entropy_with_logits(
        _full(logits),
        _full(target),
        None if weight is None else _full(weight),
        reduction="none" if reduction == "none" else "sum",
        pos_weight=None if pos_weight is None else _full(pos_weight),
    )
    if reduction == "none":
        return own.to(logits.dtype)
    total = all_reduce(own, call.axis, dst=dst)
    if reduction == "mean":
        total = total / all_reduce(total.new_tensor(float(logits.numel())).detach(), call.axis, dst=I)
    return total.to(logits.dtype) if logits.dtype in _HALVES else total


def _full(x: Tensor) -> Tensor:
    # A sum of halves, and a count of them, would overflow.
    return x.float() if x.dtype in _HALVES else x


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in pairs)


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """`bce_with_logits` as `torch.nn.BCEWithLogitsLoss` over all ranks' rows; `axis` and `dst` as there.

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
