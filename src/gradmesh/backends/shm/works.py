"""Calls and messages of one rank on a group of the shm backend, begun."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from gradmesh.backends.shm import progress
from gradmesh.backends.shm.p2p import Receive, Send, misfit
from gradmesh.backends.shm.phases import Steps
from gradmesh.backends.words import show_call
from gradmesh.backends.works import OwnWork, Promise, completed
from gradmesh.call_sites import Site, call_site

if TYPE_CHECKING:
    from gradmesh.backends.shm.engine import Engine

__all__ = ["AsyncWork", "CallWork", "MessageWork", "Shown"]


class Shown:
    """A call in words, for errors: its name, its tensors, and where it was begun."""

    __slots__ = ("_call", "_inputs", "_outputs", "_site")

    def __init__(self, call: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self._call, self._inputs, self._outputs = call, inputs, outputs
        self._site: Site = None

    def started(self) -> None:
        """Keep where the call is made: it may be finished elsewhere."""
        self._site = call_site()

    def __call__(self) -> str:
        """The words."""
        return show_call(self._call, self._inputs, self._outputs, self._site or call_site())


class AsyncWork(OwnWork):
    """What calls and messages have in common: they are over when the engine says so.

    Attributes:
        over: the call has ended, well or badly; set last.
        error: what it ended with.
        promise: the other end of the future that somebody asked for, and `asked`, when.
    """

    def __init__(self, engine: Engine, result: object, shown: Shown) -> None:
        super().__init__(result)
        self.engine, self.shown = engine, shown
        self.over = False
        self.error: BaseException | None = None
        self.promise: Promise | None = None
        self.asked = 0.0

    def end(self, error: BaseException | None = None) -> None:
        """Say that it is over. The caller holds the engine's lock."""
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
        """A future that is completed when the call is over. The background thread goes on with it meanwhile."""
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
    """A collective of one rank, begun."""

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
    """A message of one rank, begun."""

    def __init__(self, engine: Engine, under_way: Send | Receive, result: object, shown: Shown) -> None:
        super().__init__(engine, result, shown)
        self.under_way = under_way

    def settle(self) -> None:
        """End it if the message has gone, or come. The caller holds the engine's lock."""
        if self.under_way.done and not self.over:
            unfit = isinstance(self.under_way, Receive) and self.under_way.misfit is not None
            self.end(misfit(self.under_way, self.engine.name) if unfit else None)  # type: ignore[arg-type]
            self.engine.settled(self)

    @override
    def is_over(self) -> bool:
        if not super().is_over():
            self.engine.look_after(self)
        return self.over

    @override
    def finish(self, seconds: float | None) -> None:
        if not self.over:
            self.engine.deliver(self, seconds)
        if self.error is not None:
            raise self.error

    @override
    def late(self) -> list[int]:
        return list(self.engine.mail.needs(self.under_way))

    @override
    def source_rank(self) -> int:
        """Whose message came, -1 if none has."""
        return self.under_way.came_from if isinstance(self.under_way, Receive) else -1

    _source_rank = source_rank
