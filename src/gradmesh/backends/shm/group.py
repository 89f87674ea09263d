# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The shm process group: torch's calls, with the movements of `data_path`, queued in the engine."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import override

from gradmesh import _torch
from gradmesh._util.dtypes import NEVER_COPIED
from gradmesh.backends.own_group import (
    DTYPES,
    CallCheck,
    Done,
    FlatGroup,
    OwnWork,
    Results,
    Shown,
    Steps,
    Tensors,
    apart,
    in_mode_of,
    operand,
    reduction,
    refusal,
)
from gradmesh.backends.shm import data_path
from gradmesh.backends.shm.data_path import DirectCalls, Primitive, call_hash, facts_hash, memory_for_native
from gradmesh.backends.shm.engine import Call, CallWork, Engine, MessageWork
from gradmesh.backends.shm.p2p import Receive, Send
from gradmesh.backends.shm.shared_memory import Segment

_ALL_GATHER = data_path.ALL_GATHER._replace(shown="all_gather_single")
_REDUCE_SCATTER = data_path.REDUCE_SCATTER._replace(shown="reduce_scatter_single(sum)")
_PLAIN = frozenset(DTYPES) - NEVER_COPIED - {dtype for dtype in DTYPES if str(dtype).startswith("torch.q")}


def _plain(tensor: Tensor) -> bool:
    """Whether its memory has its elements in their order."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


class ShmGroup(FlatGroup, DirectCalls):
    """A process group whose ranks are processes of one host."""

    backend = "shm"

    def __init__(self, segment: Segment, timeout: datetime.timedelta, name: str) -> None:
        super().__init__(name, segment.rank, segment.size, timeout)
        self.segment = segment
        self.engine = Engine(segment, name, self.timeout)
        self._plans = {}
        self._nothing = torch.empty(0, device="cpu")
        self._memory = memory_for_native(segment)

    @override
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        self.engine.timeout = self.timeout

    @override
    def setGroupName(self, name: str) -> None:
        super().setGroupName(name)
        self.engine.name = name

    def _get_sequence_number_for_group(self) -> int:
        return self.engine.lockstep.epoch

    @override
    def shutdown(self) -> None:
        self.engine.leave()

    @override
    def abort(self) -> None:
        self.engine.abort()

    def __repr__(self) -> str:
        return f"ShmGroup({self.shown()})"

    # -- starting

    @override
    def _call(self, kind: str, shown: Callable[[], str], *numbers: int) -> Call:
        bits = call_hash(facts_hash(kind, numbers), None)
        return Call(self.engine.lockstep, bits, CallCheck(0, shown, refusal(self._name)))

    @override
    def _begin(
        self, shown: Shown, steps: Steps, result: object, outputs: Iterable[Tensor], opts: Any = None
    ) -> OwnWork:
        inference = any(map(Tensor.is_inference, outputs))
        work = CallWork(self.engine, steps, result, inference, shown)
        self.engine.post(work, background=opts is not None and getattr(opts, "asyncOp", True))
        return self._collected(work)

    # -- calls of torch that are made at once

    def _made(
        self, primitive: Primitive, out: Tensor, given: Tensor, count: int, opts: Any, root: int | None = None
    ) -> bool:
        """Make a call of one tensor in C, if the caller waits for it and the tensors are plain memory; else False."""
        if (
            self._memory is None
            or getattr(opts, "asyncOp", True)
            or self._coalesced is not None
            or _torch.functorch_active()
            or not _plain(given)
            or (out is not given and not (_plain(out) and out.dtype is given.dtype))
        ):
            return False
        self._run(primitive, out, given, root, None, count)
        if root != self.place:  # a root keeps what it has
            increment_version(out)
        return True

    @override
    def allreduce(self, tensors: Tensors, opts: Any = None) -> OwnWork:
        made = False
        if len(tensors) == 1 and reduction(opts, self.backend) == "SUM":
            made = self._made(data_path.ALL_REDUCE, tensors[0], tensors[0], tensors[0].numel(), opts)
        return Done(tensors) if made else super().allreduce(tensors, opts)

    @override
    def broadcast(self, tensors: Tensors, opts: Any) -> OwnWork:
        made, root = False, opts.rootRank
        if len(tensors) == 1 and 0 <= root < self.count:
            made = self._made(data_path.BROADCAST, tensors[0], tensors[0], tensors[0].numel(), opts, root)
        return Done(tensors) if made else super().broadcast(tensors, opts)

    @override
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        made = False
        if len(inputs) == len(outputs) == 1:
            out, given = outputs[0], inputs[0]
            fits = out.numel() == self.count * given.numel()
            made = fits and self._made(_ALL_GATHER, out, given, given.numel(), opts)
        return Done(outputs) if made else super().all_gather_single_coalesced(outputs, inputs, opts)

    @override
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        made = False
        if len(inputs) == len(outputs) == 1 and reduction(opts, self.backend) == "SUM":
            out, given = outputs[0], inputs[0]
            fits = given.numel() == self.count * out.numel() and given.is_cpu and apart(given, out) is given
            made = fits and self._made(_REDUCE_SCATTER, out, given, out.numel(), opts)
        return Done(outputs) if made else super().reduce_scatter_single_coalesced(outputs, inputs, opts)

    @override
    def barrier(self, opts: Any = None) -> OwnWork:
        made = self._made(data_path.BARRIER, self._nothing, self._nothing, 0, opts)
        return Done([]) if made else super().barrier(opts)

    # -- movements

    @override
    def _all_reduce(self, call: Call, flat: Tensor, op: str) -> Steps:
        return data_path.all_reduce(call, flat, flat, op)

    @override
    def _broadcast(self, call: Call, flat: Tensor, root: int) -> Steps:
        return data_path.broadcast(call, flat, flat, root)

    _reduce = staticmethod(data_path.reduce)
    _reduce_scatter = staticmethod(data_path.reduce_scatter)
    _all_gather = staticmethod(data_path.all_gather)
    _all_gather_lists = staticmethod(data_path.all_gather_lists)
    _exchange = staticmethod(data_path.exchange)
    _barrier = staticmethod(Call.meet)

    # -- point to point

    @override
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        send = Send(operand(tensors[0], self), to, tag)
        work = MessageWork(self.engine, send, tensors, Shown(f"send(to rank {to}, tag {tag})", tensors))
        self.engine.post_message(work)
        return self._collected(work)

    @override
    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> OwnWork:
        sender = "any rank" if source is None else f"rank {source}"
        shown = Shown(f"recv(from {sender}, tag {tag})", tensors)
        results = Results(self)
        flat = results.flat(tensors[0])
        receive = Receive(flat, source, tag, partial(in_mode_of, tensors, results.copy))
        work = MessageWork(self.engine, receive, tensors, shown)
        self.engine.post_message(work)
        return self._collected(work)
