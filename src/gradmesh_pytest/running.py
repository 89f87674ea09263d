"""The session's side of tests on ranks: runs their functions, and turns how those ended into how the tests ended."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import warnings
import zlib
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from gradmesh.errors import ArgumentError, MissingExtraError, RankError
from gradmesh.launch.outcomes import Outcome
from gradmesh_pytest import reports, settings, travel
from gradmesh_pytest.failures import Attached
from gradmesh_pytest.on_rank import Answer, Method, Task
from gradmesh_pytest.per_rank import RankGenerator, Subtest, Subtests
from gradmesh_pytest.pools import Pools
from gradmesh_pytest.remote import Terminal
from gradmesh_pytest.settings import Where
from gradmesh_pytest.verdicts import Told, Verdict, judge, judge_subtest

__all__ = ["Session", "World"]


class World:
    """Ranks to run functions on, from a test or a fixture. They live on when the test is over.

    Args:
        session: whose ranks they are.
        where: how many, and of which kind.
        seed: of the test.
        is_of_a_test: whether the test's filters of warnings hold on ranks that are processes.

    Attributes:
        size: the number of ranks.
        backend: "threads", or the backend of their processes.
    """

    def __init__(self, session: Session, where: Where, seed: int, *, is_of_a_test: bool = True) -> None:
        self.size, self.backend = where.size, where.backend
        self._session = session
        self._where = where
        self._seed = seed
        self._is_of_a_test = is_of_a_test

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank, and return each rank's result.

        Each rank begins without a current mesh, and with the seed of the test and the rank.

        Raises:
            gradmesh.RankError: it failed on a rank, as of `gradmesh.launch`.
            gradmesh.MismatchError: some ranks skip the test and others do not.
            gradmesh.ArgumentError: the ranks are processes, and the function or its arguments cannot be pickled.
        """
        __tracebackhide__ = True
        outcome = self._session.attempt(
            self._where, fn, args, kwargs, self._seed, wants_value=True, filtered=self._is_of_a_test
        )
        verdict = self._session.judged(outcome, fn, inside=True)
        if verdict.error is not None:
            raise verdict.error from verdict.error.__cause__
        return [answer.value for _, answer in sorted(outcome.results.items()) if isinstance(answer, Answer)]

    __call__ = run

    def __repr__(self) -> str:
        return f"World(size={self.size}, backend={self.backend!r})"


class Session:
    """The ranks of a session of pytest, and what its reports say of them.

    Args:
        config: of the session.
        pools: ranks to use, which somebody else ends; by default its own.
    """

    def __init__(self, config: pytest.Config, pools: Pools | None = None) -> None:
        self._config = config
        self._own = pools is None
        self.pools = Pools(_arguments(config)) if pools is None else pools
        self._told: list[tuple[BaseException, Told]] = []
        self._was_debugged = False
        # Of torch, for programs that give it a handler. pytest would show each error of a collective once more.
        names = [name for name in logging.root.manager.loggerDict if name.startswith("c10d-NullHandler-")]
        self._silenced = [logger for name in names if not (logger := logging.getLogger(name)).disabled]
        for logger in self._silenced:
            logger.disabled = True

    def world(
        self, size: int | None = None, backend: str | None = None, timeout: float | None = None
    ) -> World:
        """Ranks for a session: what is None is as configured."""
        mark = pytest.mark.world(*(() if size is None else (size,)), backend=backend, timeout=timeout).mark
        return World(self, settings.where(self._config, mark), 0, is_of_a_test=False)

    def world_of(self, item: pytest.Item, param: object) -> World:
        """Ranks for a test that has the fixture `world`."""
        where = settings.where(self._config, settings.mark_of(item), param)
        return World(self, where, self._seed(item))

    def rank_generator(self, item: pytest.Item) -> RankGenerator:
        """The generators of a test's ranks."""
        return RankGenerator(self._seed(item))

    def run_test(self, item: pytest.Function, fn: Callable[..., Any], values: Mapping[str, object]) -> None:
        """Run the body of a test on every rank.

        Raises:
            BaseException: what the first rank raised that failed, or what skips the test.
        """
        __tracebackhide__ = True
        theirs = values.get("subtests")
        kwargs = {**values, "subtests": Subtests()} if "subtests" in values else values
        try:
            outcome = self._attempt_test(item, fn, kwargs)
        except (ArgumentError, MissingExtraError) as error:
            # Nothing has run: its words say all, and its frames nothing.
            self._end(self._refused(error))
        else:
            self._replay(outcome, fn, getattr(theirs, "test", None))
            self._end(self.judged(outcome, fn))

    def method_on_ranks(self, item: pytest.Function, case: Any) -> Callable[[], None]:
        """The method of a test case, to be called in the place of its own."""
        method = getattr(type(case), item.name)

        @functools.wraps(method)
        def on_ranks() -> None:
            __tracebackhide__ = True
            where = settings.where(self._config, settings.mark_of(item))
            outcome_of_unittest = case.__dict__.pop("_outcome", None)
            own = case.__dict__.pop(item.name, None)
            try:
                fn = Method(case, item.name)
                outcome = self.attempt(where, fn, (), {"subtests": Subtests()}, self._seed(item))
            finally:
                case.__dict__["_outcome"] = outcome_of_unittest
                if own is not None:
                    case.__dict__[item.name] = own
            self._replay(outcome, method, case.subTest)
            self._end(self.judged(outcome, fn))

        return on_ranks

    def attempt(
        self,
        where: Where,
        fn: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        seed: int,
        *,
        wants_value: bool = False,
        may_debug: bool = True,
        filtered: bool = True,
    ) -> Outcome:
        """Run a function on ranks, and tell how it ended on each."""
        __tracebackhide__ = True
        self._was_debugged = False
        if where.backend == "threads":
            with _seeded(seed):
                return self.pools.attempt(where, fn, args, kwargs, Task(seed, False, wants_value))
        with self._debugger(may_debug) as address:
            filters = tuple(warnings.filters) if filtered else ()
            task = Task(seed, True, wants_value, filters, address)
            outcome = self.pools.attempt(where, fn, args, kwargs, task)
        answers = [answer for answer in outcome.results.values() if isinstance(answer, Answer)]
        for given in dict.fromkeys(given for answer in answers for given in answer.warned):
            warnings.warn_explicit(given.message, given.category, given.filename, given.lineno)
        return outcome

    @contextlib.contextmanager
    def _debugger(self, may_debug: bool) -> Iterator[str]:
        """Where processes find the terminal, if pytest is to debug failures."""
        if not may_debug or not self._config.getoption("usepdb", False):
            yield ""
            return
        terminal = Terminal(self._config)
        try:
            yield terminal.address
        finally:
            terminal.close()
            self._was_debugged = terminal.was_used
        if terminal.quits:
            pytest.exit("Quitting debugger")

    def judged(self, outcome: Outcome, fn: Callable[..., Any], *, inside: bool = False) -> Verdict:
        """Tell how a test ended; reports of its error will say what is known of the ranks."""
        verdict = judge(outcome, fn, self._config)
        if inside and verdict.told is not None and verdict.told.groups:
            try:
                outcome.values()
            except RankError as error:  # as in a program
                verdict.error = error.with_traceback(None)
            verdict.told.inside = True
        if verdict.error is not None and verdict.told is not None:
            self._told.append((verdict.error, verdict.told))
        return verdict

    def amend(self, report: pytest.TestReport, error: BaseException) -> None:
        """Let the report of an error say what is known of the ranks."""
        for raised, told in self._told:
            if raised is error:
                reports.amend(report, told)
        if report.when == "teardown":
            self._told.clear()

    def close(self) -> None:
        """End all ranks."""
        for logger in self._silenced:
            logger.disabled = False
        if self._own:
            self.pools.close()

    def _attempt_test(
        self, item: pytest.Function, fn: Callable[..., Any], kwargs: Mapping[str, object]
    ) -> Outcome:
        callspec = getattr(item, "callspec", None)
        param = None if callspec is None else callspec.params.get("_world_of_the_test")
        where = settings.where(self._config, settings.mark_of(item), param)
        if where.backend == "threads":
            return self.attempt(where, fn, (), kwargs, self._seed(item))
        travel.refuse_pytests_own(kwargs, where.backend)
        expected = item.get_closest_marker("xfail") is not None
        try:
            return self.attempt(where, fn, (), kwargs, self._seed(item), may_debug=not expected)
        except (ArgumentError, MissingExtraError):
            travel.explain(kwargs, where.backend)
            raise

    def _refused(self, error: BaseException) -> Verdict:
        bare = error.with_traceback(None)
        bare.__suppress_context__ = True
        verdict = Verdict(bare, Told(1, [], [], headline=str(error).partition("\n")[0]))
        self._told.append((bare, verdict.told or Told(1, [], [])))
        return verdict

    def _end(self, verdict: Verdict) -> None:
        if self._was_debugged and verdict.told is not None:
            # On its rank. pytest does not debug this kind of error once more, here, where its frames are not.
            verdict.error = BdbQuit()
            self._told.append((verdict.error, verdict.told))
        # This frame is not hidden: of an error of which all frames are, pytest shows only the first line.
        if verdict.error is not None:
            raise verdict.error

    def _replay(self, outcome: Outcome, fn: Callable[..., Any], test: Callable[..., Any] | None) -> None:
        """Report the subtests of the ranks, each once."""
        __tracebackhide__ = True
        ended: dict[tuple[str | None, str], dict[int, Subtest]] = {}
        of_rank = {
            rank: answer.subtests for rank, answer in outcome.results.items() if isinstance(answer, Answer)
        }
        of_rank |= {failure.rank: Attached.of(failure.cause).subtests for failure in outcome.failures}
        for rank, subtests in sorted(of_rank.items()):
            for subtest in subtests:
                ended.setdefault((subtest.message, repr(subtest.values)), {})[rank] = subtest
        for by_rank in ended.values():
            subtest = next(iter(by_rank.values()))
            verdict = self._judged_subtest(by_rank, outcome.size, fn)
            if test is not None:
                words = () if subtest.message is None else (subtest.message,)
                with test(*words, **{name: _Word(value) for name, value in subtest.values.items()}):
                    self._end(verdict)

    def _judged_subtest(self, ended: Mapping[int, Subtest], size: int, fn: Callable[..., Any]) -> Verdict:
        verdict = judge_subtest(ended, size, fn, self._config)
        if verdict.error is not None and verdict.told is not None:
            self._told.append((verdict.error, verdict.told))
        return verdict

    def _seed(self, item: pytest.Item) -> int:
        return zlib.crc32(f"{item.nodeid} {self._config.getoption('world_seed')}".encode())


class _Word(str):
    """A text that was a `repr` before."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that ranks which are threads share, and leave them to other tests as they were."""
    before, shared = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        torch.set_rng_state(shared)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)


def _arguments(config: pytest.Config) -> list[str]:
    """Those of pytest that say how failures are shown."""
    verbosity = config.get_verbosity()
    style = config.getoption("tbstyle", "auto")
    given = [f"--tb={style}", f"--rootdir={config.rootpath}", f"--assert={config.getoption('assertmode')}"]
    given += ["-" + "v" * verbosity] if verbosity > 0 else []
    given += ["--showlocals"] if config.getoption("showlocals", False) else []
    return given + (["--full-trace"] if config.getoption("fulltrace", False) else [])
