"""Ranks that are reused until the session ends, because starting them takes time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradmesh.launch.launcher import Ranks
from gradmesh.launch.outcomes import Outcome
from gradmesh_pytest import on_rank, rewriting
from gradmesh_pytest.settings import Where

__all__ = ["Pools"]

_MOST = 18
"""The maximum number of processes to keep; each has torch loaded."""
_DEBUGGED = 86400.0
"""The timeout in seconds for ranks without a limit, since a rank may be in a debugger."""


class Pools:
    """The ranks of a session, by number and backend.

    Args:
        arguments: pytest's command-line options for the display of failures, for process ranks.
    """

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
        """Run a test's function on ranks, and return each rank's outcome.

        Raises:
            gradmesh.ArgumentError: the backend is unknown, or the function or its arguments cannot be pickled.
            gradmesh.MissingExtraError: they must be sent by value and cloudpickle is not installed.
        """
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
            pool.timeout = (
                pool.timeout or _DEBUGGED
            )  # this call may start the ranks, whose group uses this timeout
            names = rewriting.rewritten()
            pool.attempt(rewriting.prepare, (list(sys.path), names, self._arguments), {}).values()
            self._prepared[key] = state

    def _end(self, key: tuple[int, str]) -> None:
        self._prepared.pop(key, None)
        self._pools.pop(key).close()
