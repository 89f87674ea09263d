"""The tables: to a terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.modes.cell import VERDICTS, Verdict
from benchmarks.modes.grid import Grid
from benchmarks.modes.mode import MODES, no_meaning
from benchmarks.systems.cases import CASES
from benchmarks.systems.system import System

__all__ = ["Grid", "Measured", "System", "as_json", "faults", "markdown", "show"]

Measured = Mapping[str, tuple[System, Grid]]
"""Each system's grid, by the system's name."""

_STYLES = {"ok": "green", "refused": "yellow", "n/a": "dim"}

_INTRO = """\
# Autodiff modes: every collective in reverse, forward, vmap, compile and more, in five systems

Which collectives of gradmesh, `torch.distributed.nn.functional`, the functional collectives, DTensor and spmd_types
give right results in which autodiff mode. Written by `python -m tools.report docs/reports/modes.md`.

Each cell is a run on two ranks (subgroup: a group of two among four), in float64, compared with the same program
written densely for one process: value, gradient, second derivative or tangent, to within 1e-10 of the largest entry.
The objective is the sum of the ranks' losses, which differ between ranks; where a result has type I it is one loss, the
same on every rank. The same script and the same cases measure all systems, each called as its own documentation says.
Ambiguous errors are counted as a deliberate refusal. A group's collectives time out after 5 s (compile: 30 s).
Everything runs on CPU tensors over Gloo; another backend may refuse or support other calls."""


def faults(grid: Grid) -> list[str]:
    """The cells that are neither right nor a stated refusal."""
    fine = ("ok", "refused", "n/a")
    return [f"{case}, {mode}: {v.word}: {v.note}" for (case, mode), v in grid.items() if v.word not in fine]


def as_json(measured: Measured) -> dict[str, Any]:
    """Everything, as plain values."""
    grids = {
        name: {
            case: {mode: {"verdict": v.word, "note": v.note} for (of, mode), v in grid.items() if of == case}
            for case in dict.fromkeys(case for case, _ in grid)
        }
        for name, (_, grid) in measured.items()
    }
    return {"machine": machine(), "systems": grids}


def show(measured: Measured, console: Console) -> None:
    """Print a table for each system, with its notes."""
    for name, (system, grid) in measured.items():
        modes, notes = _modes(grid), _Notes()
        table = Table(title=f"\n{name}", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.add_column("verb", no_wrap=True)
        for mode in modes:
            table.add_column(mode)
        for case in _cases(system, grid):
            words = (grid[case, mode] for mode in modes)
            table.add_row(case, *(f"[{_STYLES.get(v.word, 'red')}]{notes.mark(v)}[/]" for v in words))
        console.print(table)
        for line in notes.lines():
            console.print(f"  {line}", markup=False, soft_wrap=True)
        if missing := _missing(system, grid):
            console.print(f"  no such verb: {', '.join(missing)}", markup=False, soft_wrap=True)
    for word, meaning in VERDICTS.items():
        console.print(f"{word:>8}  {meaning}", markup=False, style="dim")


def markdown(measured: Measured) -> str:
    """The page of the docs."""
    grids = [grid for _, grid in measured.values()]
    parts = [_INTRO, f"Measured with {_on(machine())}.", "## Modes\n\n"]
    parts[-1] += "\n".join(f"* {name}: {MODES[name].text}" for name in _modes(*grids))
    reasons = {
        reason: mode.name
        for mode in MODES.values()
        for case in CASES.values()
        if (reason := no_meaning(case, mode))
    }
    parts.append("## Verdicts\n\n")
    parts[-1] += "\n".join(f"* {word}: {meaning}" for word, meaning in VERDICTS.items())
    parts[-1] += "".join(f"\n  * {mode}: {reason}" for reason, mode in reasons.items())
    parts.append("## Summary\n\n" + _rows(["system", *VERDICTS], _counts(measured)))
    parts.append("Cells that are ok, out of those that have a meaning:\n\n" + _by_verb(measured))
    for name, (system, grid) in measured.items():
        modes, notes = _modes(grid), _Notes()
        rows = [
            [f"`{case}`", *(notes.mark(grid[case, mode]) for mode in modes)] for case in _cases(system, grid)
        ]
        parts += [f"## {name}", system.assumed, _rows(["verb", *modes], rows)]
        if lines := notes.lines():
            parts.append("\n".join(f"* {_escaped(line)}" for line in lines))
        if missing := _missing(system, grid):
            parts.append("No such verb: " + ", ".join(f"`{case}`" for case in missing) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def _on(machine: Mapping[str, str]) -> str:
    system = machine["system"].partition(" ")[0]
    return f"torch {machine['torch']}, Gloo, {machine['CPU']}, {machine['cores']} cores, {system}"


class _Notes:
    """Numbers the explanations of a table's cells; what reads the same has one number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, verdict: Verdict) -> str:
        if verdict.word in ("ok", "n/a"):
            return verdict.word
        text = f"{verdict.word}: {verdict.note}"
        return f"{verdict.word} ({self._numbers.setdefault(text, len(self._numbers) + 1)})"

    def lines(self) -> list[str]:
        return [f"({number}) {text}" for text, number in self._numbers.items()]


def _modes(*grids: Grid) -> list[str]:
    return list(dict.fromkeys(mode for grid in grids for _, mode in grid))


def _cases(system: System, grid: Grid) -> list[str]:
    return [case for case in dict.fromkeys(case for case, _ in grid) if case in system.verbs]


def _missing(system: System, grid: Grid) -> list[str]:
    return [case for case in dict.fromkeys(case for case, _ in grid) if case not in system.verbs]


def _counts(measured: Measured) -> list[list[str]]:
    rows = []
    for name, (_, grid) in measured.items():
        counted = Counter(verdict.word for verdict in grid.values())
        rows.append([name, *(str(counted[word]) for word in VERDICTS)])
    return rows


def _by_verb(measured: Measured) -> str:
    rows = []
    for case in dict.fromkeys(case for _, grid in measured.values() for case, _ in grid):
        row = [f"`{case}`"]
        for system, grid in measured.values():
            words = [
                v.word
                for (of, mode), v in grid.items()
                if of == case and not no_meaning(CASES[of], MODES[mode])
            ]
            row.append(f"{words.count('ok')}/{len(words)}" if case in system.verbs else "n/a")
        rows.append(row)
    return _rows(["verb", *measured], rows)


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Text as Markdown shows it literally."""
    for sign in "\\`*_<>[]":
        text = text.replace(sign, "\\" + sign)
    return text
