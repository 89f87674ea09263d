"""Nonlinear reductions of `gradmesh.all_reduce`: max, min, prod, logsumexp.

Each is composed of linear ops and torch functions, which provide every order of derivative and autodiff mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import in_plain_mode
from gradmesh.autograd.rule import apply
from gradmesh.errors import DTypeError
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Extremum
from gradmesh.ops.base import refuse_unless_added
from gradmesh.ops.shard import AllGatherInvariant
from gradmesh.ops.sizes import EQUAL
from gradmesh.runtime.checking import DEFERRED
from gradmesh.runtime.mesh import AxisLike, destroyed, resolve
from gradmesh.runtime.state import check_level, rank_state
from gradmesh.transport import compiling, group_cache, transport
from gradmesh.transport.call_checks import call_check, calls_of
from gradmesh.transport.run import cause_of, on_cpu
from gradmesh.types import R, Type
from gradmesh.verbs.call import Call


def _extremum(call: Call, dst: Type, *, largest: bool) -> Any:
    """The largest or the smallest value; ranks that tie share the gradient equally."""
    x = call.x
    if x.is_complex():
        _refuse(
            call, "max and min are not defined for complex numbers", "a real dtype", "pass x.abs() or x.real"
        )
    refuse_unless_added(x.dtype, call.fail)
    op = call.op(Extremum, largest)
    if not x.is_floating_point():
        return call.run(op, x.detach())
    return call.run_in_steps(op, x.detach(), lambda best: _share(call, dst, best))


def _share(call: Call, dst: Type, best: Tensor) -> Tensor:
    """The extremum, with the derivative of the mean over the ranks that hold it."""
    x = call.x
    # The terms of the mean have value zero, since a mean of the values could overflow or round; the exact value is
    # added.
    sent = call.precision["comm_dtype"]
    tied = (x.detach() if sent is None else x.detach().to(sent).to(x.dtype)) == best
    with torch.no_grad():
        ties = _sum(call, tied.to(x.dtype), dst)
    term = torch.where(x.detach().isfinite(), x - x.detach(), x)
    mean = _sum(call, torch.where(tied, term / ties.clamp(min=1), 0), dst)
    return mean + torch.where(mean == best, 0, best).detach()


def _prod(call: Call, dst: Type) -> Any:
    """The product; the derivative of torch.prod is correct with zeros, at every order."""
    if call.x.dtype is torch.bool:
        _refuse(
            call,
            "bool tensors have no product",
            "a numeric dtype",
            'use op="min" for a logical and, or cast: x.to(torch.int64)',
        )
    refuse_unless_added(call.x.dtype, call.fail)
    gather = AllGather if dst is R else AllGatherInvariant
    dtype = call.x.dtype
    return call.run(call.op(gather, 0, EQUAL), call.x.unsqueeze(0), lambda factors: _product(factors, dtype))


def _product(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """The product along the first dimension."""
    if factors.is_cpu or not factors.requires_grad:
        return factors.prod(0, dtype=dtype)
    # The backward of torch.prod makes the host look for zeros.
    return reduce(torch.mul, factors.unbind(0))


def _logsumexp(call: Call, dst: Type) -> Any:
    """log(sum(exp(x))), shifted by the maximum so that no term overflows."""
    x = call.x
    refuse_unless_added(x.dtype, call.fail)
    if not x.is_floating_point():
        _refuse(
            call,
            "logsumexp requires a real floating-point dtype",
            "a real floating-point dtype",
            "cast the tensor first, for example x.to(torch.float32)",
        )
    largest = Extremum(call.axis, largest=True)
    return call.run_in_steps(largest, x.detach(), lambda best: _shifted(call, dst, best))


def _shifted(call: Call, dst: Type, best: Tensor) -> Tensor:
    """log(sum(exp(x - best))) + best."""
    x = call.x
    shift = torch.where(best.isfinite(), best, 0)
    total = _sum(call, (x - shift).exp(), dst)
    # Where every term is exp(-inf), the derivative of log would be NaN.
    nothing = total == 0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1, total).log() + shift)


def _sum(call: Call, x: Tensor, dst: Type) -> Tensor:
    total = AllReduce if dst is R else AllReduceInvariant
    return apply(call.op(total), x)


def _refuse(call: Call, problem: str, expected: str, remedy: str) -> None:
    call.fail(problem, expected=expected, got=str(call.x.dtype), remedy=remedy, kind=DTypeError)


RULES: dict[str, Callable[[Call, Type], Any]] = {
    "max": partial(_extremum, largest=True),
    "min": partial(_extremum, largest=False),
    "prod": _prod,
    "logsumexp": _logsumexp,
}
"""The reductions by name; each returns the result, or a `Pending` with async_op=True."""


def barrier(axis: AxisLike = None) -> None:
    """Wait until every rank of an axis has called `barrier`.

    It does not pair with `torch.distributed.barrier` on another rank. Where the ranks compare their calls, every rank
    raises if a rank makes another call instead.

    Args:
        axis: as in `gradmesh.axis`.

    Raises:
        MismatchError: another rank, or another thread of this one, makes another call on the axis.
        NotInitializedError: the group was destroyed.

    Example:
        >>> def on_each_rank():
        ...     if gm.rank() == 0:
        ...         pass  # write a file
        ...     gm.barrier()
        ...     return gm.rank()  # and here every rank can read it
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0, 1]
    """
    here = resolve(axis, "barrier")
    try:
        level = check_level()
        if here.size == 1 or compiling() or not level:
            dist.barrier(group=here.group)
            return
        signature, calls = call_check("barrier", str(here), "barrier()"), calls_of(here.group)
        signature.deferred = group_cache(here.group) is None and (level == DEFERRED or not on_cpu(None, here))
        with calls.lock:
            if group_cache(here.group) is None:
                in_plain_mode(transport(here, signature).compare)
                if signature.deferred and (deferred := rank_state().deferred_check) is not None:
                    deferred.flush(None if calls.log is None else [calls.log])
            else:  # gradmesh's backends compare the calls of torch.distributed themselves
                signature.calls = calls
                signature.count()
            dist.barrier(group=here.group)
    except RuntimeError as error:
        if (found := cause_of(error)) is not None:
            raise found from error
        raise
    except ValueError as error:  # torch no longer knows the group
        raise destroyed("barrier", here, str(error)) from error
