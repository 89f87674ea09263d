"""Pending calls and messages of one rank in a shm group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from gradmesh.backends.messages import show_call
from gradmesh.backends.shm import progress
from gradmesh.backends.shm.epochs import Steps
from gradmesh.backends.shm.p2p import Receive, Send, misfit
from gradmesh.backends.works import OwnWork, Promise, completed
from gradmesh.call_sites import Site, call_site, origin

if TYPE_CHECKING:
    from gradmesh.backends.shm.engine import Engine

__all__ = ["AsyncWork", "CallWork", "MessageWork", "Shown"]


class Shown:
    """The description of a call, for errors: its name, tensors and call site."""

    __slots__ = ("_call", "_inputs", "_origin", "_outputs", "_site")

    def __init__(self, call: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self._call, self._inputs, self._outputs = call, inputs, outputs
        self._site: Site = None
        self._origin = origin()

    def started(self) -> None:
        """Record the call site, because the call may be finished elsewhere."""
        self._site = call_site()

    def __call__(self) -> str:
        """The description."""
        return show_call(self._call, self._inputs, self._outputs, self._site or call_site(), self._origin)


class AsyncWork(OwnWork):
    """The base class of calls and messages; the engine completes them.

    Attributes:
        over: whether the call has completed or failed; set last.
        error: its error.
        promise: completes the requested future; `asked` is the time of the request.
    """

    def __init__(self, engine: Engine, result: object, shown: Shown) -> None:
        super().__init__(result)
        self.engine, self.shown = engine, shown
        self.over = False
        self.error: BaseException | None = None
        self.promise: Promise | None = None
        self.asked = 0.0

    def end(self, error: BaseException | None = None) -> None:
        """Mark it as completed or failed. The caller holds the engine's lock."""
        self.error = error
        self.over = True
        promise, self.promise = self.promise, None
        if promise is not None:
            if error is None:
                promise.keep(self.given)
            else:
                promise.fail(error)

    @override
    def is_over(self) -> bool:
        if not self.over:
            progress.progress()
        return self.over

    @override
    def exception(self) -> BaseException | None:
        return self.error

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is completed with the call, which the progress thread advances."""
        with self.engine.lock:
            if not self.over:
                if self.promise is None:
                    self.promise, self.asked = Promise(), time.monotonic()
                    self.future = self.promise.future
                    self.engine.promised(self)
                return self.promise.future
        if self.error is None:
            return completed(self.given)
        failed = Promise()
        failed.fail(self.error)
        return failed.future


class CallWork(AsyncWork):
    """A pending collective of one rank."""

    def __init__(self, engine: Engine, steps: Steps, result: object, inference: bool, shown: Shown) -> None:
        super().__init__(engine, result, shown)
        self.steps = steps
        self.inference = inference

    @override
    def finish(self, seconds: float | None) -> None:
        if not self.over:
            self.engine.finish(self, seconds)
        if self.error is not None:
            raise self.error

    @override
    def late(self) -> list[int]:
        return self.engine.lockstep.late()


class MessageWork(AsyncWork):
    """A pending message of one rank."""

    def __init__(self, engine: Engine, under_way: Send | Receive, result: object, shown: Shown) -> None:
        super().__init__(engine, result, shown)
        self.under_way = under_way

    def settle(self) -> None:
        """Complete it if the message has been sent or received. The caller holds the engine's lock."""
        if self.under_way.done and not self.over:
            unfit = isinstance(self.under_way, Receive) and self.under_way.misfit is not None
            self.end(misfit(self.under_way, self.engine.name) if unfit else None)  # type: ignore[arg-type]
            self.engine.settled(self)

    @override
    def is_over(self) -> bool:
        if not super().is_over():
            self.engine.check_peer(self)
        return self.over

    @override
    def finish(self, seconds: float | None) -> None:
        if not self.over:
            self.engine.deliver(self, seconds)
        if self.error is not None:
            raise self.error

    @override
    def late(self) -> list[int]:
        return list(self.engine.p2p_channel.needs(self.under_way))

    @override
    def source_rank(self) -> int:
        """The sender of the received message, -1 before that."""
        return self.under_way.came_from if isinstance(self.under_way, Receive) else -1

    _source_rank = source_rank
