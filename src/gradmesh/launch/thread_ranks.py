"""Thread ranks of this process: started once, run functions, and are stopped at the end."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradmesh import _torch
from gradmesh._util.call_sites import stack_of, stack_text
from gradmesh.backends import threads
from gradmesh.backends.threads.rendezvous import World
from gradmesh.errors import AbortedError
from gradmesh.launch.outcomes import FAILURE_GRACE, POLL, Failure, Outcome, group_timeout
from gradmesh.launch.output import (
    flush_incomplete_lines,
    prefixed_streams,
    prefixes,
    set_prefix,
    thread_prefix,
)
from gradmesh.runtime.state import RankState, run_to_end

_END_GRACE = 2.0
"""Seconds that a thread has to stop before it is abandoned as a daemon."""


class _End(SystemExit):
    """Raised inside a rank's thread to stop it."""


class ThreadRanks:
    """The threads of one world, which keep their process groups between runs."""

    def __init__(self, size: int, timeout: float | None, prefix: bool | None) -> None:
        threads.register()
        self.size = size
        self.alive = True
        self.timeout = timeout
        # The prefix of a rank that launches ranks precedes theirs.
        outer, line_prefixes = thread_prefix(), prefixes(size, prefix)
        self._prefixes = (
            [outer] * size if line_prefixes is None else [(outer or "") + prefix for prefix in line_prefixes]
        )
        self._world = World(size)
        self._jobs: list[queue.SimpleQueue[Callable[[], object] | None]] = [
            queue.SimpleQueue() for _ in range(size)
        ]
        self._ended: queue.SimpleQueue[tuple[int, object, Failure | None]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"gradmesh rank {rank}", daemon=True)
            for rank in range(size)
        ]
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        for thread in self._threads:
            thread.start()
        try:
            limit = group_timeout(self.timeout)
            join = partial(
                dist.init_process_group, "threads", store=self._store, world_size=size, timeout=limit
            )
            self._run([partial(join, rank=rank) for rank in range(size)], None).values()
        except BaseException:
            self.kill()
            raise

    def run(self, fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
        """Call the function on every rank; a failure stops all ranks."""
        return self._run([lambda: fn(*args, **kwargs)] * self.size, self.timeout)

    def close(self) -> None:
        """Destroy the process group on every rank, and stop the threads."""
        if self.alive:
            self.alive = False
            with contextlib.suppress(Exception):
                self._run([_leave_world] * self.size, _END_GRACE)
            self._end_threads()

    def kill(self) -> None:
        """Stop the threads by an exception; not possible inside C code."""
        self.alive = False
        self._world.stop(lambda: AbortedError.of("the launch was stopped"))
        self._end_threads()

    def _run(self, jobs: Sequence[Callable[[], object]], timeout: float | None) -> Outcome:
        with contextlib.nullcontext() if self._prefixes[0] is None else prefixed_streams():
            return self._collect(jobs, timeout)

    def _collect(self, jobs: Sequence[Callable[[], object]], timeout: float | None) -> Outcome:
        outcome = Outcome(self.size, timeout=timeout)
        intra_op = torch.get_num_threads()
        self._world.begin()
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        try:
            with _torch.thread_isolation():
                for jobs_of_rank, job in zip(self._jobs, jobs, strict=True):
                    jobs_of_rank.put(job)
                while outcome.missing:
                    left = deadline - time.monotonic()
                    try:
                        # Short waits, so that Ctrl-C is handled promptly. What ended in time is read after it, too.
                        rank, result, failure = self._ended.get(timeout=max(0.0, min(POLL, left)))
                    except queue.Empty:
                        if left <= 0:
                            break
                        continue
                    if failure is None:
                        outcome.results[rank] = result
                        continue
                    outcome.failures.append(failure)
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
            for rank in outcome.missing:
                stack = stack_of(self._threads[rank].ident)
                outcome.unfinished[rank] = stack_text(stack, below=__file__)
        except BaseException:  # Ctrl-C
            self.kill()
            raise
        finally:
            # The ranks divide the cores; MKL keeps the last number that any of them set.
            torch.set_num_threads(intra_op)
        if outcome.failures or outcome.missing:
            self.kill()
        return outcome

    def _end_threads(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        deadline = time.monotonic() + FAILURE_GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread for thread in self._threads if thread.is_alive()]
        deadline = time.monotonic() + _END_GRACE
        # Repeatedly, since code with a bare except may swallow the exception.
        while late and time.monotonic() < deadline:
            for thread in late:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_End)
                )
            late[0].join(0.05)
            late = [thread for thread in late if thread.is_alive()]

    def _serve(self, rank: int) -> None:
        """The main function of a rank's thread."""
        set_prefix(self._prefixes[rank])
        intra_op = max(1, torch.get_num_threads() // self.size)
        with contextlib.suppress(_End), threads.seated(self._world, rank, RankState()):
            while (job := self._jobs[rank].get()) is not None:
                with _torch.thread_isolation():
                    torch.set_num_threads(intra_op)
                    self._ended.put(self._do(rank, job))
                del job

    def _do(self, rank: int, job: Callable[[], object]) -> tuple[int, object, Failure | None]:
        try:
            try:
                result = run_to_end(job)
            finally:
                flush_incomplete_lines()
        except BaseException as error:
            failure = Failure.of(rank, error)
            self._world.leave(rank, error)
            return rank, None, failure
        self._world.leave(rank)
        return rank, result, None


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
