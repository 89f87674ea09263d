"""The calls that gradmesh's own data path makes of a group, without torch.distributed and its objects in between.

Nearly all of them find the group free and fit into one chunk (the eager limit). Then nothing is made for them: the rank
writes its chunk, publishes, looks for a moment whether the others have come, and reads. If they are not here by then,
or do not agree, or more than a chunk is to be moved, the call joins the queue of the group and goes on from where it
is. Phases, chunks and heads are the same both ways, so that one rank may take this way and another one that.
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
from gradmesh.backends.process_group import OwnGroup
from gradmesh.backends.shm import collectives, motions
from gradmesh.backends.shm.engine import Engine
from gradmesh.backends.shm.heads import REDUCTION_NUMBER, head
from gradmesh.backends.shm.motions import Motion
from gradmesh.backends.shm.phases import Call
from gradmesh.backends.shm.tensors import DTYPE_NUMBER, facts, reducible
from gradmesh.backends.shm.works import CallWork, Shown
from gradmesh.backends.words import refusal

__all__ = ["DirectCalls"]

_SUM = REDUCTION_NUMBER["SUM"]


class DirectCalls(OwnGroup):
    """The half of a group that gradmesh itself calls."""

    engine: Engine

    @override
    def all_gather_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        self._run(motions.ALL_GATHER, out, given, None, call_check, 1, *facts(given))

    @override
    def reduce_scatter_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        reducible(out, "SUM")
        self._run(motions.REDUCE_SCATTER, out, given, None, call_check, 1, *facts(out), _SUM)

    @override
    def all_reduce_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        reducible(given, "SUM")
        self._run(motions.ALL_REDUCE, out, given, None, call_check, 1, *facts(given), _SUM)

    @override
    def reduce_flat(self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None) -> None:
        reducible(given, "SUM")
        self._run(motions.REDUCE, out, given, root, call_check, *facts(given), _SUM, root)

    @override
    def broadcast_flat(
        self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        self._run(motions.BROADCAST, out, given, root, call_check, 1, *facts(out), root)

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
            self._run(motions.EXCHANGE_EVEN, out, given, None, call_check, number)
        else:
            self._run(motions.EXCHANGE, out, given, (send, receive), call_check, number)

    @override
    def relay_flat(
        self, out: Tensor, given: Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        if self.count == 1:  # its row of the amounts would be too short
            if source is not None:
                out.copy_(given)
            return
        self._run(motions.RELAY, out, given, source, call_check, DTYPE_NUMBER[given.dtype])

    @override
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        if self.engine.closed is not None:
            return
        refuse = call_check.refusal if call_check is not None else refusal(self._name)
        call = Call(self.engine.lockstep, secrets.randbits(64), CallCheck(0, lambda: said, refuse))
        work = CallWork(self.engine, collectives.barrier(call), [], False, Shown(said, []))
        with contextlib.suppress(Exception):  # the caller has an error of its own
            self.engine.post(work)
            work.wait()

    def _run(
        self,
        motion: Motion,
        out: Tensor,
        given: Tensor,
        extra: Any,
        call_check: CallCheck | None,
        *numbers: int,
    ) -> None:
        """Make a call at once if it can be, and through the queue if not, or from where it has to wait."""
        engine, bits = self.engine, head(motion.name, call_check, numbers)
        lockstep, opened = engine.lockstep, False
        with engine.lock:
            engine.check()
            elements = motion.elements(lockstep, out, given, extra)
            if (
                0 <= elements * given.dtype.itemsize <= engine.segment.chunk
                and not engine.queue
                and not _torch.modes_active()
            ):
                try:
                    lockstep.uses += 1
                    motion.write(lockstep, out, given, extra)
                    opened = True
                    if (
                        lockstep.open(bits, engine.spins)
                        and lockstep.agree(bits, call_check)
                        and motion.read(lockstep, out, given, extra)
                    ):
                        return
                except BaseException as error:
                    engine.give_up(error)
                    raise
            shown = Shown(motion.shown.format(extra), [given], [out])
            call = Call(lockstep, bits, call_check or CallCheck(0, shown, refusal(self._name)), opened=opened)
            work = CallWork(engine, motion.steps(call, out, given, extra), None, out.is_inference(), shown)
            engine.post(work, opened=opened)
        work.wait()
