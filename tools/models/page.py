"""docs/models.md, of what docs/reports/models.json has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.models.program import FAMILIES, PLANS
from tools.pages import END, mark, table

_SIGNS = {"right": "right", "wrong": "**wrong**", "unchecked": "not checked", "refused": "refused"}


def page(data: dict[str, Any]) -> str:
    """The page."""
    rows = data["rows"]
    releases = sorted({row["release"] for row in rows}, key=lambda each: tuple(map(int, each.split("."))))
    parts = [
        "# Parallel plans of transformers",
        mark("docs/models.md"),
        "`gradmesh check` on the parallel plans that models of transformers have: tiny models with random "
        "weights, two steps of SGD on local ranks over Gloo. A plan is a `DistributedConfig`; sizes and plans are in "
        "`tools/models/program.py`. Each release of transformers runs in an environment of its own, with torch "
        f"{data['torch']}.",
        "A cell is *right* where the gradients of both steps were compared with the true ones and no error was found, "
        "and *wrong* with the rule of the first error. Where a wrong cell is *confirmed*, its gradients also differ "
        "from those of the same model in one process; *refused* is what raises under transformers itself. The time is "
        "that of the whole check, in seconds. An empty cell was not measured, or the model has no experts.",
    ]
    for release in reversed(releases):
        own = {(row["family"], row["plan"]): row for row in rows if row["release"] == release}
        shown = [family for family in FAMILIES if any(key[0] == family for key in own)]
        lines = [[family, *(_cell(own.get((family, plan))) for plan in PLANS)] for family in shown]
        parts += [f"## transformers {release}", table(["model", *PLANS], lines)]
        parts += _details(list(own.values()))
    if faults := data.get("injected"):
        there = [each for each in faults if each["verdict"] in ("right", "wrong")]
        missed = [f"{each['fault']} in {each['cell']}" for each in there if each["verdict"] == "right"]
        parts += [
            "## Faults in right cells",
            "A random collective of the second backward is doubled, dropped, or not made, alike on all ranks: "
            f"{len(there) - len(missed)} of {len(there)} are found"
            + (f". Not found: {'; '.join(missed)}." if missed else "."),
        ]
    parts.append(
        "The findings with their lines and all times are in [models.json](reports/models.json). Repeat it with "
        "`python -m tools.models`, one release with `--releases 5.24.0`, some cells with `--only olmoe ep`. A finding "
        "as it can be reported, with a script of 35 lines: [the router under expert parallelism](models/olmoe-ep.md)."
    )
    return "\n\n".join([*parts, END]) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    said = _SIGNS[row["verdict"]]
    if row["verdict"] == "wrong":
        sure = "confirmed" if _wrong(row) else "not confirmed"
        said += f" {_first(row)['rule']}, {sure}"
    return f"{said}, {row['seconds']:.0f}" if row["verdict"] in ("right", "wrong") else said


def _wrong(row: dict[str, Any]) -> bool:
    return bool(row["parity"] and row["parity"]["wrong"])


def _first(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in row["findings"] if each["severity"] == "error")
    return found


def _details(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was found, and why cells were refused or not checked: cells of which the same is said together."""
    said: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['family']} {row['plan']}"
        if row["verdict"] == "wrong":
            found, parity = _first(row), row["parity"]
            at, received = (_place(found[key]) for key in ("at", "received"))
            text = f"{found['rule']} at {at}" + (f", received at {received}" if received else "")
            if parity and parity["far"] is not None:
                one, other = parity["norms"]
                text += f". Beside one process: the norm of {parity['name']} is {other:.4g} for {one:.4g}"
            said.setdefault(text, []).append(name)
        elif row["verdict"] == "refused":
            said.setdefault(f"refused: `` {row['error']} ``", []).append(name)
        elif row["verdict"] == "unchecked":
            why = row["error"] or next(iter(row["notes"]), "no note says why")
            said.setdefault(f"not checked: {why}", []).append(name)
    return ["\n".join(f"- {', '.join(names)}: {text}" for text, names in said.items())] if said else []


def _place(place: dict[str, Any] | None) -> str:
    return f"`{place['file']}:{place['line']}`" if place else ""
