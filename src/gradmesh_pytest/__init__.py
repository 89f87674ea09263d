"""A pytest plugin for tests on several ranks; pytest loads it automatically if gradmesh is installed.

`@pytest.mark.world(4)` runs the body of a test on four ranks, each with the same fixture values; the fixture `world`
gives a test the ranks, to run functions on. Ranks are threads by default, or processes, and live until the end of the
session. A failure on ranks is reported like that of any other test, once, with its ranks.
`gradmesh_pytest.assert_right(train)` runs `gradmesh check` on a script or function.

pytest imports this module at every start, so gradmesh and torch are imported only by the first test on ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from gradmesh_pytest import settings

if TYPE_CHECKING:
    from gradmesh_pytest.on_rank import RankGenerator
    from gradmesh_pytest.plans import assert_right as assert_right
    from gradmesh_pytest.running import Session, World

_SESSION = pytest.StashKey["Session"]()


def __getattr__(name: str) -> Any:
    if name == "assert_right":
        from gradmesh_pytest.plans import assert_right

        return assert_right
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and the values of the configuration file."""
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", settings.MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test whose mark has several sizes or backends."""
    mark = metafunc.definition.get_closest_marker("world")
    if mark is None or not settings.is_several(mark):
        return
    name = "world" if "world" in metafunc.fixturenames else "_world_of_the_test"
    if name not in metafunc.fixturenames:
        metafunc.fixturenames.append(name)
    params = settings.each(mark)
    ids = ["-".join(str(part) for part in param if part is not None) for param in params]
    metafunc.parametrize(name, params, ids=ids, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on every rank."""
    __tracebackhide__ = True
    function = pyfuncitem.obj
    marked = settings.mark_of(pyfuncitem) is not None
    if not marked or "world" in pyfuncitem.fixturenames or inspect.iscoroutinefunction(function):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    _session(pyfuncitem.config).run_test(
        pyfuncitem, function, {name: pyfuncitem.funcargs[name] for name in names}
    )
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the method of a marked `unittest.TestCase` on every rank; `pytest_pyfunc_call` is not used for these."""
    __tracebackhide__ = True
    case = getattr(item, "instance", None)
    # Check attributes of TestCase, because importing unittest takes time.
    is_case = hasattr(case, "assertEqual") and hasattr(case, "subTest")
    if isinstance(item, pytest.Function) and is_case and settings.mark_of(item) is not None:
        item.obj = _session(item.config).method_on_ranks(item, case)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failure on the ranks instead of the line where this plugin raised it."""
    report = yield
    if call.excinfo is not None and _SESSION in item.config.stash:
        item.config.stash[_SESSION].amend(report, call.excinfo.value)
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop all ranks."""
    if _SESSION in config.stash:
        config.stash[_SESSION].close()
        del config.stash[_SESSION]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """The ranks: `world.run(fn, *args)` runs a function on each of them, and returns each rank's result.

    Their number and backend come from the mark (`@pytest.mark.world(4, backend="shm")`), the parameter
    (`@pytest.mark.parametrize("world", [2, (4, "gloo")], indirect=True)`) or the configuration, in this order.
    """
    return _session(request.config).world_of(request.node, getattr(request, "param", None))


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Callable[..., World]:
    """`worlds(size, backend=None, timeout=None)`: ranks for fixtures with a wider scope than one test."""
    return _session(request.config).world


@pytest.fixture
def rank_generator(request: pytest.FixtureRequest) -> RankGenerator:
    """A separate `torch.Generator` on each rank, seeded by the test, the rank and `--world-seed`."""
    return _session(request.config).rank_generator(request.node)


@pytest.fixture
def _world_of_the_test(request: pytest.FixtureRequest) -> Any:
    return request.param


def _session(config: pytest.Config) -> Session:
    if _SESSION not in config.stash:
        from gradmesh_pytest.running import Session

        config.stash[_SESSION] = Session(config)
    return config.stash[_SESSION]
