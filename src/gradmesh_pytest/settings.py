"""Settings: the mark, command-line options and configuration values."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

MARK = (
    "world(*sizes, backend=None, timeout=None): run the test on that number of ranks. Several sizes or a list of "
    "backends ('threads', 'shm', 'gloo', ...) parametrize the test. timeout: seconds that the ranks may take."
)

Param = tuple[int | None, str | None]
"""Size and backend; None: as configured."""


class Where(NamedTuple):
    """The ranks that a test runs on."""

    size: int  # the number of ranks
    backend: str  # "threads", or a backend of torch.distributed for processes
    timeout: float | None  # seconds that they may take; None: no limit


def add_options(parser: pytest.Parser) -> None:
    """Add the options and the values of the configuration file."""
    group = parser.getgroup("world", "tests on several ranks (gradmesh)")
    group.addoption(
        "--world-backend",
        metavar="NAME",
        help="default backend of tests on ranks: threads, or shm, gloo, ... for processes",
    )
    group.addoption(
        "--world-timeout",
        metavar="SECONDS",
        type=float,
        help="default timeout of tests on ranks; 0: no limit",
    )
    group.addoption(
        "--world-seed", metavar="N", type=int, default=0, help="changes the seed of every test on ranks"
    )
    parser.addini("world_backend", "as --world-backend", default="threads")
    parser.addini("world_timeout", "as --world-timeout", default="120")
    parser.addini("world_size", "default number of ranks of the fixture `world`", default="2")


def mark_of(item: pytest.Item) -> pytest.Mark | None:
    """The mark of a test: that of its parameter takes precedence over that of its function."""
    callspec = getattr(item, "callspec", None)
    for mark in getattr(callspec, "marks", ()):
        if mark.name == "world":
            found: pytest.Mark = mark.mark if isinstance(mark, pytest.MarkDecorator) else mark
            return found
    return item.get_closest_marker("world")


def is_several(mark: pytest.Mark) -> bool:
    """Whether a mark has several sizes or backends."""
    return len(mark.args) > 1 or isinstance(mark.kwargs.get("backend"), list | tuple)


def each(mark: pytest.Mark) -> list[Param]:
    """Every combination of a mark's sizes and backends."""
    backends = mark.kwargs.get("backend")
    backends = backends if isinstance(backends, list | tuple) else [backends]
    return [(size, backend) for size in mark.args or [None] for backend in backends]


def where(config: pytest.Config, mark: pytest.Mark | None = None, param: object = None) -> Where:
    """The ranks that a test runs on."""
    size: Any = None
    backend: Any = None
    timeout: Any = None
    if mark is not None:
        unknown = sorted(set(mark.kwargs) - {"backend", "timeout"})
        if unknown:
            raise _error(
                f"unknown argument {unknown[0]!r} of the mark world", f"{unknown[0]}=", "backend= or timeout="
            )
        if not is_several(mark):
            size, backend = each(mark)[0]
        elif param is None:
            raise _error(
                "several worlds for a test that cannot be parametrized",
                repr(each(mark)),
                "one size and one backend",
            )
        timeout = mark.kwargs.get("timeout")
    if param is not None:
        size, backend = param if isinstance(param, list | tuple) and len(param) == 2 else (param, backend)
    if size is None:
        size = _number(config, "world_size", int)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise _error("invalid number of ranks", repr(size), "an int >= 1")
    if backend is None:
        backend = config.getoption("world_backend") or config.getini("world_backend")
    if not isinstance(backend, str):
        raise _error("invalid backend", repr(backend), "'threads', 'shm', 'gloo', ...")
    if timeout is None:
        timeout = config.getoption("world_timeout")
    if timeout is None:
        timeout = _number(config, "world_timeout", float)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0:
        raise _error("invalid timeout", repr(timeout), "a number of seconds; 0: no limit")
    debugged = config.getoption("usepdb", False) or config.getoption("trace", False)
    return Where(size, backend, None if timeout == 0 or debugged else float(timeout))


def _number(config: pytest.Config, name: str, kind: type[int] | type[float]) -> float:
    text = config.getini(name)
    try:
        return kind(text)
    except ValueError:
        raise _error(f"invalid {name} in the configuration", repr(text), "a number") from None


def _error(problem: str, got: str, expected: str) -> Exception:
    from gradmesh.errors import ArgumentError

    remedy = "write e.g. @pytest.mark.world(4, backend='gloo', timeout=60)"
    return ArgumentError.of(problem, op="pytest", expected=expected, got=got, remedy=remedy)
