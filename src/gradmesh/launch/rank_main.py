"""The main program of a process rank. Its parent is the process that owns the `ProcessRanks`.

A thread reads the parent's messages, to exit immediately when the parent is gone, and to report the stack of the main
thread while that is busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gradmesh.backends import shm
from gradmesh.launch.hang_detector import MainThread
from gradmesh.launch.outcomes import Failure, group_timeout
from gradmesh.launch.pickle_by_value import Origin
from gradmesh.launch.pickling import dumps_result
from gradmesh.launch.private_store import join, join_only
from gradmesh.state import run_to_end

__all__ = ["main"]

_LIBC = ctypes.CDLL(None)


class _Parent:
    """The connection to the parent; a thread answers queries and queues calls.

    Attributes:
        calls: pickled calls; None marks the end.
        origin: the origin of functions in the last call that were sent by value.
    """

    def __init__(self, fd: int) -> None:
        self.connection = Connection(fd)
        self.calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.origin: Origin | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="gradmesh parent", daemon=True).start()

    def send(self, kind: str, payload: bytes = b"") -> None:
        """Send one message."""
        with self._lock:
            self.connection.send((kind, payload))

    def _read(self) -> None:
        main_thread = MainThread()
        try:
            while True:
                kind, payload = self.connection.recv()
                if kind == "where":
                    self.send("where", main_thread.stack(__file__).encode())
                elif kind == "waits":
                    waits = main_thread.waits(), main_thread.stack(__file__)
                    self.send("waits", pickle.dumps(waits))
                elif kind == "origin":
                    self.origin = pickle.loads(payload)
                else:
                    self.calls.put(payload if kind == "call" else None)
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone


def main(fd: int, backend: str, timeout: float | None, store: str) -> None:
    """Join the world through a store, serve calls until the parent ends it, and leave the world."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _set_up_output()
    faulthandler.enable(all_threads=False)  # prints the stack if the rank is killed by a signal
    parent = _Parent(fd)
    rank = int(os.environ["RANK"])
    if os.environ["OMP_NUM_THREADS"].isdigit():  # torch without OpenMP ignores the variable
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        if "nccl" in backend:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        size = int(os.environ["WORLD_SIZE"])
        join_only(store, size)
        dist.init_process_group(
            backend, store=join(store, size), rank=rank, world_size=size, timeout=group_timeout(timeout)
        )
    except BaseException as error:
        parent.send("failed", _dumps(Failure.of(rank, error)))
        parent.calls.get()
        return
    parent.send("ready")
    for number in itertools.count(1):
        call = parent.calls.get()
        if call is None:
            break
        shm.run.begin(number)
        kind, payload = _serve(rank, call, parent.origin)
        del call
        _flush()
        parent.send(kind, payload)
        del payload
        if kind == "failed":
            # Keep the group open, so that other ranks do not report a lost connection before the parent acts.
            parent.calls.get()
            return
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_up_output() -> None:
    """Use line buffering and UTF-8 for the pipes to the parent."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=stream.errors, line_buffering=True)


def _flush() -> None:
    """Flush all output, so that the parent receives it before the result."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have replaced them
            stream.flush()
    _LIBC.fflush(None)  # output of C code


def _serve(rank: int, call: bytes, origin: Origin | None) -> tuple[str, bytes]:
    """Run one call, and return the kind and payload of the answer."""
    if origin is not None:
        origin.adopt_lines()
    try:
        fn, args, kwargs = pickle.loads(call)
        result = run_to_end(lambda: fn(*args, **kwargs))
    except BaseException as error:
        shm.run.end(failed=True)
        return "failed", _dumps(_explain_missing_global(Failure.of(rank, error), error, origin))
    try:
        answer = "returned", dumps_result(result)
    except Exception as error:
        shm.run.end(failed=True)
        return "failed", _dumps(_unpicklable(rank, result, error))
    shm.run.end(failed=False)
    return answer


def _explain_missing_global(failure: Failure, error: BaseException, origin: Origin | None) -> Failure:
    """Explain a missing global of a function that was sent by value."""
    lost = None if origin is None else origin.missing_global(error)
    if lost is None:
        return failure
    name, module = lost
    return dataclasses.replace(
        failure,
        text=f"{failure.text}\n{name!r} is a global of {module} in the launching process, accessed on the rank by "
        "globals(), eval, exec or similar",
        expected="code that names the globals it uses: the function was sent by value, together with only the globals "
        "that its code names",
        remedy=f"use the name {name} directly in the function, pass it as an argument, or move the function to a "
        "module that the ranks can import",
    )


def _unpicklable(rank: int, result: object, error: Exception) -> Failure:
    return dataclasses.replace(
        Failure.of(rank, error),
        text=f"the function's result, a {type(result).__name__}, cannot be pickled: {error}",
        remedy="return tensors, numbers or containers of them, or use backend='threads'",
    )


def _dumps(failure: Failure) -> bytes:
    """Pickle a failure; without its exception if that cannot be pickled and unpickled."""
    with contextlib.suppress(Exception):
        data = dumps_result(failure)
        pickle.loads(data)  # an exception with a custom __init__ may fail to unpickle
        return data
    return pickle.dumps(dataclasses.replace(failure, cause=None))
