# mypy: disable-error-code="override"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The shm process group: implements torch's calls as generators for the engine."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gradmesh.backends.own_group import (
    CallCheck,
    OwnWork,
    Results,
    Tensors,
    elements,
    in_mode_of,
    operand,
    reducible,
    reduction,
    refusal,
)
from gradmesh.backends.shm import data_path
from gradmesh.backends.shm.data_path import (
    REDUCTION_NUMBER,
    DirectCalls,
    call_hash,
    facts,
)
from gradmesh.backends.shm.engine import Call, CallWork, Engine, MessageWork, Shown, Steps
from gradmesh.backends.shm.p2p import DTYPE_NUMBER, Receive, Send
from gradmesh.backends.shm.shared_memory import Segment

__all__ = ["ShmGroup"]


class ShmGroup(DirectCalls):
    """A process group whose ranks are processes of one host."""

    backend = "shm"

    def __init__(self, segment: Segment, timeout: datetime.timedelta, name: str) -> None:
        super().__init__(name, segment.rank, segment.size, timeout)
        self.segment = segment
        self.engine = Engine(segment, name, self.timeout)

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

    def _call(self, kind: str, shown: Callable[[], str], *numbers: int) -> Call:
        return Call(
            self.engine.lockstep, call_hash(kind, None, numbers), CallCheck(0, shown, refusal(self._name))
        )

    def _begin(
        self, shown: Shown, steps: Steps, result: object, outputs: Iterable[Tensor], opts: Any = None
    ) -> OwnWork:
        inference = any(map(Tensor.is_inference, outputs))
        work = CallWork(self.engine, steps, result, inference, shown)
        self.engine.post(work, background=opts is not None and getattr(opts, "asyncOp", True))
        return self._collected(work)

    def _flat(self, tensor: Tensor) -> Tensor:
        return operand(tensor, self)

    # -- reductions

    @override
    def allreduce(self, tensors: Tensors, opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        shown = Shown(f"all_reduce({op.lower()})", tensors)
        calls, after = [], Results(self)
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo and tensor.is_cpu and op == "SUM":
                numbers = len(tensors), DTYPE_NUMBER[tensor.dtype], tensor.sparse_dim(), *tensor.shape
                three = [self._call("sparse_all_reduce", shown, *numbers, part) for part in range(3)]
                calls.append(data_path.sparse_all_reduce(three, tensor))
                continue
            flat = after.flat(tensor, keep=True)
            reducible(flat, op)
            call = self._call("all_reduce", shown, len(tensors), *facts(flat), REDUCTION_NUMBER[op])
            calls.append(data_path.all_reduce(call, flat, flat, op))
        return self._begin(shown, after.after(calls), tensors, tensors, opts)

    @override
    def reduce(self, tensors: Tensors, opts: Any) -> OwnWork:
        op, root = reduction(opts, self.backend), opts.rootRank
        shown = Shown(f"reduce({op.lower()}, root {root})", tensors)
        after = Results(self)
        flat = after.flat(tensors[0], keep=True)
        reducible(flat, op)
        call = self._call("reduce", shown, *facts(flat), REDUCTION_NUMBER[op], root)
        return self._begin(
            shown, after.after([data_path.reduce(call, flat, flat, op, root)]), tensors, tensors, opts
        )

    @override
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        shown = Shown(f"reduce_scatter({op.lower()})", inputs[0], outputs)
        calls: list[Steps] = []
        after = Results(self)
        for output, given in zip(outputs, inputs, strict=True):
            out = after.flat(output)
            flats = [self._flat(tensor) for tensor in self._one_per_rank("reduce_scatter", given)]
            reducible(out, op)
            self._fits("output", output, given[self.place])
            sizes = [flat.numel() for flat in flats]
            numbers = len(outputs), DTYPE_NUMBER[out.dtype], REDUCTION_NUMBER[op], *sizes
            if len(set(sizes)) == 1:
                call = self._call("reduce_scatter", shown, *numbers)
                calls.append(data_path.reduce_scatter(call, out, flats, op))
                continue
            for target, flat in enumerate(flats):
                call = self._call("reduce_scatter", shown, *numbers, target)
                calls.append(data_path.reduce(call, out, flat, op, target))
        return self._begin(shown, after.after(calls), outputs, outputs, opts)

    @override
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        shown = Shown(f"reduce_scatter_single({op.lower()})", inputs, outputs)
        calls, after = [], Results(self)
        for output, given in zip(outputs, inputs, strict=True):
            out = after.flat(output)
            rows = self._rows(self._flat(given), out, given, output).unbind(0)
            reducible(out, op)
            numbers = len(outputs), *facts(out), REDUCTION_NUMBER[op]
            call = self._call("reduce_scatter_single", shown, *numbers)
            calls.append(data_path.reduce_scatter(call, out, rows, op))
        return self._begin(shown, after.after(calls), outputs, outputs, opts)

    # -- exchanges

    @override
    def broadcast(self, tensors: Tensors, opts: Any) -> OwnWork:
        root = opts.rootRank
        shown = Shown(f"broadcast(root {root})", tensors)
        calls, after = [], Results(self)
        for tensor in tensors:
            flat = after.flat(tensor, keep=self.place == root)
            call = self._call("broadcast", shown, len(tensors), *facts(flat), root)
            calls.append(data_path.broadcast(call, flat, flat, root))
        return self._begin(shown, after.after(calls), tensors, tensors, opts)

    @override
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> OwnWork:
        shown = Shown("all_gather", inputs, outputs[0])
        calls, after = [], Results(self)
        for taken, given in zip(outputs, inputs, strict=True):
            flat = self._flat(given)
            outs = [after.flat(tensor) for tensor in self._one_per_rank("all_gather", taken)]
            self._fits("entry of this rank in the output list", taken[self.place], given)
            numbers = len(inputs), DTYPE_NUMBER[flat.dtype], *(out.numel() for out in outs)
            call = self._call("all_gather", shown, *numbers)
            calls.append(data_path.all_gather_lists(call, outs, flat))
        return self._begin(shown, after.after(calls), outputs, [t for taken in outputs for t in taken], opts)

    @override
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        shown = Shown("all_gather_single", inputs, outputs)
        calls, after = [], Results(self)
        for output, given in zip(outputs, inputs, strict=True):
            flat = self._flat(given)
            rows = self._rows(after.flat(output), flat, output, given)
            call = self._call("all_gather_single", shown, len(inputs), *facts(flat))
            calls.append(data_path.all_gather(call, rows, flat))
        return self._begin(shown, after.after(calls), outputs, outputs, opts)

    @override
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OwnWork:
        root, given = opts.rootRank, inputs[0]
        after, flat = Results(self), self._flat(given)
        nothing = flat[:0]
        taken = [nothing] * self.count
        shown = Shown(f"gather(root {root})", inputs, outputs[0] if outputs else [])
        if self.place == root:
            taken = [after.flat(tensor) for tensor in self._one_per_rank("gather", outputs[0])]
            self._fits("entry of this rank in the output list", outputs[0][root], given)
        gives = [flat if rank == root else nothing for rank in range(self.count)]
        call = self._call("gather", shown, DTYPE_NUMBER[flat.dtype], root)
        steps = after.after([data_path.exchange(call, taken, gives)])
        return self._begin(shown, steps, outputs, outputs[0] if outputs else [], opts)

    @override
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OwnWork:
        root, output = opts.rootRank, outputs[0]
        after = Results(self)
        out = after.flat(output)
        nothing = out[:0]
        gives = [nothing] * self.count
        shown = Shown(f"scatter(root {root})", inputs[0] if inputs else [], outputs)
        if self.place == root:
            gives = [self._flat(tensor) for tensor in self._one_per_rank("scatter", inputs[0])]
            self._fits("output", output, inputs[0][root])
        taken = [out if rank == root else nothing for rank in range(self.count)]
        call = self._call("scatter", shown, DTYPE_NUMBER[out.dtype], root)
        return self._begin(
            shown, after.after([data_path.exchange(call, taken, gives)]), outputs, outputs, opts
        )

    @override
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        shown = Shown("all_to_all", inputs, outputs)
        after = Results(self)
        gives = [self._flat(tensor) for tensor in self._one_per_rank("all_to_all", inputs)]
        taken = [after.flat(tensor) for tensor in self._one_per_rank("all_to_all", outputs)]
        self._fits("entry of this rank in the output list", outputs[self.place], inputs[self.place])
        call = self._call("all_to_all", shown, DTYPE_NUMBER[gives[0].dtype])
        return self._begin(
            shown, after.after([data_path.exchange(call, taken, gives)]), outputs, outputs, opts
        )

    @override
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> OwnWork:
        shown = Shown("all_to_all_single", [input], [output])
        after = Results(self)
        given, out = self._flat(input), after.flat(output)
        self._fits("output", output, input, sizes=False)
        gives = given.split(elements(input, self._split_sizes(input, input_splits)))
        taken = out.split(elements(output, self._split_sizes(output, output_splits)))
        self._fits("part of this rank in the output", taken[self.place], gives[self.place])
        call = self._call("all_to_all_single", shown, DTYPE_NUMBER[given.dtype])
        steps = data_path.exchange(call, taken, gives)
        return self._begin(shown, after.after([steps]), [output], [output], opts)

    @override
    def barrier(self, opts: Any = None) -> OwnWork:
        shown = Shown("barrier", [])
        return self._begin(shown, self._call("barrier", shown).meet(), [], [], opts)

    # -- point to point

    @override
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        send = Send(self._flat(tensors[0]), to, tag)
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
