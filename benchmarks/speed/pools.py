"""The ranks that are timed: processes that hold all systems of torch, threads, and processes of MPI.

Between two requests of the parent every rank waits in a blocking read, and takes no time from the others.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from benchmarks.peak import peak_is_told
from benchmarks.speed import mpi
from benchmarks.speed.contenders import CONTENDERS, Contender
from benchmarks.speed.tasks import Task
from benchmarks.speed.worker import Worker
from gradmesh import Ranks
from gradmesh.errors import GradmeshError, message

__all__ = ["MpiPool", "Pool", "RanksPool", "open_pools"]

_LIMIT = 300.0
"""Seconds that the ranks may take for one request of the parent."""
_START_LIMIT = 60.0

_here = threading.local()
"""What a rank keeps from one run to the next, be it a process or a thread: `.worker`."""


class Pool(abc.ABC):
    """Ranks with a worker each; a context manager.

    Attributes:
        names: the contenders that are timed here.
        left_out: those that are not, and why.
        weighs: True if a rank's peak memory can be measured.
    """

    names: list[str]
    left_out: dict[str, str]
    weighs: bool

    @abc.abstractmethod
    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of each rank's worker; returns each rank's result."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the ranks."""

    def check(self, task: Task, names: Sequence[str]) -> dict[tuple[str, str], list[Tensor | str]]:
        """All ranks' results of each contender both ways, or errors."""
        ranks = self.call("check", task, names)
        return {key: [found[key] for found in ranks] for key in ranks[0]}

    def sample(self, way: str, numbers: Mapping[str, int]) -> dict[str, float]:
        """The seconds that the slowest rank takes for so many calls of each contender."""
        ranks = self.call("sample", way, numbers)
        return {name: max(found[name] for found in ranks) for name in numbers}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RanksPool(Pool):
    """Ranks of `gradmesh.Ranks`.

    Args:
        size: how many.
        backend: "gloo" for processes, where groups of other backends are made too, or "threads".
        contenders: who is timed.
    """

    def __init__(self, size: int, backend: str, contenders: Sequence[Contender]) -> None:
        self._ranks = Ranks(size, backend, timeout=_LIMIT)
        self._threads = backend == "threads"
        self.weighs = not self._threads and peak_is_told()
        try:
            reasons = self._ranks.run(set_up, [c.name for c in contenders], quiet=not self._threads)[0]
        except BaseException:
            self.close()
            raise
        self.left_out = {c.name: reasons[c.backend] for c in contenders if c.backend in reasons}
        self.names = [c.name for c in contenders if c.name not in self.left_out]

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of each rank's worker; returns each rank's result."""
        with _collector_as_it_was():
            return self._ranks.run(on_rank, method, *args)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()


def set_up(names: Sequence[str], quiet: bool) -> dict[str, str]:
    """Make this rank's worker, and the groups of the backends; returns the backends that are not to be had.

    Args:
        names: the contenders.
        quiet: whether the process is there for this alone, and may keep warnings of the systems to itself.
    """
    if quiet:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    own = dist.get_backend()
    groups: dict[str, Any] = {own: dist.group.WORLD}
    reasons: dict[str, str] = {}
    for backend in {CONTENDERS[name].backend: None for name in names if CONTENDERS[name].backend}:
        if backend not in groups:
            try:
                groups[backend] = dist.new_group(backend=backend)
            except Exception as error:
                reasons[backend] = f"{type(error).__name__}: {error}"
    there = [CONTENDERS[name] for name in names if CONTENDERS[name].backend not in reasons]
    _here.worker = Worker(dist.get_rank(), there, groups, dist.barrier)
    return reasons


def on_rank(method: str, *args: object) -> Any:
    """Call a method of this rank's worker."""
    return getattr(_here.worker, method)(*args)


@contextlib.contextmanager
def _collector_as_it_was() -> Iterator[None]:
    """Each of several threads with a Timer turns the garbage collector off, and leaves it as it found it: off."""
    on = gc.isenabled()
    try:
        yield
    finally:
        gc.enable() if on else gc.disable()


class MpiPool(Pool):
    """Ranks that mpiexec starts. Each listens at a socket of its own, to which the parent connects.

    Args:
        size: how many.
        contenders: who is timed.

    Attributes:
        version: the library.
    """

    def __init__(self, size: int, contenders: Sequence[Contender]) -> None:
        self.weighs, self.left_out = peak_is_told(), {}
        self.names = [contender.name for contender in contenders]
        self._connections: list[Connection[Any, Any]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gradmesh-bench-")
        key = secrets.token_hex()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "GRADMESH_BENCH_AT": self._folder.name,
            "GRADMESH_BENCH_KEY": key,
            "GRADMESH_BENCH_NAMES": ",".join(self.names),
        }
        program = [sys.executable, "-m", "benchmarks.speed.mpi_rank"]
        self._process = subprocess.Popen(
            [str(mpi.launcher()), "-n", str(size), *program],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C goes to the parent alone, which ends the ranks
        )
        try:
            for rank in range(size):
                self._connections.append(self._connect(str(Path(self._folder.name, str(rank))), key.encode()))
            self.version = str(self.call("version")[0])
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str, key: bytes) -> Connection[Any, Any]:
        deadline = time.monotonic() + _START_LIMIT
        while True:
            try:
                return Client(address, authkey=key)
            except (FileNotFoundError, ConnectionRefusedError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise _mpi_error("MPI's ranks did not start") from None
                time.sleep(0.02)

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of each rank's worker; returns each rank's result."""
        try:
            for connection in self._connections:
                connection.send_bytes(pickle.dumps((method, args)))
            deadline = time.monotonic() + _LIMIT
            for connection in self._connections:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise _mpi_error(f"MPI's ranks did not return within {_LIMIT:g} s")
            return [pickle.loads(connection.recv_bytes()) for connection in self._connections]
        except (EOFError, OSError) as error:
            raise _mpi_error("a rank of MPI has died; what it said is above") from error

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
                connection.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGTERM)  # which mpiexec passes on to the ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


def _mpi_error(problem: str) -> GradmeshError:
    remedy = "see whether `mpiexec -n 2 hostname` works, or choose the other systems with --system"
    return GradmeshError(message(problem, remedy=remedy))


@contextlib.contextmanager
def open_pools(size: int, contenders: Sequence[Contender]) -> Iterator[list[Pool]]:
    """The pools that these contenders need."""
    here: dict[str, list[Contender]] = {"gloo": [], "threads": [], "MPI": []}
    for contender in contenders:
        kind = "MPI" if contender.backend == "mpi4py" else contender.backend
        here[kind if kind in here else "gloo"].append(contender)
    with contextlib.ExitStack() as stack:
        pools: list[Pool] = []
        for kind, those in here.items():
            if those:
                made = MpiPool(size, those) if kind == "MPI" else RanksPool(size, kind, those)
                pools.append(stack.enter_context(made))
        yield pools
