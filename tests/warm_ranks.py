"""Templates of ranks forked from a process that has imported torch, in place of new interpreters.

The import takes a second of CPU time or more for each world. A test that is about the start of ranks, or that sets a
variable that Python or torch read when they are imported, gets new interpreters: `fresh_ranks`.

`Processes.popen` stands for `subprocess.Popen` in `gradmesh.launch.process_ranks`. The server forks a keeper for each
process, which forks it and reports its exit status, because only a parent can wait for a process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

_READ_AT_IMPORT = ("PYTHON", "TORCH", "MKL", "KMP", "LD_", "MALLOC")  # gradmesh's are read when first needed
_HIGH = 300
"""Received descriptors are moved above this number, so that they do not occupy one that a rank expects."""


def read_at_import(name: str) -> bool:
    """Whether imports read this variable of the environment; one that was changed since needs a new interpreter."""
    return name.startswith(_READ_AT_IMPORT)


def _imported(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if read_at_import(name)}


class WarmProcess:
    """What `gradmesh.launch` uses of a `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], status: int) -> None:
        self.args = command
        self.returncode: int | None = None
        self._status = status
        self.pid: int = struct.unpack("i", os.read(status, 4))[0]

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self._read(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN | select.POLLHUP)
            if poll.poll(None if timeout is None else 1000 * timeout):
                got = os.read(self._status, 4)
                self.returncode = struct.unpack("i", got)[0] if got else -signal.SIGKILL
                os.close(self._status)
        return self.returncode


class Processes:
    """The server, started with the first rank.

    Attributes:
        fresh: whether each rank gets a new interpreter.
    """

    def __init__(self) -> None:
        self.fresh = False
        self._environment = dict(os.environ)
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._lock = threading.Lock()

    def popen(self, command: Sequence[str], **options: Any) -> Any:
        """As `subprocess.Popen`, for the command of a rank."""
        environment = options["env"]
        if self.fresh or _imported(environment) != _imported(self._environment):
            return subprocess.Popen(command, **options)
        with self._lock:
            standard = options["stdout"], options["stderr"]
            return self._fork(command, environment, standard, options["pass_fds"])

    def _fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        standard: tuple[int, int],
        passed: Sequence[int],
    ) -> WarmProcess:
        _, connection = self._server or self._start(command[:-2])
        status = os.pipe()
        given = [*standard, status[1], *passed]
        request = pickle.dumps((command[-1], dict(environment), passed, os.getcwd()))
        descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]
        connection.sendmsg([struct.pack("q", len(request))], descriptors)
        connection.sendall(request)
        os.close(status[1])
        return WarmProcess(command, status[0])

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            process, connection = self._server
            connection.close()
            process.communicate()
            self._server = None

    def _start(self, python: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"import runpy, sys; sys.path[:] = {sys.path!r}; module = runpy.run_path({__file__!r}); "
            code += f"module['serve']({theirs.fileno()})"
            process = subprocess.Popen(
                [*python, "-c", code],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as of a rank; nothing is written
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._server = process, ours
        return self._server


def serve(number: int) -> None:
    """In the server: fork ranks until the other end is closed."""
    import torch

    import gradmesh.launch.process_ranks  # noqa: F401
    import gradmesh_pytest.on_rank  # noqa: F401
    from gradmesh._util.environment import VARIABLES

    # The first use of an optimizer imports what takes as long as torch.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()
    read = [variable.name for variable in VARIABLES if variable.kept]
    assert not read, f"ranks would keep the server's values of {read}"
    gc.collect()
    connection = socket.socket(fileno=number)
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 8, 250)
        if not head:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        size = struct.unpack("q", head)[0]
        request = b""
        while len(request) < size:
            request += connection.recv(size - len(request))
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
        for fd in fds:
            os.close(fd)
        if os.fork() == 0:
            connection.close()
            _keep(high, *pickle.loads(request))
        for fd in high:
            os.close(fd)


def _keep(
    fds: list[int], code: str, environment: dict[str, str], targets: Sequence[int], folder: str
) -> None:
    """In a keeper: fork the rank, and report its end."""
    stdout, stderr, status, *passed = fds
    pid = os.fork()
    if pid != 0:
        for fd in (stdout, stderr, *passed):
            os.close(fd)
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        os.write(status, struct.pack("i", pid))
        poll = select.poll()
        poll.register(os.pidfd_open(pid), select.POLLIN)
        poll.register(status, 0)  # an error where nobody reads it any more
        poll.poll()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # the tests are gone: a rank that they stopped has to notice
        _, ended = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            os.write(status, struct.pack("i", os.waitstatus_to_exitcode(ended)))
        os._exit(0)
    os.setsid()
    for fd, target in zip((stdout, stderr, *passed), (1, 2, *targets), strict=True):
        os.dup2(fd, target)
    for fd in fds:
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    _run(code, vars(sys.modules["__main__"]))


def _run(code: str, names: dict[str, Any]) -> None:
    """Run the code and exit, as `multiprocessing` does without the teardown of modules, which takes long."""
    status = 0
    try:
        exec(code, names)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
