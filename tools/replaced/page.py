"""The page of replaced collectives."""

from __future__ import annotations

from typing import Any

from tools.pages import END, mark, table

RIGHT, SINGLE = 1e-12, 1e-5
REPOSITORY = "repository | file | lines before | lines after | its tests before | its tests after"
FUNCTION = "repository | function | gradient | second derivative | uneven sizes | subgroup"
MEASURES = ("gradient", "second", "uneven", "subgroup")


def verdict(error: float | str) -> str:
    """A measured error, or why there is none, for the table.

    >>> [verdict(e) for e in (1e-16, 3e-8, 0.5, float("inf"), "RuntimeError: no")]
    ['right', 'right to 3e-08', '**wrong** by 0.5', '**wrong** shape', '**raises**']
    """
    if isinstance(error, str):
        known = {"it hangs": "**hangs**", "WrongShapeError": "**wrong** shape"}
        return known.get(error.split(":")[0], "**raises**")
    if error < RIGHT:
        return "right"
    if error < SINGLE:
        return f"right to {error:.0e}"
    return "**wrong** shape" if error == float("inf") else f"**wrong** by {error:.2g}"


ABSENT = "no argument"
Measure = float | str | None


def measure(run: dict[str, Any], what: str) -> Measure:
    """The largest error of a run, or why there is none; None where there is nothing to measure."""
    situation, keys = {
        "gradient": ("even", ("value", "first")),
        "second": ("even", ("second",)),
        "uneven": ("uneven", ("value", "first")),
        "subgroup": ("subgroup", ("value", "first")),
    }[what]
    each = run[situation]
    if "absent" in each:
        return ABSENT if each["absent"] == ABSENT else None
    found = [each["raises"]] if "raises" in each else [each[key] for key in keys]
    return next((one for one in found if isinstance(one, str)), None) or max(found)


def best(runs: dict[str, Measure]) -> tuple[Measure, str]:
    """The measure over Gloo, or over shared memory where Gloo raises and it does not; with the backend."""
    gloo, shm = runs["gloo"], runs["shm"]
    other = isinstance(gloo, str) and not isinstance(shm, str) and shm is not None
    return (shm, "shm") if other else (gloo, "gloo")


def worst(runs: dict[str, Measure]) -> Measure:
    """The largest error over the backends, or the first text."""
    found = list(runs.values())
    texts = [each for each in found if isinstance(each, str)]
    numbers = [each for each in found if isinstance(each, float | int)]
    return texts[0] if texts else max(numbers) if numbers else None


def both(function: dict[str, Any], what: str) -> tuple[Measure, str, Measure]:
    """Before, with the backend, and after."""
    sides: dict[str, dict[str, Measure]] = {"before": {}, "after": {}}
    for name, run in function.items():
        side, backend = name.split()
        sides[side][backend] = measure(run, what)
    return *best(sides["before"]), worst(sides["after"])


def cell(function: dict[str, Any], what: str) -> str:
    """Before and after."""
    before, backend, after = both(function, what)
    if before is None and after is None:
        return "-"
    mark = " (shm)" if backend == "shm" else ""
    said = (ABSENT if each == ABSENT else "-" if each is None else verdict(each) for each in (before, after))
    return f"{next(said)}{mark} / {next(said)}"


def page(data: dict[str, Any]) -> str:
    """The page."""
    parts = [
        "# Collectives of other libraries, replaced by gradmesh",
        mark("docs/replaced.md"),
        "In a copy of each repository the hand-written differentiable collectives are replaced by a short text of "
        "`tools/replaced/texts`, and nothing else is changed. Each function runs before and after on three ranks over "
        "Gloo and over the `shm` backend, and is compared with one process in double precision, "
        f"with torch {data['torch']}. The tests are the repository's own, of the files that call what is replaced. "
        "Where they ask for GPUs, each GPU is the CPU and NCCL is Gloo, by `tools/replaced/standins/cuda`, before and "
        "after: that shows what is computed, and nothing about GPUs. *Not run*: the notes say why.",
        table(REPOSITORY, [line for row in data["rows"] for line in _files(row)]),
        "## Functions",
        "Before / after. Before is over Gloo; *(shm)* is over `shm`, where Gloo raises, which takes no lists of "
        "different sizes. After is the worse of both. No GPU and no NCCL was used. *Right*: the relative error is "
        f"below {RIGHT:g}. *Wrong by 0.5*: half of the largest entry. *Raises*: an error on some rank.",
        "The losses of the ranks differ and are added, except where every rank is meant to hold the same result: there "
        "it counts once. A factor that a library puts on its gradients counts once in each derivative. The second "
        "derivative is that of a loss of the gradient. Uneven sizes are 3, 1 and 2 rows (3, 2, 2 or 3, 3, 1 where the "
        "library splits), a subgroup is ranks 1 and 2 of three. *No argument*: the function takes no group; after, it "
        "uses the current mesh of `gm.use_mesh`. -: sizes or groups do not occur.",
        table(FUNCTION, [_function(row, name) for row in data["rows"] for name in row["functions"]]),
    ]
    notes = [f"- {row['name']}: {row['left']}" for row in data["rows"] if row["left"]]
    parts += ["## Notes", "\n".join(notes)] if notes else []
    errors = [line for row in data["rows"] for line in _errors(row)]
    parts += ["## Errors", "\n".join(errors)] if errors else []
    parts.append(
        "All numbers are in [replaced.json](reports/replaced.json). Repeat it with `python -m tools.replaced`, some "
        "with `python -m tools.replaced lightly`. How to replace a gather by hand: [migration](migration.md)."
    )
    return "\n\n".join([*parts, END]) + "\n"


def _files(row: dict[str, Any]) -> list[list[str]]:
    lines: list[list[str]] = []
    for n, path in enumerate(row["files"]):
        tests = ["", ""] if n else [row[side]["tests"] or "not run" for side in ("before", "after")]
        counts = [f"{row[side]['lines'][n]:,}" for side in ("before", "after")]
        lines.append(["" if n else row["source"], f"`{path}`", *counts, *tests])
    return lines


def _function(row: dict[str, Any], name: str) -> list[str]:
    return [row["name"], f"`{name}`", *(cell(row["functions"][name], what) for what in MEASURES)]


def _errors(row: dict[str, Any]) -> list[str]:
    """Each different error, with where it is raised."""
    where: dict[tuple[str, str], list[str]] = {}
    for name, runs in row["functions"].items():
        for what in MEASURES:
            before, _, after = both(runs, what)
            for side, error in (("before", before), ("after", after)):
                if isinstance(error, str) and error != ABSENT and not error.startswith("WrongShape"):
                    where.setdefault((side, error), []).append(f"{name} ({what})")
    return [f"- {row['name']}, {side}, {', '.join(at)}: `` {error} ``" for (side, error), at in where.items()]
