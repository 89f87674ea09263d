"""What a rank does for a test: it starts from a clean state, runs the function, and tells how that ended."""

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
from gradmesh.state import rank_state
from gradmesh_pytest import rewriting
from gradmesh_pytest.failures import Attached, attach, place
from gradmesh_pytest.per_rank import Subtest, Subtests, resolved
from gradmesh_pytest.remote import debug

__all__ = ["Answer", "Method", "StandIn", "Task", "Warned", "run"]


class StandIn(Exception):  # noqa: N818 - it has the text of another error
    """Goes back in the place of an exception that cannot be pickled."""


@dataclasses.dataclass(frozen=True)
class Warned:
    """A warning that was given on a rank that is a process."""

    message: str
    category: type[Warning]
    filename: str
    lineno: int


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank is told beside the function.

    Attributes:
        seed: of the test.
        is_process: whether the rank has a process for itself.
        wants_value: whether the function's result goes back.
        filters: the filters of warnings, for processes; none: those of the process.
        terminal: where a process asks for pytest's terminal, to debug a failure; empty where nobody debugs.
    """

    seed: int
    is_process: bool
    wants_value: bool
    filters: tuple[Any, ...] = ()
    terminal: str = ""


@dataclasses.dataclass
class Answer:
    """How the function ended on a rank that could tell.

    Attributes:
        how: "passed", "skipped" or "xfailed".
        reason: of the last two.
        value: what the function returned.
        subtests: how its subtests ended.
        spoiled: whether the rank's world is not what it was.
        warned: the warnings, of a process.
    """

    how: str = "passed"
    reason: str = ""
    value: Any = None
    subtests: list[Subtest] = dataclasses.field(default_factory=list)
    spoiled: bool = False
    warned: list[Warned] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Method:
    """The method of a `unittest.TestCase`, to be called on a copy of it for each rank."""

    case: unittest.TestCase
    name: str

    @property
    def shown(self) -> Callable[..., object]:
        """The function whose lines are shown."""
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
        BaseException: what the function raised, but for what skips it or declares it an expected failure.
    """
    __tracebackhide__ = True
    answer, subtests = Answer(), Subtests()
    world, dtype, grad_mode = dist.group.WORLD, torch.get_default_dtype(), torch.is_grad_enabled()
    rank = dist.get_rank()
    _forget()
    torch.manual_seed(task.seed + rank)
    if task.is_process:  # ranks that are threads share these
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
            if not _travels(error):
                raise _stand_in(error) from None
        else:
            attach(error, Attached(subtests=subtests.ended))
        raise
    finally:
        _forget()
        torch.set_grad_enabled(grad_mode)  # each thread has its own, which outlives the test in a pool
        if task.is_process:
            torch.set_default_dtype(dtype)
    answer.subtests = _portable(subtests, fn) if task.is_process else subtests.ended
    answer.spoiled = dist.group.WORLD is not world
    return answer


def _forget() -> None:
    """Leave nothing of one test to the next."""
    state = rank_state()
    state.mesh = state.mesh_world = state.chain = state.check = None
    state.reorderable = False


def _seed_python(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def _warnings(task: Task, warned: list[Warned]) -> Iterator[None]:
    """Treat warnings as pytest does in its own process; there they are given again."""
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
    """The subtests with errors that can leave the process."""
    for subtest in subtests.ended:
        if subtest.error is not None:
            attach(subtest.error, _attached(subtest.error, fn))
            if not _travels(subtest.error):
                subtest.error = _stand_in(subtest.error)
    return subtests.ended


def _travels(error: BaseException) -> bool:
    try:
        pickle.loads(
            dumps_result(error)
        )  # an exception with an __init__ of its own may pickle and not come back
    except Exception:
        return False
    return True


def _stand_in(error: BaseException) -> StandIn:
    found = StandIn(f"{type(error).__name__}: {error}")
    attach(found, Attached.of(error))
    return found
