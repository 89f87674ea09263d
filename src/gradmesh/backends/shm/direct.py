"""The calls of gradmesh's data path, which bypass torch.distributed.

Usually the group is idle and the data fits into one chunk (the eager limit). Then no objects are created: the rank
writes its chunk, publishes, polls for the others, and reads. If they do not arrive in time, disagree, or the data needs
more than a chunk, the call is appended to the group's queue and continues there. Both paths use the same epochs, chunks
and hashes, so that ranks may take different paths.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from gradmesh import _torch
from gradmesh.backends.call_check import CallCheck
from gradmesh.backends.messages import refusal
from gradmesh.backends.process_group import OwnGroup
from gradmesh.backends.shm import collectives, primitives
from gradmesh.backends.shm.call_hash import REDUCTION_NUMBER, call_hash
from gradmesh.backends.shm.engine import Engine
from gradmesh.backends.shm.epochs import Call
from gradmesh.backends.shm.primitives import Primitive
from gradmesh.backends.shm.tensors import DTYPE_NUMBER, facts, reducible
from gradmesh.backends.shm.works import CallWork, Shown

__all__ = ["DirectCalls"]

_SUM = REDUCTION_NUMBER["SUM"]


class DirectCalls(OwnGroup):
    """The calls of gradmesh's data path."""

    engine: Engine

    @override
    def all_gather_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        self._run(primitives.ALL_GATHER, out, given, None, call_check, 1, *facts(given))

    @override
    def reduce_scatter_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        reducible(out, "SUM")
        self._run(primitives.REDUCE_SCATTER, out, given, None, call_check, 1, *facts(out), _SUM)

    @override
    def all_reduce_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        reducible(given, "SUM")
        self._run(primitives.ALL_REDUCE, out, given, None, call_check, 1, *facts(given), _SUM)

    @override
    def reduce_flat(self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None) -> None:
        reducible(given, "SUM")
        self._run(primitives.REDUCE, out, given, root, call_check, *facts(given), _SUM, root)

    @override
    def broadcast_flat(
        self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        self._run(primitives.BROADCAST, out, given, root, call_check, 1, *facts(out), root)

    @override
    def exchange_flat(
        self,
        out: Tensor,
        given: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        number = DTYPE_NUMBER[given.dtype]
        if send is None or receive is None:
            self._run(primitives.EXCHANGE_EVEN, out, given, None, call_check, number)
        else:
            self._run(primitives.EXCHANGE, out, given, (send, receive), call_check, number)

    @override
    def relay_flat(
        self, out: Tensor, given: Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        if self.count == 1:  # a row of counts would be too short
            if source is not None:
                out.copy_(given)
            return
        self._run(primitives.RELAY, out, given, source, call_check, DTYPE_NUMBER[given.dtype])

    @override
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        if self.engine.closed is not None:
            return
        refuse = call_check.refusal if call_check is not None else refusal(self._name)
        call = Call(self.engine.lockstep, secrets.randbits(64), CallCheck(0, lambda: said, refuse))
        work = CallWork(self.engine, collectives.barrier(call), [], False, Shown(said, []))
        with contextlib.suppress(Exception):  # the caller raises its own error
            self.engine.post(work)
            work.wait()

    def _run(
        self,
        primitive: Primitive,
        out: Tensor,
        given: Tensor,
        extra: Any,
        call_check: CallCheck | None,
        *numbers: int,
    ) -> None:
        """Run a call immediately if possible; otherwise queue it, or the rest of it."""
        engine, bits = self.engine, call_hash(primitive.name, call_check, numbers)
        lockstep, opened = engine.lockstep, False
        with engine.lock:
            engine.check()
            elements = primitive.elements(lockstep, out, given, extra)
            if (
                0 <= elements * given.dtype.itemsize <= engine.segment.chunk
                and not engine.queue
                and not _torch.modes_active()
            ):
                try:
                    lockstep.uses += 1
                    primitive.write(lockstep, out, given, extra)
                    opened = True
                    if (
                        lockstep.open(bits, engine.spins)
                        and lockstep.agree(bits, call_check)
                        and primitive.read(lockstep, out, given, extra)
                    ):
                        return
                except BaseException as error:
                    engine.abort_group(error)
                    raise
            shown = Shown(primitive.shown.format(extra), [given], [out])
            call = Call(lockstep, bits, call_check or CallCheck(0, shown, refusal(self._name)), opened=opened)
            work = CallWork(engine, primitive.steps(call, out, given, extra), None, out.is_inference(), shown)
            engine.post(work, opened=opened)
        work.wait()
