"""Base classes of torch's `Work` for pending calls, several works as one, and futures.

torch.distributed returns a work to callers with `async_op=True`. DDP requests its future and waits for that in C++,
where the waiting thread runs no Python; so futures are completed by another thread (see `Promise`).
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

__all__ = ["CoalescedWorks", "Done", "OwnWork", "Promise", "promised"]


class OwnWork(dist.Work):
    """A pending call of one rank. Subclasses implement waiting and polling.

    Args:
        result: the value of `result()` and the future.

    Attributes:
        future: a future that was requested before the call completed; another thread completes it.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_compiled(cls)

    def __init__(self, result: object) -> None:
        super().__init__()
        self.given = result
        self.future: torch.futures.Future[Any] | None = None

    # -- implemented by subclasses

    @abc.abstractmethod
    def finish(self, seconds: float | None) -> None:
        """Wait until the call has completed; None: with the group's timeout.

        Raises:
            GradmeshError: the call failed or timed out.
        """

    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether the call has completed or failed; advances it without waiting."""

    @override
    @abc.abstractmethod
    def exception(self) -> BaseException | None:
        """The error of the call, or None."""

    def late(self) -> list[int]:
        """The ranks of the group that the call still waits for."""
        return []

    # -- torch's interface

    @override
    def is_completed(self) -> bool:
        """Whether `wait` would return or raise immediately: the call has completed, and so has its future."""
        return self.is_over() and (self.future is None or self.future.done())

    @override
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until the call and its future have completed; torch passes None or zero for the group's timeout."""
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            self.finish(seconds if seconds > 0 else None)
        finally:
            if self.future is not None and self.is_over():
                with contextlib.suppress(Exception):  # the same error as that of the call
                    self.future.wait()
        return True

    @override
    def is_success(self) -> bool:
        """Whether the call has completed without an error."""
        return self.is_completed() and self.exception() is None

    @override
    def synchronize(self) -> None:
        """Wait, since there is no device stream."""
        self.wait()

    @override
    def result(self) -> Any:
        """Wait for the call and return its output tensors."""
        self.wait()
        return self.given

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        """Wait for the call and return a completed future with the result."""
        self.wait()
        return completed(self.given)

    def giving(self, result: object) -> OwnWork:
        """Set the value of `result()` and the future."""
        self.given = result
        return self


never_compiled(OwnWork)


class Done(OwnWork):
    """A completed call."""

    @override
    def finish(self, seconds: float | None) -> None:
        """Return immediately."""

    @override
    def is_over(self) -> bool:
        return True

    @override
    def exception(self) -> BaseException | None:
        return None


class CoalescedWorks(OwnWork):
    """Several works as one, for calls between `_start_coalescing` and `_end_coalescing`."""

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
    """A completed future."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


class Promise:
    """Creates and completes the future of a pending call.

    The thread that completes a call may be inside other code, and a callback (`future.then`) may wait for further
    calls, as PowerSGD's does. So futures are completed in a pool of threads, as Gloo does.

    An error is raised inside a callback: `Future.set_exception` sets an error that only Python recognizes; C++ would
    treat it as a list of tensors.
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
        except RuntimeError:  # at process exit no threads can be started
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


_threads = _new_threads()  # starts threads on first use


def _reset_after_fork() -> None:
    """Reset after fork: the threads do not exist in the child."""
    global _threads
    _threads = _new_threads()


with contextlib.suppress(AttributeError):  # systems without fork
    os.register_at_fork(after_in_child=_reset_after_fork)
