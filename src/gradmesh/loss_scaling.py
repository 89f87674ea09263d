"""Loss scaling under DDP and FSDP: uneven batches, gradient accumulation, context parallelism.

Backward computes the gradient of the sum of the ranks' losses. Usually the mean over all samples is wanted, where ranks
have different numbers of samples, and wrappers such as DDP divide by the number of ranks as well. `objective` scales
this rank's term so that the optimizer gets the gradient of the declared loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from gradmesh._torch import LastPass, transforms_active
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, MismatchError
from gradmesh.runtime.checking import FULL
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.runtime.state import check_level, instruments, rank_state
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import ReplicatedLossPass
from gradmesh.transport.run import withdraw
from gradmesh.types import I, R, Type, V
from gradmesh.verbs.collectives import all_gather

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
    r"""Declare the loss over all ranks: the returned scalar has its value, and backward computes its gradient.

    ::

        V -> I    shape () -> ()    L = sum_r n_r l_r / sum_r n_r       value: L on every rank
                                    gradient: that of (n_r / sum n) l_r on rank r, whose sum over the ranks is that of L

    With `ddp`, the gradient of each averaged parameter is multiplied by the wrapper's divisor. Parameters may be used
    before and after any collective.

    Args:
        loss: this rank's loss, one real element.
        axis: the ranks whose losses are combined. On a mesh with several axes, call it once for each.
        reduction: "mean": the mean over all samples; without `weights`, over the ranks. "sum": the sum.
        loss_type: the type of the losses over the ranks. `gm.V`: each rank has a different one. `gm.R`: every rank has
            the same one, computed from values whose backward sums over the ranks; it counts once. `gm.I`: every rank
            has the same one, computed from values made with `dst=gm.I`; it counts once without scaling.
        weights: the number of samples or tokens in this rank's loss; 0 on a rank without any. The result is the mean
            over all of them, not the mean of the ranks' means. None: all ranks weigh the same. On a rank with 0 the
            loss may be NaN, as `losses[mask].mean()`, whose gradient is still zero. But
            `(losses * mask).sum() / mask.sum()` has a NaN gradient there: pass the sum with local="sum" instead.
        ddp: whether gradients are averaged over the ranks of `axis` after backward, as by DDP, FSDP1 and `fully_shard`.
            A module: it is or contains such wrappers; without any, nothing is averaged. Each parameter then gets its
            factor: its wrapper's divisor; 1 if no wrapper of this process averages it, such as an expert's; gradients
            that a verb already sums over the same ranks (`gm.replicate`, `gm.nn.Replicated`) are not counted twice.
            True, or a number of ranks: all parameters are averaged over as many ranks, and nothing else multiplies
            their gradients by the number of ranks; nothing is looked up.
        local: "mean": `loss` is the mean over this rank's samples; "sum": their sum, which avoids dividing by zero on a
            rank without samples.
        total: the divisor of the weights in a mean, if it is not their sum over the ranks: with gradient accumulation
            and `weights`, the sum over all ranks and micro-batches.
        steps: the number of micro-batches whose gradients are accumulated in a mean. They weigh the same, unless
            `total` is passed.

    Returns:
        A scalar to call `backward` on. Its value is the declared loss, the same on every rank, and can be logged. (If
        backward instead starts from `all_reduce(loss, dst=gm.I)`, gradients are too small or too large by the number of
        ranks.) With `steps` or `total` it is the micro-batch's part, so that the values add up to the loss.

    Raises:
        ArgumentError: the loss is not one real element; weights that are negative, or 0 on every rank; weights of a
            loss that is the same on every rank; `gm.I` together with `ddp`, as no single factor is right for
            parameters before and after a collective with `dst=gm.I`; a module whose divisor cannot be determined; a
            parameter that needs another factor where the graph of the loss does not show it, as in a reentrant
            checkpoint.
        MismatchError: the ranks declare different objectives, such as different totals, or a rank raised.

    In forward mode the tangent is that of this rank's term, like the gradient.

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
    from gradmesh.autograd.averaging import averaging

    where = resolve(axis, "objective")
    try:
        _check(loss, where, reduction, loss_type, local, steps)
        if isinstance(loss, nn.Parameter):
            loss = loss.view_as(loss)  # a leaf has no node for hooks
        averaged = averaging(ddp, where)
        divided = averaged.divisor
        if loss_type is V:
            count = _count("weights", 1 if weights is None else weights, loss, where)
            over = None if total is None else _count("total", total, loss, where)
            if over is not None and reduction == "sum":
                _refuse(
                    where,
                    'total= is not used with reduction="sum"',
                    'total=None, or reduction="mean"',
                    f'total={total!r} with reduction="sum"',
                    'omit total, or pass reduction="mean"',
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
    # A mean over no samples is NaN, and is replaced by 0.
    kept = own if local == "sum" else torch.where(count > 0, own, 0)
    weight = count if local == "mean" else torch.ones_like(count)
    term = kept.detach().to(count.dtype) * weight
    said = f"objective(reduction={reduction!r}, local={local!r}, divided by {divided:g}, steps={steps})"
    said += ", with total" * (over is not None) + ", with weights" * (weights is not None)
    mine = [count, term] if over is None else [count, term, over]
    with torch.no_grad():  # only the value: not an ordered op, no backward
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
            "the weights of all ranks add up to zero, so the mean is undefined",
            "weights above 0 on at least one rank",
            f"weights that add up to {whole.item():g}",
            "skip the step on every rank",
        )
    # One factor, in double precision: a low-precision dtype cannot represent large counts.
    term = kept * (weight * divided / whole).to(own.dtype)
    return _declared(_with_value(term, (value / whole).to(own.dtype)), where, V, hook)


def _declared(scalar: Tensor, axis: Axis, loss_type: Type, hook: LastPass | None) -> Tensor:
    """Tell instruments and the value checks that per-rank losses are terms of a sum; the hook marks its backwards."""
    if hook is not None and scalar.requires_grad:
        scalar.register_hook(hook)
    if loss_type is R and scalar.requires_grad and not compiling() and check_level() == FULL:
        scalar.register_hook(rank_state().get_or_create(ReplicatedLossPass))
    for each in () if loss_type is I else instruments():
        each.declared(scalar, axis, V)
    return scalar


def _check_total(totals: Tensor, axis: Axis) -> None:
    """Raise for totals that differ between ranks."""
    if _readable(totals) and bool((totals != totals[0]).any()):
        raise MismatchError.of(
            "total= differs between ranks",
            op="objective",
            axis=str(axis),
            expected="the same total on every rank: the sum over all ranks and micro-batches",
            got="\n".join(f"rank {rank}: total={total:g}" for rank, total in enumerate(totals.tolist())),
            remedy="sum the ranks' totals: total = gm.all_reduce(total, dst=gm.I)",
        )


def _with_value(term: Tensor, value: Tensor) -> Tensor:
    """A scalar with the gradient of `term` and the value of `value`."""
    return torch.where(torch.isfinite(term.detach()), term - term.detach(), term) + value


def _readable(x: Tensor) -> bool:
    """Whether a value can be read: not on a GPU, which would synchronise, and not while tracing."""
    return x.is_cpu and not compiling() and not transforms_active()


def _count(name: str, given: Number, loss: Tensor, axis: Axis) -> Tensor:
    dtype = torch.float32 if loss.device.type == "mps" else torch.float64
    if isinstance(given, (int, float)):  # without a copy from the host, which would wait for the device
        count = torch.full((), given, dtype=dtype, device=loss.device)
    else:
        count = torch.as_tensor(given, dtype=dtype, device=loss.device).detach()
    if count.numel() != 1 or (_readable(count) and not 0 <= float(count) < math.inf):
        _refuse(
            axis,
            f"{name} must be one finite number, 0 or more",
            "one number, 0 or more, on each rank",
            f"{name}={given!r}",
            f"pass the number of samples or tokens in this rank's loss, such as {name}=len(batch)"
            if name == "weights"
            else "pass the number of samples over all ranks and micro-batches",
        )
    return count.reshape(())


def _check_same(
    axis: Axis, loss_type: Type, divided: float, weights: Number | None, total: Number | None, local: str
) -> None:
    """Raise for arguments that do not apply to a loss that is the same on every rank."""
    given = {"weights": weights is not None, "total": total is not None, "local": local != "mean"}
    if any(given.values()):
        names = ", ".join(name for name, is_there in given.items() if is_there)
        _refuse(
            axis,
            f"{names} cannot be combined with loss_type=gm.{loss_type}, a loss that is the same on every rank",
            f"loss_type=gm.V, or loss_type=gm.{loss_type} without {names}",
            f"loss_type=gm.{loss_type} with {names}",
            f"omit {names}, or pass this rank's loss before it is summed, with loss_type=gm.V",
        )
    if loss_type is I and divided != 1:
        _refuse(
            axis,
            "loss_type=gm.I cannot be combined with ddp: no single factor is right for all parameters",
            "loss_type=gm.V or gm.R where gradients are averaged",
            f"loss_type=gm.I with gradients divided by {divided:g}",
            "use dst=gm.R in the collectives before the loss, and pass loss_type=gm.R, or gm.V for a loss that is not "
            "yet summed over the ranks",
        )


def _check(
    loss: object, axis: Axis, reduction: object, loss_type: object, local: object, steps: object
) -> None:
    for name, value, expected, example in _wrong(loss, reduction, loss_type, local, steps):
        _refuse(axis, f"invalid {name}", expected, value, f"pass {example}")


def _wrong(
    loss: object, reduction: object, loss_type: object, local: object, steps: object
) -> Iterator[tuple[str, str, str, str]]:
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        got = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        yield "loss", got, "a floating-point tensor with one element", "a scalar, such as losses.mean()"
    if reduction not in ("mean", "sum"):
        yield "reduction", f"reduction={reduction!r}", '"mean" or "sum"', 'reduction="mean"'
    if local not in ("mean", "sum"):
        yield "local", f"local={local!r}", '"mean" or "sum"', 'local="sum" if the loss is a sum over samples'
    if loss_type not in (V, R, I):
        example = "loss_type=gm.V if each rank has a different loss"
        yield "loss_type", f"loss_type={loss_type!r}", "gm.V, gm.R or gm.I", example
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        yield "steps", f"steps={steps!r}", "an int, 1 or more", "the number of micro-batches, such as steps=4"


def _refuse(axis: Axis, problem: str, expected: str, got: str, remedy: str) -> NoReturn:
    raise ArgumentError.of(problem, op="objective", axis=str(axis), expected=expected, got=got, remedy=remedy)
