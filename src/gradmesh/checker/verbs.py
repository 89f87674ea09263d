"""The library's own verbs, as the recorder sees them: one call each, whatever travels for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import functorch_active, is_fake
from gradmesh.autograd.traced import encode
from gradmesh.checker.recorder import Call, PendingEvent, Recorder
from gradmesh.checker.trace import Lost, Term, Verb
from gradmesh.ops.all_reduce import Extremum
from gradmesh.ops.base import Op
from gradmesh.ops.mean import Mean
from gradmesh.ops.pair import Receive, Send
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import Instrument
from gradmesh.transport.comm_thread import current_job
from gradmesh.types import Type


class Verbs(Instrument):
    """What the library asks at each of its calls; the recorder writes them down."""

    plain = True

    def __init__(self, recorder: Recorder) -> None:
        self._to = recorder
        self._begun: dict[int, PendingEvent] = {}
        """Calls that another thread makes, by what autograd remembers of them."""

    def queued(self, op: Op, x: Tensor, recorded: Any) -> None:
        """Write down a call that another thread is about to make."""
        if not self._to.quiet and not is_fake(x):
            self._begun[id(recorded)] = self._write(op, x)

    def called(self, op: Op, x: Tensor, recorded: Any, run: Callable[[], Tensor]) -> Tensor:
        """Run an op of the library, and write it down."""
        if current_job() is not None:  # what is recorded of a thread is that of the program's own
            y = run()
            pending = self._begun.pop(id(recorded), None)
            if pending is not None:
                self._to.made_verb(pending, y)
            return y
        if self._to.quiet or is_fake(x):
            return run()
        if functorch_active():  # another process could not read such a tensor
            self._to.tape.events.append(
                Lost(f"{op.verb} inside of a transform of torch.func", self._to.site())
            )
            with self._to.unseen():
                return run()
        pending = self._write(op, x)
        with self._to.unseen():
            y = run()
        self._to.made_verb(pending, y)
        return y

    def declared(self, x: Tensor, axis: Axis, kind: Type) -> None:
        """Remember of a loss that its ranks' are the terms of a sum."""
        number = self._to.id_of(x)
        if kind is Type.V and number is not None and not self._to.quiet:
            self._to.tape.events.append(Term(number, tuple(axis.global_ranks)))

    def _write(self, op: Op, x: Tensor) -> PendingEvent:
        alone = op.axis.size == 1 or not (op.sends or isinstance(op, Send | Receive))
        ranks = (self._to.tape.rank,) if alone else tuple(op.axis.global_ranks)
        call = Call(op.verb, ranks, f"gradmesh {op.axis.name}", [x], None)
        call.reduce = "max" if isinstance(op, Extremum) else "avg" if isinstance(op, Mean) else "sum"
        if isinstance(op, Send | Receive):
            call.root = op.peer
            if isinstance(op, Receive):
                call.ins = []
        followed = torch.is_grad_enabled() or bool(self._to.calls)  # else it is stopped on purpose
        rounds = op.comm_dtype is not None or op.backward_dtype is not None
        code = encode(op)
        call.verb = Verb(
            code.words, code.numbers, list(map(_readable, code.tensors)), op.axis.rank, op.axis.size
        )
        pending = self._to.begins_verb(call, may_follow=followed and not rounds)
        if rounds and followed and pending.event.phase == "apart":
            self._to.tape.events.append(Lost(f"{op.verb} rounds what travels", pending.event.site))
        return pending


def _readable(x: Tensor) -> Tensor:
    """An index as another process can read it: not what a transform of torch.func has left of one."""
    try:
        x.untyped_storage()
    except NotImplementedError:
        return torch.tensor(x.tolist(), dtype=x.dtype)
    return x
