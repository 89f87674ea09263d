"""Loss scaling: the factor of a rank's loss under averaging, accumulation and uneven batches.

The law of the ops makes backward the gradient of the sum of the ranks' losses. What is meant is mostly a mean, over
samples that the ranks have in different numbers, and wrappers such as DDP divide by the number of ranks once more.
`objective` scales this rank's term so that what an optimizer sees at the end is the gradient of the declared loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from gradmesh._torch import LastPass, transforms_active
from gradmesh.averaging import averaging
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.checking import FULL, check_level
from gradmesh.collectives import all_gather
from gradmesh.errors import ArgumentError, MismatchError, message
from gradmesh.state import ACTIVE_TRACERS, rank_state
from gradmesh.structure import Packed
from gradmesh.transport import compiling
from gradmesh.transport.values import ReplicatedLossPass
from gradmesh.types import I, R, Type, V
from gradmesh.withdrawal import withdraw

__all__ = ["objective"]

Number = int | float | Tensor


def objective(
    loss: Tensor,
    axis: AxisLike = None,
    reduction: Literal["mean", "sum"] = "mean",
    loss_type: Type = V,
    weights: Number | None = None,
    ddp: bool | float | nn.Module = False,
    *,
    local: Literal["mean", "sum"] = "mean",
    total: Number | None = None,
    steps: int = 1,
) -> Tensor:
    r"""Declare the loss of all ranks: the returned scalar has its value, and backward leaves its gradient.

    ::

        V -> I    shape () -> ()    L = sum_r n_r l_r / sum_r n_r       value: L on every rank
                                    gradient: that of (n_r / sum n) l_r on rank r, whose sum over the ranks is that of L

    With `ddp`, the gradient of each parameter that the wrapper averages is multiplied by the number of ranks that it
    divides by. Parameters may stand before and behind any collective.

    Args:
        loss: this rank's loss, one real element.
        axis: the ranks whose losses belong together. On a mesh with several axes, call it once for each.
        reduction: "mean": the mean over all samples; without `weights`, over the ranks. "sum": the sum.
        loss_type: what the losses are over the ranks. `gm.V`: each rank has its own. `gm.R`: every rank has the same
            one, of values whose backward sums over the ranks; it counts once. `gm.I`: every rank has the same one, of
            values made with `dst=gm.I`; it counts once by itself, and nothing is scaled.
        weights: the number of samples or tokens that this rank's loss is over; 0 on a rank that has none. The mean is
            over all of them, and not the mean of the ranks' means. None: all ranks weigh the same. On a rank with 0 the
            loss may be NaN, as that of `losses[mask].mean()`, whose gradient is zero all the same; a loss that was
            divided by the number itself, `(losses * mask).sum() / mask.sum()`, has a gradient of NaN there: hand in the
            sum and say local="sum".
        ddp: whether gradients are averaged over the ranks of `axis` after backward, as DDP, FSDP1 and `fully_shard` do.
            A module: it, or modules in it, are such wrappers; in one without any nothing is averaged. Then each
            parameter that the loss depends on gets its own factor: by what its wrapper divides; 1 where no wrapper of
            this process averages it, as an expert's; and what a verb sums over the same ranks already (`gm.replicate`,
            `gm.nn.Replicated`) is not counted twice. True, or a number of ranks: all parameters are averaged over as
            many, and nothing else multiplies their gradients by the number of ranks; nothing is looked up.
        local: "mean": `loss` is the mean over this rank's samples; "sum": their sum, which is what a rank without
            samples can have without dividing by zero.
        total: what the weights are divided by in a mean, where it is not their sum over the ranks: with gradient
            accumulation and `weights`, that over all ranks and micro-batches.
        steps: the number of micro-batches whose gradients are added up in a mean. They weigh the same, unless `total`
            is told.

    Returns:
        A scalar to call `backward` on. Its value is that of the declared loss, the same on every rank, and may be
        printed: an `all_reduce(loss, dst=gm.I)` made for that is part of the graph if backward starts from it, and
        its parameters' gradients are then too small or too large by the number of ranks. With `steps` or `total` it is
        the micro-batch's part of it, so that the sum of the values is the loss.

    Raises:
        ArgumentError: the loss is not one real element; weights that are negative, or 0 on every rank; weights of a
            loss that is the same on every rank; `gm.I` together with `ddp`, since behind a collective with `dst=gm.I`
            parameters have whole gradients and before it shares, and an average is right for one of both; a module
            in which it cannot be seen by what gradients are divided; a parameter that needs another factor than the
            rest where the graph of the loss does not show it, as in a reentrant checkpoint.
        MismatchError: the ranks declare different objectives, among them different totals, or one of them was refused.

    In forward mode the tangent is that of this rank's term, as the gradient is.

    Example:
        >>> def on_each_rank():
        ...     w = torch.tensor(1.0, requires_grad=True)
        ...     samples = torch.arange(1.0, 2 + 2 * gm.rank())  # 1 on rank 0, 3 on rank 1
        ...     own = (w * samples).mean()
        ...     loss = gm.objective(own, weights=len(samples), ddp=True)
        ...     loss.backward()
        ...     return loss.item(), w.grad.item()  # DDP's mean of the gradients is 7 / 4
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1.75, 0.5), (1.75, 3.0)]
    """
    where = resolve(axis, "objective")
    try:
        _check(loss, where, reduction, loss_type, local, steps)
        if isinstance(loss, nn.Parameter):
            loss = loss.view_as(loss)  # a leaf has no node at which its gradient could be scaled
        averaged = averaging(ddp, where)
        divided = averaged.divisor
        if loss_type is V:
            count = _count("weights", 1 if weights is None else weights, loss, where)
            over = None if total is None else _count("total", total, loss, where)
            if over is not None and reduction == "sum":
                _refuse(
                    where, "a sum is divided by nothing", "total=None", f"total={total!r}", "leave it out"
                )
        else:
            _check_same(where, loss_type, divided, weights, total, local)
        hook = averaged.correct(loss)
    except ArgumentError as error:
        withdraw("objective", where, loss, error)
        raise
    own = loss.reshape(())
    by = steps if reduction == "mean" else 1
    if loss_type is not V:
        factor = (divided if loss_type is R else where.size) / (where.size * by)
        return _declared(_with_value(own * factor, own.detach() / by), where, loss_type, hook)
    # A mean over samples that are not there is 0 / 0, and stands for nothing.
    kept = own if local == "sum" else torch.where(count > 0, own, 0)
    weight = count if local == "mean" else torch.ones_like(count)
    term = kept.detach().to(count.dtype) * weight
    said = f"objective(reduction={reduction!r}, local={local!r}, divided by {divided:g}, steps={steps})"
    said += ", with total" * (over is not None) + ", with weights" * (weights is not None)
    mine = [count, term] if over is None else [count, term, over]
    with torch.no_grad():  # a value alone: no link of a chain, nothing to go back through
        gathered = all_gather(Packed(torch.stack(mine), said), where)  # type: ignore[call-overload]
    rows = gathered.view(-1, len(mine))
    if over is not None:
        _check_total(rows[:, 2], where)
    counts, value = rows[:, :2].sum(0).unbind()
    if reduction == "sum":
        return _declared(
            _with_value(kept * (weight * divided).to(own.dtype), value.to(own.dtype)), where, V, hook
        )
    whole = counts * steps if over is None else over
    if _readable(whole) and not whole > 0:
        _refuse(
            where,
            "there is nothing to take the mean of",
            "a rank with weights above 0",
            f"weights that add up to {whole.item():g}",
            "leave the step out on every rank",
        )
    # One factor, in double precision: counts are more than a narrow dtype of the loss can tell.
    term = kept * (weight * divided / whole).to(own.dtype)
    return _declared(_with_value(term, (value / whole).to(own.dtype)), where, V, hook)


def _declared(scalar: Tensor, axis: Axis, loss_type: Type, hook: LastPass | None) -> Tensor:
    """Have tracers and checks take the ranks' losses as terms of one: a loss of type R is scaled to be that.

    Args:
        scalar: the declared loss.
        axis: the ranks.
        loss_type: what the loss was on the ranks.
        hook: the hook that marks the backward passes of the loss.
    """
    if hook is not None and scalar.requires_grad:
        scalar.register_hook(hook)
    if loss_type is R and scalar.requires_grad and not compiling() and check_level() == FULL:
        scalar.register_hook(rank_state().get_or_create(ReplicatedLossPass))
    if loss_type is not I and ACTIVE_TRACERS[0] and (tracer := rank_state().tracer) is not None:
        tracer.declare(scalar, axis, V)
    return scalar


def _check_total(totals: Tensor, axis: Axis) -> None:
    """Refuse totals that are each rank's own."""
    if _readable(totals) and bool((totals != totals[0]).any()):
        raise MismatchError(
            message(
                "the ranks divide by different totals",
                op="objective",
                axis=str(axis),
                expected="one total, that of all ranks and micro-batches",
                got="\n".join(f"rank {rank}: total={total:g}" for rank, total in enumerate(totals.tolist())),
                remedy="sum the ranks' own: gm.all_reduce(total, dst=gm.I)",
            )
        )


def _with_value(term: Tensor, value: Tensor) -> Tensor:
    """A scalar with the gradient of one and the value of another."""
    return torch.where(torch.isfinite(term.detach()), term - term.detach(), term) + value


def _readable(x: Tensor) -> bool:
    """Whether a value can be looked at without waiting for a device, or for a program that is only being made."""
    return x.is_cpu and not compiling() and not transforms_active()


def _count(name: str, given: Number, loss: Tensor, axis: Axis) -> Tensor:
    dtype = torch.float32 if loss.device.type == "mps" else torch.float64
    count = torch.as_tensor(given, dtype=dtype, device=loss.device).detach()
    if count.numel() != 1 or (_readable(count) and not 0 <= float(count) < math.inf):
        _refuse(
            axis,
            f"{name} is no count",
            "one number, 0 or more, on each rank",
            f"{name}={given!r}",
            "pass the number of samples or tokens that this rank's loss is over",
        )
    return count.reshape(())


def _check_same(
    axis: Axis, loss_type: Type, divided: float, weights: Number | None, total: Number | None, local: str
) -> None:
    """Refuse what says nothing of a loss that every rank has alike, or has two answers."""
    given = {"weights": weights is not None, "total": total is not None, "local": local != "mean"}
    if any(given.values()):
        names = ", ".join(name for name, is_there in given.items() if is_there)
        _refuse(
            axis,
            "a loss that is the same on every rank has no parts to weigh",
            f"loss_type=gm.V, or gm.{loss_type} alone",
            f"loss_type=gm.{loss_type} with {names}",
            "divide before the loss is the same on every rank, or say loss_type=gm.V",
        )
    if loss_type is I and divided != 1:
        _refuse(
            axis,
            "a loss of type I has no one factor under averaging",
            "loss_type=gm.V or gm.R where gradients are averaged",
            f"loss_type=gm.I with gradients divided by {divided:g}",
            "make the collectives before the loss with dst=gm.R, and say loss_type=gm.R, or gm.V for a loss before "
            "its sum over the ranks",
        )


def _check(
    loss: object, axis: Axis, reduction: object, loss_type: object, local: object, steps: object
) -> None:
    for name, value, expected in _wrong(loss, reduction, loss_type, local, steps):
        _refuse(axis, f"{name} is not usable", expected, value, "see gradmesh.objective")


def _wrong(
    loss: object, reduction: object, loss_type: object, local: object, steps: object
) -> Iterator[tuple[str, str, str]]:
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        got = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        yield "the loss", got, "one real element"
    if reduction not in ("mean", "sum"):
        yield "reduction", f"reduction={reduction!r}", '"mean" or "sum"'
    if local not in ("mean", "sum"):
        yield "local", f"local={local!r}", '"mean" or "sum"'
    if loss_type not in (V, R, I):
        yield "loss_type", f"loss_type={loss_type!r}", "gm.V, gm.R or gm.I"
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        yield "steps", f"steps={steps!r}", "an integer, 1 or more"


def _refuse(axis: Axis, problem: str, expected: str, got: str, remedy: str) -> NoReturn:
    raise ArgumentError(
        message(problem, op="objective", axis=str(axis), expected=expected, got=got, remedy=remedy)
    )
