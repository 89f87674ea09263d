"""The main program of a rank that is a process. Its parent is the process that has the `ProcessRanks`.

A thread reads what the parent sends, so that the process notices at once when the parent is gone, and can say
where its main thread is while that one works.
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
    """The connection to the parent; its thread serves questions and queues the calls.

    Attributes:
        calls: the pickles of the calls to make; None when there will be no more.
        origin: where the functions of the last call that go by value come from.
    """

    def __init__(self, fd: int) -> None:
        self.connection = Connection(fd)
        self.calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.origin: Origin | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="gradmesh parent", daemon=True).start()

    def tell(self, kind: str, payload: bytes = b"") -> None:
        """Send one message."""
        with self._lock:
            self.connection.send((kind, payload))

    def _read(self) -> None:
        main_thread = MainThread()
        try:
            while True:
                kind, payload = self.connection.recv()
                if kind == "where":
                    self.tell("where", main_thread.stack(__file__).encode())
                elif kind == "waits":
                    waits = main_thread.waits(), main_thread.stack(__file__)
                    self.tell("waits", pickle.dumps(waits))
                elif kind == "origin":
                    self.origin = pickle.loads(payload)
                else:
                    self.calls.put(payload if kind == "call" else None)
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and with it everybody who could want a result


def main(fd: int, backend: str, timeout: float | None, store: str) -> None:
    """Join the world through a store, serve calls until the parent says that it is over, and leave the world."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _set_up_output()
    faulthandler.enable(all_threads=False)  # a rank that a signal kills says where it was
    parent = _Parent(fd)
    rank = int(os.environ["RANK"])
    if os.environ["OMP_NUM_THREADS"].isdigit():  # torch built without OpenMP does not read it itself
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
        parent.tell("failed", _dumps(Failure.of(rank, error)))
        parent.calls.get()
        return
    parent.tell("ready")
    for number in itertools.count(1):
        call = parent.calls.get()
        if call is None:
            break
        shm.run.begin(number)
        kind, payload = _serve(rank, call, parent.origin)
        del call
        _flush()
        parent.tell(kind, payload)
        del payload
        if kind == "failed":
            # The group stays open, so that the others do not see a lost connection before the parent acts.
            parent.calls.get()
            return
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_up_output() -> None:
    """Send each line as soon as it is printed, as to a terminal: the parent reads UTF-8 from a pipe."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=stream.errors, line_buffering=True)


def _flush() -> None:
    """Send what was printed, so that the parent has it before it has the result."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have put anything in their place
            stream.flush()
    _LIBC.fflush(None)  # what C code printed


def _serve(rank: int, call: bytes, origin: Origin | None) -> tuple[str, bytes]:
    """Make one call, and return the kind and the payload of the answer."""
    if origin is not None:
        origin.adopt_lines()
    try:
        fn, args, kwargs = pickle.loads(call)
        result = run_to_end(lambda: fn(*args, **kwargs))
    except BaseException as error:
        shm.run.end(failed=True)
        return "failed", _dumps(_with_lost_global(Failure.of(rank, error), error, origin))
    try:
        answer = "returned", dumps_result(result)
    except Exception as error:
        shm.run.end(failed=True)
        return "failed", _dumps(_unpicklable(rank, result, error))
    shm.run.end(failed=False)
    return answer


def _with_lost_global(failure: Failure, error: BaseException, origin: Origin | None) -> Failure:
    """Say so where the function missed a global because it was sent by value."""
    lost = None if origin is None else origin.lost_global(error)
    if lost is None:
        return failure
    name, module = lost
    return dataclasses.replace(
        failure,
        text=f"{failure.text}\n{name!r} is a global of {module} in the launching process, and was looked up here by "
        "globals(), eval, exec or the like",
        expected="code that names the globals it uses: the function was sent by value, and globals that its code does "
        "not name do not travel to the ranks",
        remedy=f"name {name} in the code of the function, pass it as an argument, or move the function to a module "
        "that the ranks can import",
    )


def _unpicklable(rank: int, result: object, error: Exception) -> Failure:
    return dataclasses.replace(
        Failure.of(rank, error),
        text=f"the function's result, a {type(result).__name__}, cannot be pickled to leave its process: {error}",
        remedy="return tensors, numbers and containers of them, or use backend='threads'",
    )


def _dumps(failure: Failure) -> bytes:
    """Pickle a failure, without its exception where that does not survive it."""
    with contextlib.suppress(Exception):
        data = dumps_result(failure)
        pickle.loads(data)  # an exception with an __init__ of its own may pickle and not come back
        return data
    return pickle.dumps(dataclasses.replace(failure, cause=None))
