"""Run an op on this rank: call checks, tracers, pending async calls, the profiler, and notification on errors.

While a profiler is on, each collective is one range of it, ``gradmesh::all_gather axis=tp bytes=1024``, with the bytes
of this rank's operand in the dtype that is sent. The name ends in ``backward`` inside a backward pass (an adjoint, by
its verb, or the recomputation of a checkpoint). Compiled programs have no ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import get_ident, get_native_id
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import in_backward, is_fake, named_range, profiler_on
from gradmesh._util.caches import BoundedCache
from gradmesh._util.call_sites import ORIGINS, call_site, seen_from
from gradmesh._util.structure import Packed
from gradmesh.backends.own_group import OwnGroup
from gradmesh.ops.base import Op
from gradmesh.ops.transport import Transport
from gradmesh.runtime.checking import DEFERRED, FULL
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import INSTALLED, check_level, rank_state, watched
from gradmesh.transport import compiling, group_cache, transport
from gradmesh.transport.call_checks import (
    BACKWARD,
    NEEDS_BACKWARD,
    CallRecord,
    OpCallCheck,
    Signature,
    ValueCheck,
    call_check,
    calls_of,
    refusal_text,
)
from gradmesh.transport.comm_thread import AsyncAxis, after_pending, transport_axis
from gradmesh.transport.packing import laid_out_as
from gradmesh.types import I, R, Type


def apply(op: Op, x: Tensor, recorded: CallRecord | None = None) -> Tensor:
    """Run an op on this rank's plain tensor. The result is fresh memory; `x` is only read."""
    if op.__module__.startswith("gradmesh."):
        return _shown_at_origin(op, x, recorded)
    # The frames of `transfer` are the program's, and the call is made further out.
    with seen_from(call_site()):
        return _shown_at_origin(op, x, recorded)


def _memo(op: Op) -> BoundedCache:
    """What is known of the calls of an op, and of equal ones where the group does not keep its ops."""
    group = getattr(op.axis, "group", None)
    if hasattr(group, "kept") or not isinstance(group, dist.ProcessGroup) or not (identity := op.identity):
        return BoundedCache()
    memos = calls_of(group).memos
    found: BoundedCache | None = memos.get(identity)
    if found is None:
        found = memos[identity] = BoundedCache()
    return found


Op.runner, Op.memo_of = staticmethod(apply), staticmethod(_memo)


def _shown_at_origin(op: Op, x: Tensor, recorded: CallRecord | None) -> Tensor:
    """Run an op; errors show the forward call of a backward."""
    if recorded is None or recorded.origin is None:
        return _followed(op, x, recorded)
    thread = get_ident()
    outer, ORIGINS[thread] = ORIGINS.get(thread), recorded.show_origin
    try:
        return _followed(op, x, recorded)
    finally:
        ORIGINS[thread] = outer


def _followed(op: Op, x: Tensor, recorded: CallRecord | None) -> Tensor:
    """Run an op; the rank's tracer records it."""
    if INSTALLED[0]:
        return watched(op, x, recorded, lambda: _checked(op, x, recorded))
    return _checked(op, x, recorded)


def _checked(op: Op, x: Tensor, recorded: CallRecord | None) -> Tensor:
    """Run an op after the pending async calls, as a call that the ranks compare."""
    if x.is_meta or (type(x) is not Tensor and is_fake(x)):
        op.accepts(x.dtype)
        return fake_result(op, x)
    axis = op.axis
    if type(axis) is AsyncAxis and not axis.comm_thread.here:
        axis.comm_thread.drain()
    check = _check_of(op, x, recorded)
    wire = transport(axis, check)
    if check is None:
        y = _call(op, x, recorded, wire)
    else:
        with check.calls.lock:
            y = _call(op, x, recorded, wire)
        check.settle()
    return y if x.is_contiguous() else laid_out_as(x, y)


def _call(op: Op, x: Tensor, recorded: CallRecord | None, wire: Transport) -> Tensor:
    """Make the call; on an error notify the other ranks."""
    try:
        if x.dtype not in op.memo:
            op.accepts(x.dtype)
            op.memo[x.dtype] = True
        if not op.sends and wire.call_check is not None:
            wire.compare()
        if profiler_on():
            back = recorded is not None and recorded.role == BACKWARD
            with profiled(op.verb, wire.axis, x, op.comm_dtype, backward=back):
                return sent(op, x, wire)
        return sent(op, x, wire)
    except Exception as error:
        state = rank_state()
        state.started.abandon()
        wire.withdraw(error)
        if (found := cause_of(error)) is not None:
            raise found from error
        raise


def cause_of(error: Exception) -> Exception | None:
    """The error of the deferred check that a failed call is a consequence of; None: another one."""
    check = rank_state().deferred_check
    found = check.verdict(error) if check is not None and isinstance(error, RuntimeError) else None
    return None if found is error else found


def sent(op: Op, x: Tensor, wire: Transport) -> Tensor:
    """Run an op in the dtype that is sent."""
    if op.comm_dtype is None or op.comm_dtype is x.dtype:
        return op.transfer(x, wire)
    return op.in_comm_dtype(x, wire)


def fake_result(op: Op, x: Tensor) -> Tensor:
    """A result of the right shape and strides for a fake operand."""
    y = x.new_empty(op.out_shape(x.shape))
    return y if x.is_contiguous() else laid_out_as(x, y)


def _check_of(op: Op, x: Tensor, recorded: CallRecord | None) -> OpCallCheck | None:
    """The check of a call; None where nothing is compared.

    A call that sends nothing is only noted, if its backward sends; at level "full" it is compared too, if its operand
    has to be the same on every rank.
    """
    axis = op.axis
    if axis.size == 1:
        return None
    level = check_level()
    if not level:
        return None
    deferred = False
    if not x.is_cpu or level == DEFERRED:
        own = issubclass(type(axis.group), OwnGroup)
        if own and not x.is_cpu:
            return None
        deferred = not own
    src: Type | None = getattr(op, "src", None) if level == FULL else None
    compared = op.sends or (src in (R, I) and not deferred)
    if not compared and (recorded is None or not recorded.flags & NEEDS_BACKWARD or not op.sends_back):
        return None
    said: Signature | None = op.memo.get((x.shape, x.dtype))
    if said is None:
        said = op.memo[x.shape, x.dtype] = Signature.of(
            op.verb, str(axis), op.describe(x), op.rank_local_desc()
        )
    if recorded is not None:
        recorded.text = said.text
        if not compared:
            calls_of(transport_axis(axis).group).note(said, recorded)
    if not compared:
        return None
    if deferred:
        return OpCallCheck(said, recorded, deferred=True, by_shape=x.is_cpu)
    return ValueCheck(said, recorded, x, src) if level == FULL else OpCallCheck(said, recorded)


def abort(op: Op, x: Tensor, error: Exception) -> None:
    """Notify the other ranks that this rank aborts the call of an op."""
    if not is_fake(x):
        after_pending(op.axis, lambda: transport(op.axis, _check_of(op, x, None)).withdraw(error))


_SILENT = frozenset({"convert", "recv", "replicate", "send", "shard"})
"""The verbs that do not communicate with all ranks of the axis."""


def withdraw(verb: str, axis: Axis, x: object, error: Exception, peer: int | None = None) -> None:
    """Notify the other ranks that this rank aborts its call of a verb, so that they raise instead of waiting.

    Where the ranks compare their calls, this is this rank's part of the comparison, and it waits for theirs. For a
    point-to-point message only the receiver, `peer`, is notified; a rank that aborts a `recv` discards the message.
    """
    if compiling() or axis.size == 1:
        return
    level, here = check_level(), on_cpu(x, axis)
    given = x.flat if isinstance(x, Packed) else x
    deferred = level == DEFERRED or (not here and isinstance(given, Tensor) and not is_fake(given))
    if not here and not deferred:
        return
    if peer is not None:
        if peer not in range(axis.size) or peer == axis.rank:
            return
        if not here:
            if level and not issubclass(type(axis.group), OwnGroup):
                from gradmesh.transport.deferred_check import note_message

                with note_message(transport_axis(axis), verb, peer, "", refusal_text(error)):
                    pass
        elif verb == "send":
            transport(axis).withdraw_message(
                peer, f"none, because send() raised on rank {axis.rank}: {str(error).splitlines()[0]}"
            )
        else:
            transport(axis).pass_over(peer)
    elif level and verb not in _SILENT:
        check = call_check(verb, str(axis), f"{verb}, refused")
        check.deferred = deferred and not issubclass(type(axis.group), OwnGroup)
        after_pending(axis, lambda: transport(axis, check).withdraw(error))


def exchange_device(axis: Axis, beside: Tensor | None = None) -> torch.device:
    """Where numbers of the host are exchanged: the CPU if the group supports it, else the accelerator.

    On the CPU nothing has to wait for a device, and the ranks compare the call. With a tensor of the same call on the
    CPU, `beside`, they are there.
    """
    if beside is not None and beside.is_cpu:
        return beside.device
    if axis.size == 1 or not torch.accelerator.is_available():
        return torch.device("cpu")
    carried = dist.get_backend_config(axis.group).split(",")
    return torch.device("cpu") if any(each.startswith("cpu:") for each in carried) else accelerator()


def constants(
    values: Sequence[float] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Numbers, or rows of them, as a tensor on a device, for which the host does not wait for the device."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def accelerator() -> torch.device:
    """The current device of this process."""
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind else "cpu", torch.accelerator.current_device_index())


def on_cpu(x: object, axis: Axis) -> bool:
    """Whether the ranks compare a call with this operand."""
    given = x.flat if isinstance(x, Packed) else x
    if isinstance(given, Tensor):
        return given.is_cpu and not is_fake(given)
    return group_cache(axis.group) is not None or not torch.accelerator.is_available()


SEEN: dict[int, int] = {}
"""The rank of each thread on which a collective was profiled, by native thread id; calls may run on helper threads."""


def own_rank() -> int:
    """The calling thread's global rank; 0 before `init`."""
    return dist.get_rank() if dist.is_initialized() else 0


def profiled(
    verb: str, axis: Axis, x: Tensor, travels: torch.dtype | None, *, backward: bool = False
) -> AbstractContextManager[Any]:
    """A range for one collective on this rank's tensor, which is sent in its own dtype or another one, `travels`."""
    SEEN[get_native_id()] = own_rank()
    count = x.numel() * (travels or x.dtype).itemsize
    where = " backward" if backward or in_backward() else ""
    return named_range(f"gradmesh::{verb} axis={axis.name} bytes={count}{where}")
