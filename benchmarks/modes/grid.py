"""All cells of a system: which are run, on which ranks, and what became of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from benchmarks.modes.cell import Verdict, judge, on_rank
from benchmarks.modes.mode import MODES, Mode, no_meaning
from benchmarks.systems.cases import CASES
from benchmarks.systems.system import System
from gradmesh import RankError, Ranks

__all__ = ["TIMEOUT", "Grid", "Pools", "available", "measure"]

TIMEOUT = 5.0
"""Seconds that a collective may wait before it counts as a hang."""
_COMPILE_TIMEOUT = 30.0
_AFTER = 15.0
"""Seconds more until a rank that does not even notice its timeout is ended."""

Grid = dict[tuple[str, str], Verdict]
"""The verdicts, by case and mode."""


class Pools:
    """The ranks of both world sizes; a context manager.

    Args:
        backend: "gloo" or "shm" for processes, or "threads"; compiled programs run on processes anyway.
        timeout: seconds that a collective may wait.
    """

    def __init__(self, backend: str, timeout: float = TIMEOUT) -> None:
        self._backend = backend
        self._timeout = timeout
        self._pools: dict[tuple[int, str], Ranks] = {}

    def cell(self, system: System, case: str, mode: Mode) -> Verdict:
        """Run one cell; a failure of the ranks themselves is a verdict too, and the next cell gets new ones."""
        compiled = mode.name.startswith("compile")
        backend = "gloo" if compiled else self._backend
        timeout = max(self._timeout, _COMPILE_TIMEOUT) if compiled else self._timeout
        pool = self._pools.get((mode.world, backend))
        if pool is None:
            pool = Ranks(mode.world, backend, timeout=max(self._timeout, _COMPILE_TIMEOUT) + _AFTER)
            self._pools[mode.world, backend] = pool
        pool.timeout = timeout + _AFTER
        try:
            reports = pool.run(on_rank, system.where, case, mode.name, timeout, backend != "threads")
        except RankError as error:
            return _died(error)
        return judge(CASES[case], mode, reports)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close()


def _died(error: RankError) -> Verdict:
    text = str(error)
    if killed := re.search(r"failed with (SIG\w+)|(exit code -?\d+)", text):
        return Verdict("abort", f"a process ended with {killed[1] or killed[2]}")
    if "did not return within" in text:
        return Verdict("hang", "no end, not even of the collective's own timeout")
    if "failed with DeadlockError" in text:  # the launcher saw it before the timeout did
        returned = " returned, and " in text
        return Verdict("hang", "one rank waits, the other has returned" if returned else "both ranks wait")
    return Verdict("error", text.splitlines()[0])


def available(systems: Iterable[System]) -> Iterator[System]:
    """The systems that are installed."""
    for system in systems:
        if system.needs is None or importlib.util.find_spec(system.needs[0]) is not None:
            yield system


def measure(
    system: System,
    pools: Pools,
    cases: Iterable[str] = CASES,
    modes: Iterable[str] = MODES,
    tell: Callable[[str], None] = lambda _: None,
) -> Grid:
    """Run every cell of a system.

    Args:
        system: what is measured.
        pools: on which ranks.
        cases: their names.
        modes: their names.
        tell: called after each cell, with what was run.
    """
    grid: Grid = {}
    for mode in (MODES[name] for name in modes):
        for name in cases:
            if name not in system.verbs:
                verdict = Verdict("n/a", "no such verb")
            elif reason := no_meaning(CASES[name], mode):
                verdict = Verdict("n/a", reason)
            else:
                verdict = pools.cell(system, name, mode)
            grid[name, mode.name] = verdict
            tell(f"{system.name}: {name}, {mode.name}")
    return grid
