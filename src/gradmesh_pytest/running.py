"""Runs tests on ranks for a pytest session, and derives their results from the ranks' outcomes."""

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

from gradmesh.errors import ArgumentError, GradmeshError, MissingExtraError, RankError
from gradmesh.launch import Ranks, pickling
from gradmesh.launch.outcomes import Outcome
from gradmesh_pytest import on_rank, reports, rewriting, settings
from gradmesh_pytest.on_rank import Answer, Attached, Method, RankGenerator, Subtest, Subtests, Task, Terminal
from gradmesh_pytest.reports import RankReport, Result, result_of, result_of_subtest
from gradmesh_pytest.settings import Where

_MOST = 18
"""The maximum number of processes to keep; each has torch loaded."""
_DEBUGGED = 86400.0
"""The timeout in seconds for ranks without a limit, since a rank may be in a debugger."""


class Pools:
    """The ranks of a session, by number and backend."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = list(arguments)
        self._pools: dict[tuple[int, str], Ranks] = {}
        self._prepared: dict[tuple[int, str], tuple[object, ...]] = {}

    def attempt(
        self,
        where: Where,
        fn: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        task: on_rank.Task,
    ) -> Outcome:
        """Run a test's function on ranks, and return each rank's outcome."""
        key = where.size, where.backend
        pool = self._pool(key, where.timeout)
        if where.backend != "threads":
            self._prepare(key, pool)
        pool.timeout = where.timeout
        done = False
        try:
            outcome = pool.attempt(on_rank.run, (fn, args, kwargs, task), {})
            done = not outcome.failures and not outcome.missing
        finally:
            if not done:
                self._prepared.pop(key, None)  # the failure has stopped these ranks
        if any(isinstance(answer, on_rank.Answer) and answer.spoiled for answer in outcome.results.values()):
            self._end(key)
        return outcome

    def close(self) -> None:
        """Stop all ranks."""
        for key in list(self._pools):
            self._end(key)

    def _pool(self, key: tuple[int, str], timeout: float | None) -> Ranks:
        pool = self._pools.pop(key, None)
        if pool is None:
            size, backend = key
            pool = Ranks(size, backend, timeout or _DEBUGGED)
            others = [other for other in self._pools if other[1] != "threads"] if backend != "threads" else []
            while others and sum(n for n, _ in others) + size > _MOST:
                self._end(others.pop(0))
        self._pools[key] = pool  # ordered by last use
        return pool

    def _prepare(self, key: tuple[int, str], pool: Ranks) -> None:
        """Make modules that pytest has imported since the last call importable on process ranks."""
        state = (len(sys.modules), *sys.path)
        if self._prepared.get(key) != state:
            # This call may start the ranks, whose group uses this timeout.
            pool.timeout = pool.timeout or _DEBUGGED
            names = rewriting.rewritten()
            pool.attempt(rewriting.prepare, (list(sys.path), names, self._arguments), {}).values()
            self._prepared[key] = state

    def _end(self, key: tuple[int, str]) -> None:
        self._prepared.pop(key, None)
        self._pools.pop(key).close()


def check_sendable(
    values: Mapping[str, object], backend: str, why_not: Callable[[object], str | None]
) -> None:
    """Raise for values that process ranks cannot get."""
    reasons = {name: why_not(value) for name, value in sorted(values.items())}
    lost = {name: reason for name, reason in reasons.items() if reason is not None}
    if lost:
        raise ArgumentError.of(
            f"the fixture{'s' * (len(lost) > 1)} {', '.join(lost)} cannot be sent to process ranks",
            op="pytest",
            expected="values that can be pickled: tensors, modules, numbers, paths, and containers of them",
            got="\n".join(f"{name}: {reason}" for name, reason in lost.items()),
            remedy=f"create the value inside the test, or use backend='threads' instead of {backend!r}",
        )


def pytest_object(value: object) -> str | None:
    """Why a value would act on the rank's process instead of pytest's, as `monkeypatch` would; None: it would not."""
    module = str(getattr(value, "__module__", ""))
    top = module.partition(".")[0]
    if top in ("_pytest", "pytest") or (top.startswith("pytest_") and not isinstance(value, type)):
        return f"a {type(value).__name__} of {top}, which acts on the process of pytest"
    return None


def cannot_be_pickled(value: object) -> str | None:
    """Why a value cannot be pickled; None: it can."""
    try:
        pickling.dumps(value)
    except GradmeshError as error:
        first = error.__cause__ or error
        return str(first).partition("\n")[0]
    return None


class World:
    """Ranks to run functions on, from a test or a fixture. They are reused by later tests.

    Args:
        session: the session that owns the ranks.
        where: their number, backend and timeout.
        seed: the test's seed.
        is_of_a_test: whether to apply the test's warning filters on process ranks.

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

        Each rank starts without a current mesh, and with a seed derived from the test and the rank.

        Raises:
            gradmesh.RankError: the function failed on a rank, as for `gradmesh.launch`.
            gradmesh.MismatchError: some ranks skip the test and others do not.
            gradmesh.ArgumentError: the ranks are processes, and the function or its arguments cannot be pickled.
        """
        __tracebackhide__ = True
        outcome = self._session.attempt(
            self._where, fn, args, kwargs, self._seed, wants_value=True, filtered=self._is_of_a_test
        )
        result = self._session.result(outcome, fn, inside=True)
        if result.error is not None:
            raise result.error from result.error.__cause__
        return [answer.value for _, answer in sorted(outcome.results.items()) if isinstance(answer, Answer)]

    __call__ = run

    def __repr__(self) -> str:
        return f"World(size={self.size}, backend={self.backend!r})"


class Session:
    """The ranks of a pytest session, and the failures for its reports."""

    def __init__(self, config: pytest.Config, pools: Pools | None = None) -> None:
        self._config = config
        self._own = pools is None
        self.pools = Pools(_arguments(config)) if pools is None else pools
        self._reports: list[tuple[BaseException, RankReport]] = []
        self._was_debugged = False
        # Disable torch's c10d loggers, because pytest would show each error of a collective again.
        names = [name for name in logging.root.manager.loggerDict if name.startswith("c10d-NullHandler-")]
        self._silenced = [logger for name in names if not (logger := logging.getLogger(name)).disabled]
        for logger in self._silenced:
            logger.disabled = True

    def world(
        self, size: int | None = None, backend: str | None = None, timeout: float | None = None
    ) -> World:
        """Ranks for session-scoped use; None: as configured."""
        mark = pytest.mark.world(*(() if size is None else (size,)), backend=backend, timeout=timeout).mark
        return World(self, settings.where(self._config, mark), 0, is_of_a_test=False)

    def world_of(self, item: pytest.Item, param: object) -> World:
        """Ranks for a test with the fixture `world`."""
        where = settings.where(self._config, settings.mark_of(item), param)
        return World(self, where, self._seed(item))

    def rank_generator(self, item: pytest.Item) -> RankGenerator:
        """The generators of a test's ranks."""
        return RankGenerator(self._seed(item))

    def run_test(self, item: pytest.Function, fn: Callable[..., Any], values: Mapping[str, object]) -> None:
        """Run the body of a test on every rank."""
        __tracebackhide__ = True
        theirs = values.get("subtests")
        kwargs = {**values, "subtests": Subtests()} if "subtests" in values else values
        try:
            outcome = self._attempt_test(item, fn, kwargs)
        except (ArgumentError, MissingExtraError) as error:
            # Nothing has run, so the frames are of no interest.
            self._end(self._not_run(error))
        else:
            self._replay(outcome, fn, getattr(theirs, "test", None))
            self._end(self.result(outcome, fn))

    def method_on_ranks(self, item: pytest.Function, case: Any) -> Callable[[], None]:
        """A replacement for a test case's method that runs it on every rank."""
        method = getattr(type(case), item.name)

        @functools.wraps(method)
        def on_ranks() -> None:
            __tracebackhide__ = True
            where = settings.where(self._config, settings.mark_of(item))
            outcome_of_unittest = case.__dict__.pop("_outcome", None)
            original = case.__dict__.pop(item.name, None)
            try:
                fn = Method(case, item.name)
                outcome = self.attempt(where, fn, (), {"subtests": Subtests()}, self._seed(item))
            finally:
                case.__dict__["_outcome"] = outcome_of_unittest
                if original is not None:
                    case.__dict__[item.name] = original
            self._replay(outcome, method, case.subTest)
            self._end(self.result(outcome, fn))

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
        """Run a function on ranks, and return each rank's outcome."""
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
        """The address of pytest's terminal for process ranks; "" without --pdb."""
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

    def result(self, outcome: Outcome, fn: Callable[..., Any], *, inside: bool = False) -> Result:
        """The result of a test; its report will show the ranks' failures."""
        result = result_of(outcome, fn, self._config)
        if inside and result.report is not None and result.report.groups:
            try:
                outcome.values()
            except RankError as error:  # as gradmesh.launch raises it
                result.error = error.with_traceback(None)
            result.report.inside = True
        return self._noted(result)

    def _noted(self, result: Result) -> Result:
        """Keep the description of the ranks for the report of the error."""
        if result.error is not None and result.report is not None:
            self._reports.append((result.error, result.report))
        return result

    def amend(self, report: pytest.TestReport, error: BaseException) -> None:
        """Add the ranks' failures to the report of an error."""
        for raised, of_ranks in self._reports:
            if raised is error:
                reports.amend(report, of_ranks)
        if report.when == "teardown":
            self._reports.clear()

    def close(self) -> None:
        """Stop all ranks."""
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
        check_sendable(kwargs, where.backend, pytest_object)
        expected = item.get_closest_marker("xfail") is not None
        try:
            return self.attempt(where, fn, (), kwargs, self._seed(item), may_debug=not expected)
        except (ArgumentError, MissingExtraError):
            check_sendable(kwargs, where.backend, cannot_be_pickled)
            raise

    def _not_run(self, error: BaseException) -> Result:
        bare = error.with_traceback(None)
        bare.__suppress_context__ = True
        return self._noted(Result(bare, RankReport(1, [], [], headline=str(error).partition("\n")[0])))

    def _end(self, result: Result) -> None:
        if self._was_debugged and result.report is not None:
            # Already debugged on its rank. pytest does not start pdb again for BdbQuit.
            result.error = BdbQuit()
            self._noted(result)
        # No __tracebackhide__ here: if all frames are hidden, pytest shows only the first line of an error.
        if result.error is not None:
            raise result.error

    def _replay(self, outcome: Outcome, fn: Callable[..., Any], test: Callable[..., Any] | None) -> None:
        """Report each subtest of the ranks once."""
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
            result = self._noted(result_of_subtest(by_rank, outcome.size, fn, self._config))
            if test is not None:
                texts = () if subtest.message is None else (subtest.message,)
                with test(*texts, **{name: _Text(value) for name, value in subtest.values.items()}):
                    self._end(result)

    def _seed(self, item: pytest.Item) -> int:
        return zlib.crc32(f"{item.nodeid} {self._config.getoption('world_seed')}".encode())


class _Text(str):
    """A string whose repr is the string itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that thread ranks share, and restore them afterwards."""
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
    """Pytest's command-line options for the display of failures."""
    verbosity = config.get_verbosity()
    style = config.getoption("tbstyle", "auto")
    given = [f"--tb={style}", f"--rootdir={config.rootpath}", f"--assert={config.getoption('assertmode')}"]
    given += ["-" + "v" * verbosity] if verbosity > 0 else []
    given += ["--showlocals"] if config.getoption("showlocals", False) else []
    return given + (["--full-trace"] if config.getoption("fulltrace", False) else [])
