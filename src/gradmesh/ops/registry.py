"""The registry: the list of all linear ops.

Each module of this package with ops defines their rows, `ROWS`. The adjoint tests run over the list, and the table in
the README is generated from it.
"""

from __future__ import annotations

import importlib
import pkgutil

from gradmesh import ops
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.mean import Mean
from gradmesh.ops.row import Row
from gradmesh.ops.transport import PlainAxis

__all__ = ["REGISTRY", "Row", "table"]


def _rows() -> tuple[Row, ...]:
    files = sorted(info.name for info in pkgutil.iter_modules(ops.__path__) if info.name != "registry")
    modules = [importlib.import_module(f"{ops.__name__}.{name}") for name in files]
    rows = [row for module in modules for row in getattr(module, "ROWS", ())]
    return tuple(sorted(rows, key=lambda row: row.call))


REGISTRY: tuple[Row, ...] = _rows()


def table() -> str:
    """The verbs with their types, forward maps and adjoints, as a Markdown table."""
    axis = PlainAxis(0, 3)
    names = {_kind(row.examples(axis)[0][0]): row.call for row in REGISTRY}
    lines = ["| verb | type | forward | adjoint |", "|---|---|---|---|"]
    for row in REGISTRY:
        op = row.examples(axis)[0][0]
        adjoint = "itself" if op.adjoint == op else names[_kind(op.adjoint)]
        if row.turned:
            adjoint += f", {row.turned}"
        if row.public:
            lines.append(f"| `{row.call}` | {op.src} -> {op.dst} | {row.forward} | {adjoint} |")
    return "\n".join(lines)


def _kind(op: LinearOp) -> tuple[type[Op], ...]:
    return (Mean, *_kind(op.op)) if isinstance(op, Mean) else (type(op),)
