# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The shm process group: torch's calls, with the movements of `data_path`, queued in the engine."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from gradmesh.backends.own_group import (
    CallCheck,
    FlatGroup,
    OwnWork,
    Results,
    Shown,
    Steps,
    Tensors,
    in_mode_of,
    operand,
    refusal,
)
from gradmesh.backends.shm import data_path
from gradmesh.backends.shm.data_path import DirectCalls, call_hash, facts_hash, memory_for_native
from gradmesh.backends.shm.engine import Call, CallWork, Engine, MessageWork
from gradmesh.backends.shm.p2p import Receive, Send
from gradmesh.backends.shm.shared_memory import Segment


class ShmGroup(FlatGroup, DirectCalls):
    """A process group whose ranks are processes of one host."""

    backend = "shm"

    def __init__(self, segment: Segment, timeout: datetime.timedelta, name: str) -> None:
        super().__init__(name, segment.rank, segment.size, timeout)
        self.segment = segment
        self.engine = Engine(segment, name, self.timeout)
        self._plans = {}
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
