"""The main program of a rank that is a process. Its parent is `launch.process_ranks.ProcessRanks`.

A thread reads what the parent sends, so that the process notices at once when the parent is gone, and can say
where its main thread is while that one works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gradmesh.launch.outcomes import Failure, group_timeout
from gradmesh.launch.pickling import dumps_result

__all__ = ["main"]


class _Parent:
    """The connection to the parent; its thread serves questions and queues the calls."""

    def __init__(self, fd: int) -> None:
        self.connection = Connection(fd)
        self.calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="gradmesh parent", daemon=True).start()

    def tell(self, kind: str, payload: bytes = b"") -> None:
        """Send one message."""
        with self._lock:
            self.connection.send((kind, payload))

    def _read(self) -> None:
        try:
            while True:
                kind, payload = self.connection.recv()
                if kind == "where":
                    self.tell("where", _where_main_is().encode())
                else:
                    self.calls.put(payload if kind == "call" else None)
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and with it everybody who could want a result


def _where_main_is() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    stack = traceback.extract_stack(frame)
    inside = [i for i, entry in enumerate(stack) if entry.filename == __file__]
    return "".join(traceback.format_list(stack[inside[-1] + 1 :] or stack))


def main(fd: int, backend: str, timeout: float | None) -> None:
    """Join the world, serve calls until the parent says that it is over, and leave the world."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = _Parent(fd)
    rank = int(os.environ["RANK"])
    if os.environ["OMP_NUM_THREADS"].isdigit():  # torch built without OpenMP does not read it itself
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        if "nccl" in backend:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=group_timeout(timeout))
    except BaseException as error:
        parent.tell("failed", _failure(Failure.of(rank, error)))
        parent.calls.get()
        return
    parent.tell("ready")
    while (call := parent.calls.get()) is not None:
        kind, payload = _serve(rank, call)
        del call
        sys.stdout.flush()
        sys.stderr.flush()
        parent.tell(kind, payload)
        del payload
        if kind == "failed":
            # The group stays open, so that the others do not see a lost connection before the parent acts.
            parent.calls.get()
            return
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(rank: int, call: bytes) -> tuple[str, bytes]:
    try:
        fn, args, kwargs = pickle.loads(call)
        result = fn(*args, **kwargs)
    except BaseException as error:
        return "failed", _failure(Failure.of(rank, error))
    try:
        return "returned", dumps_result(result)
    except Exception as error:
        return "failed", _failure(_unpicklable(rank, result, error))


def _unpicklable(rank: int, result: object, error: Exception) -> Failure:
    failure = Failure.of(rank, error)
    return dataclasses.replace(
        failure,
        kind=type(error).__name__,
        text=f"the function's result, a {type(result).__name__}, cannot be pickled to leave its process: {error}\n"
        "return tensors, numbers and containers of them, or use backend='threads'",
        when=time.monotonic(),
    )


def _failure(failure: Failure) -> bytes:
    with contextlib.suppress(Exception):
        data = dumps_result(failure)
        pickle.loads(data)  # an exception with an __init__ of its own may pickle and not come back
        return data
    return pickle.dumps(dataclasses.replace(failure, cause=None))
