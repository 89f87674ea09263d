"""What torch asks of a call that was begun: the common half of a `Work`, several of them as one, and futures.

torch.distributed hands a work to whoever called with `async_op=True`. DDP asks it for a future, and waits for that in
C++, where nothing of Python runs meanwhile; so a future is completed by another thread (see `Promise`).
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from gradmesh._torch import never_compiled

__all__ = ["Done", "OwnWork", "Promise", "Together", "promised"]


class OwnWork(dist.Work):
    """A call of one rank, begun. A subclass says how it is waited for, and whether it is over.

    Args:
        result: what `result()` and the future hand out.

    Attributes:
        future: a future that was handed out before the call was over, which another thread completes.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_compiled(cls)

    def __init__(self, result: object) -> None:
        super().__init__()
        self.given = result
        self.future: torch.futures.Future[Any] | None = None

    # -- owed by a subclass

    @abc.abstractmethod
    def finish(self, seconds: float | None) -> None:
        """Wait until the call is over, at most so long; None: as long as the group's timeout allows.

        Raises:
            GradmeshError: it failed, or the time is over.
        """

    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether the call is over, well or badly; goes on with it if it can, and does not wait."""

    @override
    @abc.abstractmethod
    def exception(self) -> BaseException | None:
        """The error that the call ended with, or None."""

    def late(self) -> list[int]:
        """The ranks of the group that the call still waits for."""
        return []

    # -- what torch asks

    @override
    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once: the call is over, and a future of it is done."""
        return self.is_over() and (self.future is None or self.future.done())

    @override
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until the call is over and its future is done; torch passes None, or zero, for the group's timeout."""
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            self.finish(seconds if seconds > 0 else None)
        finally:
            if self.future is not None and self.is_over():
                with contextlib.suppress(Exception):  # which is that of the call
                    self.future.wait()
        return True

    @override
    def is_success(self) -> bool:
        """Whether the call is over and has its result."""
        return self.is_completed() and self.exception() is None

    @override
    def synchronize(self) -> None:
        """Wait: there is no stream of a device that could wait instead."""
        self.wait()

    @override
    def result(self) -> Any:
        """The tensors that the call has written, once it is over."""
        self.wait()
        return self.given

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the result. Here the call is over when it is handed out."""
        self.wait()
        return completed(self.given)

    def giving(self, result: object) -> OwnWork:
        """Have `result()` and the future hand out this instead."""
        self.given = result
        return self


never_compiled(OwnWork)


class Done(OwnWork):
    """A call that was over when it was made."""

    @override
    def finish(self, seconds: float | None) -> None:
        """Nothing is left to wait for."""

    @override
    def is_over(self) -> bool:
        return True

    @override
    def exception(self) -> BaseException | None:
        return None


class Together(OwnWork):
    """Several works as one, for calls that were made between `_start_coalescing` and `_end_coalescing`."""

    def __init__(self, works: Sequence[OwnWork]) -> None:
        super().__init__([])
        self._works = works

    @override
    def finish(self, seconds: float | None) -> None:
        for work in self._works:
            work.finish(seconds)

    @override
    def is_over(self) -> bool:
        return all(work.is_over() for work in self._works)

    @override
    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)


def completed(result: object) -> torch.futures.Future[Any]:
    """A future that has its result already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


class Promise:
    """A future of a call that is not over, and its other end.

    Whoever goes on with the call may be in the middle of something else, and a callback (`future.then`) may wait for
    further calls, as PowerSGD's does. So a future is completed in a thread for that, another one for each that is still
    in a callback; Gloo's callbacks run in threads of its own as well.

    An error has to be raised in a callback of torch's: what `Future.set_exception` leaves behind is an error in Python
    alone, and C++ would take it for a list of tensors.
    """

    def __init__(self) -> None:
        self._ending: torch.futures.Future[Any] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._ending.then(_unfold)

    def keep(self, result: object) -> None:
        """Complete the future with a result."""
        self._complete((result, None))

    def fail(self, error: BaseException) -> None:
        """Complete the future with an error, which torch shows as a RuntimeError with this one's text."""
        self._complete((None, error))

    def _complete(self, ending: tuple[object, BaseException | None]) -> None:
        try:
            _threads.submit(self._ending.set_result, ending)
        except RuntimeError:  # the process is ending, and takes no threads any more
            self._ending.set_result(ending)


def promised(work: OwnWork) -> torch.futures.Future[Any]:
    """The future of a work, completed by a thread that waits for the call."""
    if work.future is not None:
        return work.future
    promise = Promise()
    work.future = promise.future

    def wait() -> None:
        try:
            work.finish(None)
        except BaseException as error:
            promise.fail(error)
        else:
            promise.keep(work.given)

    threading.Thread(target=wait, name="gradmesh future", daemon=True).start()
    return promise.future


def _unfold(ended: torch.futures.Future[Any]) -> object:
    result, error = ended.value()
    if error is not None:
        raise error
    return result


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=256, thread_name_prefix="gradmesh callbacks")


_threads = _new_threads()  # none of them is started before there is something to do


def _forget() -> None:
    """In a forked child the threads are not there."""
    global _threads
    _threads = _new_threads()


with contextlib.suppress(AttributeError):  # there are systems without fork
    os.register_at_fork(after_in_child=_forget)
