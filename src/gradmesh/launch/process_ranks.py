"""Process ranks on this host: started once, run functions, and are stopped at the end.

On Linux the ranks of a world are forked from one process that has imported torch, the template: the import takes a
second of a processor and most of a rank's memory. Ranks that may use NCCL, and those on other systems, are processes of
their own: a process that has initialized CUDA, or a framework of macOS, must not fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import io
import itertools
import math
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradmesh import _torch
from gradmesh.backends import shm
from gradmesh.launch.hang_detector import MainThread, Probe
from gradmesh.launch.outcomes import FAILURE_GRACE, POLL, START_LIMIT, Failure, Outcome, group_timeout
from gradmesh.launch.output import OutputPipes
from gradmesh.launch.pickling import Origin, dumps, dumps_result
from gradmesh.runtime.state import run_to_end


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback interface for MASTER_PORT, which no other program is given meanwhile.

    It is bound and does not listen: a listener that sets SO_REUSEADDR, as torch's stores do, may bind it too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class PrivateStore:
    """The launcher's end of the rendezvous store: a file that only its ranks can open.

    torch's TCPStore listens on every interface without authentication, so that any host and any user could write to it.
    A file needs no port. On Linux it is an anonymous file in memory (`memfd_create`), which the ranks inherit as a file
    descriptor and which disappears with the last of them; elsewhere it is in a folder that only this user can access.
    """

    def __init__(self) -> None:
        self.descriptors: tuple[int, ...] = ()
        self._folder: str | None = None
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            fd = os.memfd_create("store of ranks", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)
            self.descriptors = (fd,)
            self.path = f"/proc/self/fd/{fd}"
        else:
            self._folder = tempfile.mkdtemp(prefix="gradmesh-")  # with mode 0700
            self.path = os.path.join(self._folder, "store")

    def close(self) -> None:
        """Release the file; can be called repeatedly."""
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors = ()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def join(path: str, size: int) -> Any:
    """A rank's end of the store."""
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def join_only(path: str, size: int) -> None:
    """Use the store for every `init_process_group` from the environment, with separate keys for each world."""
    store, worlds = join(path, size), itertools.count()
    _torch.join_through(lambda: PrefixStore(f"world {next(worlds)}", store))


_QUIET = 5.0
"""Seconds of a run after which the hang detector runs although no rank has returned."""
FORKS = sys.platform == "linux"
"""Whether ranks are forked from a template."""
_EXIT_GRACE = 10.0
"""Seconds for a process to exit when requested."""
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}

_Ends = tuple[int, int, int]
"""A rank's file descriptors: its connection to the parent, its standard output, its standard error."""


class _Template:
    """What the parent knows of the process that several ranks are forked from, or that is a rank itself.

    `reports` is its connection; None if it is a rank.
    """

    def __init__(self, process: subprocess.Popen[bytes], reports: Connection[Any, Any] | None) -> None:
        self._process, self._reports = process, reports
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def exit_code(self, rank: int, timeout: float | None = 0.0) -> int | None:
        """The exit code of a rank, negative for a signal; None if it still runs after some seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._reports is not None and rank not in self._codes:
            if not self._reports.poll(None if timeout is None else max(0.0, end - time.monotonic())):
                return None
            try:
                self._pids, self._codes = self._reports.recv()
            except (EOFError, OSError):  # it was killed: its ranks end with their connections
                return self._process.wait()
        if self._reports is not None:
            return self._codes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process group of a rank, which may outlive it; to the template before it forks."""
        self.exit_code(rank)
        with contextlib.suppress(OSError):
            os.killpg(self._pids.get(rank, self._process.pid), number)

    def close(self) -> None:
        """Let the process end."""
        if self._reports is not None:
            with contextlib.suppress(OSError):
                self._reports.send(None)  # a child that this process has forked may hold the connection too
            self._reports.close()
        self._process.wait()


class ProcessRanks:
    """The processes of one world, which rendezvous through a private store."""

    def __init__(self, size: int, backend: str, timeout: float | None, prefix: bool | None) -> None:
        self.size = size
        self.alive = True
        self.timeout = timeout
        self._on_cpu = backend in ("shm", "gloo")  # these progress only with CPU time: an idle wait is a hang
        self._templates: list[_Template] = []  # that of each rank
        self._pipes: list[Connection[Any, Any]] = []
        self._output = OutputPipes(size, prefix)
        self._store = PrivateStore()
        self._held = contextlib.ExitStack()
        # For programs that create a store from the environment.
        self._port = self._held.enter_context(held_port())
        try:
            for ranks in [range(size)] if FORKS and self._on_cpu else [[rank] for rank in range(size)]:
                self._start(ranks, backend)
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
                while None in [each.exit_code(rank) for rank, each in enumerate(self._templates)]:
                    if time.monotonic() > deadline:
                        break
                    # Read the output of exiting ranks, which would block on a full pipe.
                    self._output.show(wait(self._output.open, 0.02))
            finally:
                self.kill()

    def kill(self) -> None:
        """Kill every process and its child processes."""
        self.alive = False
        for rank, template in enumerate(self._templates):
            template.kill(rank)
        for rank, template in enumerate(self._templates):
            template.exit_code(rank, None)
        for template in set(self._templates):
            template.close()
        try:
            # Show the remaining output; a failure to do so must not hide the ranks' errors.
            with contextlib.suppress(OSError, ValueError):
                self._output.drain()
        finally:
            self._output.close()
            self._store.close()
            self._held.close()
            for pipe in self._pipes:
                pipe.close()
            self._templates, self._pipes = [], []

    def _start(self, ranks: Sequence[int], backend: str) -> None:
        """Start a process that becomes a rank, or forks several."""
        environment = {
            **os.environ,
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(ranks[0]),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
        }
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.size)))
        if sys.platform in _LOOPBACK:
            # Gloo listens on this interface without authentication.
            environment["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
        with contextlib.ExitStack() as theirs:
            ends: dict[int, _Ends] = {}
            for rank in ranks:
                parent_end, rank_end = Pipe()
                self._pipes.append(parent_end)
                (out, out_end), (err, err_end) = os.pipe(), os.pipe()
                self._output.add(rank, out, err)
                ends[rank] = (theirs.enter_context(rank_end).fileno(), out_end, err_end)
                theirs.callback(os.close, out_end)
                theirs.callback(os.close, err_end)
            reports, their_end = Pipe() if len(ranks) > 1 else (None, None)
            if their_end is not None:
                theirs.enter_context(their_end)
            last = [] if their_end is None else [their_end.fileno()]
            # Set sys.path before any import. multiprocessing is not used, because it would run __main__ again.
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from gradmesh.launch.process_ranks import start; "
                f"start({ends!r}, {last!r}, {backend!r}, {self.timeout!r}, {self._store.path!r})"
            )
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            _, out_end, err_end = ends[ranks[0]]
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                env=environment,
                pass_fds=[*(fd for own in ends.values() for fd in own), *last, *self._store.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                start_new_session=True,  # Ctrl-C reaches only the parent, which stops the ranks
            )
        self._templates += [_Template(process, reports)] * len(ranks)

    def _collect(self, expected: str, timeout: float | None) -> Outcome:
        """Wait for the answers of all ranks, a failure, a hang or the timeout."""
        outcome = Outcome(self.size, timeout=timeout)
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        probe, begin = Probe(lambda rank: self._ask(rank, "waits")), time.monotonic()
        while outcome.missing:
            late = time.monotonic() >= deadline
            pipes = {self._pipes[rank]: rank for rank in outcome.missing}
            # Short waits: a process may have died while its child process keeps the pipe open.
            awaited: list[Connection[Any, Any] | int] = [*pipes, *self._output.open]
            ready = wait(awaited, min(POLL, max(0.0, deadline - time.monotonic())))
            self._output.show(ready)
            if late and not any(isinstance(each, Connection) for each in ready):
                break  # what was answered in time was read
            failed = bool(outcome.failures)
            for rank in [pipes[pipe] for pipe in ready if isinstance(pipe, Connection)]:
                self._read(rank, expected, outcome, probe)
            for rank in outcome.missing:
                if self._templates[rank].exit_code(rank) is not None and not self._pipes[rank].poll():
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
            self._request_stacks(expected, outcome, probe)
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
        code = self._templates[rank].exit_code(rank, _EXIT_GRACE)
        if code is None:
            return Failure(
                rank, "a closed pipe", "its process closed the connection to the launcher but still runs"
            )
        if code < 0:
            with contextlib.suppress(ValueError):
                return Failure(rank, signal.Signals(-code).name, f"its process was killed by signal {-code}")
        return Failure(rank, f"exit code {code}", "its process exited before the function returned")

    def _request_stacks(self, expected: str, outcome: Outcome, probe: Probe) -> None:
        """Request the stacks of late ranks; a rank inside C code that holds the GIL does not answer."""
        for rank in outcome.missing:
            self._ask(rank, "where")
        deadline = time.monotonic() + FAILURE_GRACE
        while (silent := set(outcome.missing) - set(outcome.unfinished)) and time.monotonic() < deadline:
            pipes = {self._pipes[rank]: rank for rank in silent}
            for pipe in wait(list(pipes), max(0.0, deadline - time.monotonic())):
                if isinstance(pipe, Connection):
                    self._read(pipes[pipe], expected, outcome, probe)


_LIBC = ctypes.CDLL(None)


class _Parent:
    """A rank's connection to the process that owns the `ProcessRanks`.

    A thread reads the messages and queues calls, to exit immediately when the parent is gone, and to report the stack
    of the main thread while that is busy.
    """

    def __init__(self, fd: int) -> None:
        self.connection = Connection(fd)
        self.calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None marks the end
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


def start(
    ends: Mapping[int, _Ends], reports: Sequence[int], backend: str, timeout: float | None, store: str
) -> None:
    """Fork the ranks, and report their pids and the exit codes of those that have ended; or become the only rank."""
    pids: dict[int, int] = {}
    opened = {fd for own in ends.values() for fd in own}
    for rank, own in ends.items():
        pid = os.fork() if reports else 0
        if not pid:
            _become(rank, own, opened.union(reports))
            main(own[0], backend, timeout, store)
            gc.freeze()  # the last collection would copy all memory that ranks share
            return
        pids[rank] = pid
    for fd in opened:
        os.close(fd)
    parent: Connection[Any, Any] = Connection(reports[0])
    codes, sending = dict[int, int](), threading.Lock()

    def watch(rank: int, pid: int) -> None:
        # It is not reaped before the parent has killed its process group, whose id it is.
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert how is not None
        with sending, contextlib.suppress(OSError):
            codes[rank] = how.si_status * (1 if how.si_code == os.CLD_EXITED else -1)
            parent.send((pids, codes))

    parent.send((pids, codes))
    for each in pids.items():
        threading.Thread(target=watch, args=each, daemon=True).start()
    with open(os.devnull, "wb") as nothing:  # in place of rank 0's, which end with that
        for standard in (1, 2):
            os.dup2(nothing.fileno(), standard)
    with contextlib.suppress(EOFError, OSError):
        parent.recv()  # the parent's last word, or its end
    for pid in pids.values():
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _become(rank: int, own: _Ends, opened: Iterable[int]) -> None:
    """Make this process the one of a rank, which leads a process group."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if os.getsid(0) != os.getpid():
        os.setsid()
    for end, standard in zip(own[1:], (1, 2), strict=True):
        os.dup2(end, standard)
    for fd in set(opened) - {own[0]}:
        os.close(fd)
    seed_anew()


def seed_anew() -> None:
    """Seed the generators of a forked process, as those of a new interpreter are; Python's is already."""
    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def main(fd: int, backend: str, timeout: float | None, store: str) -> None:
    """Join the world through a store, serve calls until the parent ends it, and leave the world."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=stream.errors, line_buffering=True)
    faulthandler.enable(all_threads=False)  # prints the stack if the rank is killed by a signal
    parent = _Parent(fd)
    rank = int(os.environ["RANK"])
    if os.environ["OMP_NUM_THREADS"].isdigit():  # torch without OpenMP ignores the variable
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    size = int(os.environ["WORLD_SIZE"])
    try:
        if "nccl" in backend:
            _choose_gpu(rank, size)
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


def _choose_gpu(rank: int, size: int) -> None:
    """Select the rank's GPU; ranks that are more than the GPUs share them.

    NCCL refuses two ranks on one GPU of a host, so each is a host of its own to it, and sends through sockets.
    """
    gpus = max(1, torch.cuda.device_count())
    torch.cuda.set_device(rank % gpus)
    if size > gpus:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
        if rank == 0:
            warnings.warn(
                f"{size} ranks share {gpus} GPU(s): NCCL sends through sockets, for tests", stacklevel=2
            )


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
        return "failed", _dumps(
            dataclasses.replace(
                Failure.of(rank, error),
                text=f"the function's result, a {type(result).__name__}, cannot be pickled: {error}",
                remedy="return tensors, numbers or containers of them, or use backend='threads'",
            )
        )
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


def _dumps(failure: Failure) -> bytes:
    """Pickle a failure; without its exception if that cannot be pickled and unpickled."""
    with contextlib.suppress(Exception):
        data = dumps_result(failure)
        pickle.loads(data)  # an exception with a custom __init__ may fail to unpickle
        return data
    return pickle.dumps(dataclasses.replace(failure, cause=None))
