"""Runs a test's function on a rank: resets state, runs the function, and returns its outcome."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import sys
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
from gradmesh_pytest.failures import Attached, attach, place
from gradmesh_pytest.per_rank import Subtest, Subtests, resolved
from gradmesh_pytest.remote import debug

__all__ = ["Answer", "Method", "StandIn", "Task", "Warned", "run"]


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
    """The options of a run.

    Attributes:
        seed: the test's seed.
        is_process: whether the rank is a process.
        wants_value: whether to return the function's result.
        filters: the warning filters for processes; empty: keep the process's filters.
        terminal: the address of pytest's terminal, to debug a failure; empty without --pdb.
    """

    seed: int
    is_process: bool
    wants_value: bool
    filters: tuple[Any, ...] = ()
    terminal: str = ""


@dataclasses.dataclass
class Answer:
    """The outcome of the function on a rank.

    Attributes:
        how: "passed", "skipped" or "xfailed".
        reason: the reason of a skip or xfail.
        value: the return value.
        subtests: the outcomes of its subtests.
        spoiled: whether the function replaced the rank's world, so that the ranks cannot be reused.
        warned: the warnings of a process.
    """

    how: str = "passed"
    reason: str = ""
    value: Any = None
    subtests: list[Subtest] = dataclasses.field(default_factory=list)
    spoiled: bool = False
    warned: list[Warned] = dataclasses.field(default_factory=list)


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
    """Run a function of a test on this rank.

    Raises:
        BaseException: the function's exception, except for skips and expected failures.
    """
    __tracebackhide__ = True
    answer, subtests = Answer(), Subtests()
    world, dtype, grad_mode = dist.group.WORLD, torch.get_default_dtype(), torch.is_grad_enabled()
    rank = dist.get_rank()
    _reset_state()
    torch.manual_seed(task.seed + rank)
    if task.is_process:  # thread ranks share these generators
        _seed_python(task.seed + rank)
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
            if not _can_be_pickled(error):
                raise _stand_in(error) from None
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
    state.mesh = state.mesh_world = state.chain = state.check = None
    state.reorderable = False


def _seed_python(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


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
            if not _can_be_pickled(subtest.error):
                subtest.error = _stand_in(subtest.error)
    return subtests.ended


def _can_be_pickled(error: BaseException) -> bool:
    try:
        pickle.loads(dumps_result(error))  # an exception with a custom __init__ may fail to unpickle
    except Exception:
        return False
    return True


def _stand_in(error: BaseException) -> StandIn:
    found = StandIn(f"{type(error).__name__}: {error}")
    attach(found, Attached.of(error))
    return found
