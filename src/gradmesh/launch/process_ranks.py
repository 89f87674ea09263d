"""Process ranks on this host: started once, run functions, and are stopped at the end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from gradmesh.launch.hang_detector import Probe
from gradmesh.launch.outcomes import FAILURE_GRACE, POLL, START_LIMIT, Failure, Outcome
from gradmesh.launch.output_pipes import OutputPipes
from gradmesh.launch.pickling import dumps
from gradmesh.launch.ports import free_port
from gradmesh.launch.private_store import PrivateStore

__all__ = ["ProcessRanks"]

_QUIET = 5.0
"""Seconds of a run after which the hang detector runs although no rank has returned."""
_CPU_BACKENDS = ("shm", "gloo")
"""Backends that need CPU time to make progress, so that an idle wait is a hang."""
_EXIT_GRACE = 10.0
"""Seconds for a process to exit when requested."""
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_EXIT_POLL = 0.02
"""Seconds between two checks whether it has exited."""


class ProcessRanks:
    """The processes of one world, which rendezvous through a private store.

    Args:
        size: the number of ranks.
        backend: the torch.distributed backend of the default process group.
        timeout: as for `gradmesh.launch`.
        prefix: as for `gradmesh.launch`.
    """

    def __init__(self, size: int, backend: str, timeout: float | None, prefix: bool | None) -> None:
        self.size = size
        self.alive = True
        self.timeout = timeout
        self._on_cpu = backend in _CPU_BACKENDS
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._output = OutputPipes(size, prefix)
        self._store = PrivateStore()
        self._free_port = free_port()  # for programs that create a store from the environment
        try:
            for rank in range(size):
                self._start(rank, backend)
            self._collect("ready", START_LIMIT).values()
        except BaseException:
            self.kill()
            raise

    def run(self, fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
        """Call the function on every rank; a failure stops all ranks."""
        call, origin = dumps((fn, tuple(args), dict(kwargs)))
        about = pickle.dumps(origin)
        try:
            for pipe in self._pipes:
                # A process that died since the last run is detected when its answer is awaited.
                with contextlib.suppress(OSError):
                    pipe.send(("origin", about))
                    pipe.send(("call", call))
            return self._collect("returned", self.timeout)
        except BaseException:  # Ctrl-C
            self.kill()
            raise

    def close(self) -> None:
        """Let every process leave its group and exit."""
        if self.alive:
            try:
                for pipe in self._pipes:
                    with contextlib.suppress(OSError):
                        pipe.send(("exit", b""))
                deadline = time.monotonic() + _EXIT_GRACE
                while any(process.poll() is None for process in self._processes):
                    if time.monotonic() > deadline:
                        break
                    # Read the output of exiting ranks, which would block on a full pipe.
                    self._output.show(wait(self._output.open, _EXIT_POLL))
            finally:
                self.kill()

    def kill(self) -> None:
        """Kill every process and its child processes."""
        self.alive = False
        for process in self._processes:
            # A rank leads a process group, which may outlive it.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        try:
            # Show the remaining output; a failure to do so must not hide the ranks' errors.
            with contextlib.suppress(OSError, ValueError):
                self._output.drain()
        finally:
            self._output.close()
            self._store.close()
            for pipe in self._pipes:
                pipe.close()
            self._processes, self._pipes = [], []

    def _start(self, rank: int, backend: str) -> None:
        parent_end, rank_end = Pipe()
        self._pipes.append(parent_end)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._free_port),
        }
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.size)))
        if sys.platform in _LOOPBACK:
            # Gloo listens on this interface without authentication.
            environment["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
        # Set sys.path before any import. multiprocessing is not used, because it would run __main__ again.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from gradmesh.launch.rank_main import main; "
            f"main({rank_end.fileno()}, {backend!r}, {self.timeout!r}, {self._store.path!r})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with rank_end:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                env=environment,
                pass_fds=[rank_end.fileno(), *self._store.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches only the parent, which stops the ranks
            )
        self._processes.append(process)
        self._output.add(rank, process)

    def _collect(self, expected: str, timeout: float | None) -> Outcome:
        """Wait for the answers of all ranks, a failure, a hang or the timeout."""
        outcome = Outcome(self.size, timeout=timeout)
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        probe, begin = Probe(lambda rank: self._ask(rank, "waits")), time.monotonic()
        while outcome.missing and time.monotonic() < deadline:
            pipes = {self._pipes[rank]: rank for rank in outcome.missing}
            # Short waits: a process may have died while its child process keeps the pipe open.
            awaited: list[Connection[Any, Any] | int] = [*pipes, *self._output.open]
            ready = wait(awaited, min(POLL, max(0.0, deadline - time.monotonic())))
            self._output.show(ready)
            failed = bool(outcome.failures)
            for rank in [pipes[pipe] for pipe in ready if isinstance(pipe, Connection)]:
                self._read(rank, expected, outcome, probe)
            for rank in outcome.missing:
                if self._processes[rank].poll() is not None and not self._pipes[rank].poll():
                    outcome.failures.append(self._death(rank))
            quiet = self._on_cpu and expected == "returned" and time.monotonic() - begin > _QUIET
            if (outcome.results or quiet) and outcome.missing and not outcome.failures:
                waiting = probe.waiting(outcome.missing, len(outcome.results))
                if waiting:
                    outcome.record_deadlock(waiting)
            if outcome.failures:
                deadline = min(deadline, outcome.failures[0].when + FAILURE_GRACE)
                for rank in () if failed else outcome.missing:
                    self._ask(rank, "where")
        if outcome.missing and not outcome.failures:
            self._request_stacks(outcome)
        if outcome.failures or outcome.missing:
            self.kill()
        else:
            self._output.drain()
        return outcome

    def _read(self, rank: int, expected: str, outcome: Outcome, probe: Probe) -> None:
        try:
            kind, payload = self._pipes[rank].recv()
        except (EOFError, OSError):
            outcome.failures.append(self._death(rank))
            return
        if kind == "where":
            outcome.unfinished[rank] = payload.decode()
        elif kind == "waits":
            probe.answer(rank, payload)
        elif kind == "failed":
            outcome.failures.append(pickle.loads(payload))
        elif kind == expected:
            try:
                outcome.results[rank] = pickle.loads(payload) if payload else None
            except Exception as error:
                text = f"its result cannot be unpickled in the launching process: {error}"
                outcome.failures.append(Failure(rank, type(error).__name__, text, cause=error))

    def _ask(self, rank: int, question: str) -> None:
        with contextlib.suppress(OSError):
            self._pipes[rank].send((question, b""))

    def _death(self, rank: int) -> Failure:
        process = self._processes[rank]
        try:
            code = process.wait(_EXIT_GRACE)
        except subprocess.TimeoutExpired:
            return Failure(
                rank, "a closed pipe", "its process closed the connection to the launcher but still runs"
            )
        if code < 0:
            with contextlib.suppress(ValueError):
                return Failure(rank, signal.Signals(-code).name, f"its process was killed by signal {-code}")
        return Failure(rank, f"exit code {code}", "its process exited before the function returned")

    def _request_stacks(self, outcome: Outcome) -> None:
        """Request the stacks of late ranks; a rank inside C code that holds the GIL does not answer."""
        for rank in outcome.missing:
            self._ask(rank, "where")
        deadline = time.monotonic() + FAILURE_GRACE
        while (silent := set(outcome.missing) - set(outcome.unfinished)) and time.monotonic() < deadline:
            pipes = {self._pipes[rank]: rank for rank in silent}
            for pipe in wait(list(pipes), max(0.0, deadline - time.monotonic())):
                if isinstance(pipe, Connection):
                    with contextlib.suppress(EOFError, OSError):
                        kind, payload = pipe.recv()
                        if kind == "where":
                            outcome.unfinished[pipes[pipe]] = payload.decode()
