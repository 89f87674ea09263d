"""Runs a test's function on a rank: resets state, runs the function, and returns its outcome."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pdb
import pickle
import random
import select
import shutil
import socket
import sys
import tempfile
import threading
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradmesh.launch.pickling import dumps_result
from gradmesh.runtime.state import rank_state
from gradmesh_pytest import rewriting


@dataclasses.dataclass(frozen=True)
class RankGenerator:
    """A `torch.Generator` for each rank."""

    seed: int

    def of(self, rank: int) -> torch.Generator:
        """Create a rank's generator."""
        return torch.Generator().manual_seed(self.seed + rank)


@dataclasses.dataclass
class Subtest:
    """The outcome of a subtest on a rank."""

    message: str | None
    values: dict[str, str]  # its keyword arguments
    error: BaseException | None = None  # its error, or None


class Subtests:
    """Replaces pytest's fixture `subtests` and `TestCase.subTest` on a rank; records the outcomes."""

    def __init__(self) -> None:
        self.ended: list[Subtest] = []

    @contextlib.contextmanager
    def test(self, msg: str | None = None, **kwargs: Any) -> Iterator[None]:
        """Run a block whose failure does not end the test."""
        found = Subtest(None if msg is None else str(msg), {name: repr(kwargs[name]) for name in kwargs})
        try:
            yield
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise  # raised by the launcher to stop the rank
        except BaseException as error:
            found.error = error
        self.ended.append(found)


def resolved(values: Mapping[str, object], rank: int, subtests: Subtests) -> dict[str, object]:
    """The fixture values on a rank."""

    def resolve(value: object) -> object:
        if isinstance(value, RankGenerator):
            return value.of(rank)
        return subtests if isinstance(value, Subtests) else value

    return {name: resolve(value) for name, value in values.items()}


_NAME = "_gradmesh_pytest"


@dataclasses.dataclass
class Attached:
    """Information that is sent with an error, as an attribute, to the pytest process."""

    kind: str = ""  # the name of its class
    place: tuple[str, int] = ("", 0)  # the file and line where it was raised
    # pytest's representation, created on the rank because frames cannot be pickled; None: frames are present
    shown: Any = None
    # the subtests of the function that raised it
    subtests: list[Subtest] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException | None) -> Attached:
        """The information attached to an error, or derived from its frames."""
        found = getattr(error, _NAME, None)
        if isinstance(found, cls) and found.kind:
            return found
        if error is None:
            return cls()
        subtests = found.subtests if isinstance(found, cls) else []
        return cls(type(error).__name__, place(error), None, subtests)


def attach(error: BaseException, what: Attached) -> None:
    """Attach information to an error."""
    setattr(error, _NAME, what)


def place(error: BaseException) -> tuple[str, int]:
    """The file and line where an error was raised."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


class Terminal:
    """Gives the first failed rank access to pytest's terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._folder = tempfile.mkdtemp(prefix="gradmesh-")  # only this user can access it
        self.address = os.path.join(self._folder, "pdb")
        self.was_used = False
        self.quits = False  # the user has left the debugger with `q`, which ends the session
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.address)
        self._door.listen()
        self._thread = threading.Thread(target=self._serve, name="gradmesh pdb", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                rank, _ = self._door.accept()
            except OSError:  # closed
                return
            with rank, contextlib.suppress(OSError):
                if not self.was_used:
                    self.was_used = True
                    rank.sendall(b"y")
                    self._connect(rank)

    def _connect(self, rank: socket.socket) -> None:
        """Forward input and output of the debugger until it ends."""
        if self._capture is not None:
            self._capture.suspend(in_=True)
        try:
            keys = [sys.stdin.fileno()]
            last = b""
            while True:
                ready, _, _ = select.select([rank, *keys], [], [])
                if rank in ready:
                    received = rank.recv(1 << 16)
                    if not received:
                        break
                    last = (last + received)[-1:]
                    sys.stdout.write(received.replace(_QUITS, b"").decode(errors="replace"))
                    sys.stdout.flush()
                    self.quits = last == _QUITS
                elif typed := os.read(keys[0], 1 << 16):
                    rank.sendall(typed)
                else:
                    keys = []
                    rank.shutdown(socket.SHUT_WR)
        finally:
            if self._capture is not None:
                self._capture.resume()


_QUITS = b"\x04"
"""Sent by the debugger after `q`."""


def debug(address: str, error: BaseException, heading: str) -> None:
    """Debug an error on this process rank, unless another rank uses the terminal."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as terminal:
        terminal.connect(address)
        if terminal.recv(1) != b"y":
            return
        with terminal.makefile("r") as stdin, terminal.makefile("w") as stdout:
            stdout.write(heading)
            debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
            if debugger.quitting:
                stdout.write(_QUITS.decode())


class StandIn(Exception):  # noqa: N818 - has the message of another error
    """Replaces an exception that cannot be pickled."""


@dataclasses.dataclass(frozen=True)
class Warned:
    """A warning that was issued on a process rank."""

    message: str
    category: type[Warning]
    filename: str
    lineno: int


@dataclasses.dataclass(frozen=True)
class Task:
    """The options of a run."""

    seed: int  # the test's seed
    is_process: bool  # whether the rank is a process
    wants_value: bool  # whether to return the function's result
    filters: tuple[Any, ...] = ()  # the warning filters for processes; empty: keep the process's filters
    terminal: str = ""  # the address of pytest's terminal, to debug a failure; empty without --pdb


@dataclasses.dataclass
class Answer:
    """The outcome of the function on a rank."""

    how: str = "passed"  # "passed", "skipped" or "xfailed"
    reason: str = ""  # the reason of a skip or xfail
    value: Any = None  # the return value
    subtests: list[Subtest] = dataclasses.field(default_factory=list)  # the outcomes of its subtests
    # whether the function replaced the rank's world, so that the ranks cannot be reused
    spoiled: bool = False
    warned: list[Warned] = dataclasses.field(default_factory=list)  # the warnings of a process

    @property
    def text(self) -> str:
        """The outcome and its reason."""
        return f"{self.how}: {self.reason}" if self.reason else self.how


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a `unittest.TestCase`, which is called on a separate copy for each rank."""

    case: unittest.TestCase
    name: str

    @property
    def shown(self) -> Callable[..., object]:
        """The function whose source is shown."""
        method: Callable[..., object] = getattr(self.case, self.name)
        return method

    def __call__(self, subtests: Subtests) -> object:
        """Call it."""
        case: Any = copy.copy(self.case)
        case.subTest = subtests.test
        return getattr(case, self.name)()


def run(fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], task: Task) -> Answer:
    """Run a function of a test on this rank."""
    __tracebackhide__ = True
    answer, subtests = Answer(), Subtests()
    world, dtype, grad_mode = dist.group.WORLD, torch.get_default_dtype(), torch.is_grad_enabled()
    rank = dist.get_rank()
    _reset_state()
    torch.manual_seed(task.seed + rank)
    if task.is_process:  # thread ranks share these generators
        random.seed(task.seed + rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed((task.seed + rank) % 2**32)
    try:
        with _warnings(task, answer.warned):
            value = fn(*args, **resolved(kwargs, rank, subtests))
        answer.value = value if task.wants_value else None
    except (pytest.skip.Exception, unittest.SkipTest) as skipped:
        answer.how, answer.reason = "skipped", str(skipped)
    except pytest.xfail.Exception as failed:
        answer.how, answer.reason = "xfailed", str(failed)
    except BaseException as error:
        if task.is_process:
            attach(error, _attached(error, fn, subtests))
            if task.terminal:
                debug(task.terminal, error, f"\n{Attached.of(error).shown}\n\nThis is rank {rank}.\n")
            sendable = _sendable(error)
            if sendable is not error:
                raise sendable from None
        else:
            attach(error, Attached(subtests=subtests.ended))
        raise
    finally:
        _reset_state()
        torch.set_grad_enabled(grad_mode)  # thread-local state, which would persist in a pool
        if task.is_process:
            torch.set_default_dtype(dtype)
    answer.subtests = _portable(subtests, fn) if task.is_process else subtests.ended
    answer.spoiled = dist.group.WORLD is not world
    return answer


def _reset_state() -> None:
    """Reset gradmesh's state of this rank."""
    state = rank_state()
    state.mesh = state.mesh_world = state.of_thread.chain = state.check = None
    state.reorderable = False


@contextmanager
def _warnings(task: Task, warned: list[Warned]) -> Iterator[None]:
    """Apply pytest's warning filters and record warnings, which pytest's process issues again."""
    if not task.filters:
        yield
        return
    with warnings.catch_warnings(record=True) as log:
        warnings.resetwarnings()
        warnings.filters[:] = task.filters  # type: ignore[index]
        try:
            yield
        finally:
            warned += [Warned(str(w.message), w.category, w.filename, w.lineno) for w in log]


def _attached(error: BaseException, fn: Callable[..., Any], subtests: Subtests | None = None) -> Attached:
    return Attached(
        kind=type(error).__name__,
        place=place(error),
        shown=rewriting.show(error, getattr(fn, "shown", fn)),
        subtests=[] if subtests is None else _portable(subtests, fn),
    )


def _portable(subtests: Subtests, fn: Callable[..., Any]) -> list[Subtest]:
    """The subtests, with errors replaced that cannot be pickled."""
    for subtest in subtests.ended:
        if subtest.error is not None:
            attach(subtest.error, _attached(subtest.error, fn))
            subtest.error = _sendable(subtest.error)
    return subtests.ended


def _sendable(error: BaseException) -> BaseException:
    """The error, or a replacement if it cannot be pickled."""
    try:
        pickle.loads(dumps_result(error))  # an exception with a custom __init__ may fail to unpickle
    except Exception:
        found = StandIn(f"{type(error).__name__}: {error}")
        attach(found, Attached.of(error))
        return found
    return error
