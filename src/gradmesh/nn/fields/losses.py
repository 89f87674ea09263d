"""Binary cross entropy of sharded logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import Convention, I
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import all_reduce

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
    # Half precision sums and counts would overflow.
    return x.float() if x.dtype in _HALVES else x


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
