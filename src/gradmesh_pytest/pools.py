"""Ranks that live until the session ends: starting them is what costs time, not using them."""

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
"""Processes that are kept; each has torch loaded."""
_DEBUGGED = 86400.0
"""Seconds that ranks without a time limit wait for each other: one of them may be in a debugger."""


class Pools:
    """The ranks of a session, by number and backend.

    Args:
        arguments: pytest's own that say how failures are shown, for ranks that are processes.
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
        """Run a function of a test on ranks, and tell how it ended on each.

        Raises:
            gradmesh.ArgumentError: there is no such backend, or the function or its arguments cannot be pickled.
            gradmesh.MissingExtraError: they have to be sent by value and cloudpickle is not installed.
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
                self._prepared.pop(key, None)  # the next ones are new
        if any(isinstance(answer, on_rank.Answer) and answer.spoiled for answer in outcome.results.values()):
            self._end(key)
        return outcome

    def close(self) -> None:
        """End all ranks."""
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
        self._pools[key] = pool  # the last is the one that was used last
        return pool

    def _prepare(self, key: tuple[int, str], pool: Ranks) -> None:
        """Let processes find what pytest's has imported since they were asked last."""
        state = (len(sys.modules), *sys.path)
        if self._prepared.get(key) != state:
            pool.timeout = (
                pool.timeout or _DEBUGGED
            )  # the ranks may begin now, with the time that they wait for others
            names = rewriting.rewritten()
            pool.attempt(rewriting.prepare, (list(sys.path), names, self._arguments), {}).values()
            self._prepared[key] = state

    def _end(self, key: tuple[int, str]) -> None:
        self._prepared.pop(key, None)
        self._pools.pop(key).close()
