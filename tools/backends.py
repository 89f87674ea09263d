"""What each backend carries: dtypes and shapes, in each kind of collective, by itself and through gradmesh.

    python -m tools.backends
    python -m tools.report docs/reports/backends.md

Every cell is a call on two ranks whose result is compared with that of float32. NCCL's own column
follows torch's source; there is no GPU to run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.transport.packing import CARRIED
from tools import pages

BACKENDS = "threads", "shm", "gloo"

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": gm.all_gather,
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "reduce_scatter": gm.reduce_scatter,
    "all_to_all": gm.all_to_all,
    "broadcast": lambda x: gm.broadcast(x, root=1),
    "shift": gm.shift,
}
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    dist.all_reduce(out)


def _broadcast(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    dist.broadcast(out, 1)


def _shift(x: Tensor, out: Tensor) -> None:
    other = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, out, other)]
    ):
        work.wait()


RAW: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_gather": lambda x, out: _gather(out, x),
    "all_reduce": _all_reduce,
    "reduce_scatter": lambda x, out: _scatter(out, x),
    "all_to_all": lambda x, out: dist.all_to_all_single(out, x),
    "broadcast": _broadcast,
    "shift": _shift,
}

DTYPES = {
    "int64": torch.int64,
    "int16": torch.int16,
    "bool": torch.bool,
    "float8": torch.float8_e4m3fn,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "complex64": torch.complex64,
}
SHAPES = "no elements", "not contiguous", "0-d"
CASES = (*DTYPES, *SHAPES)

NCCL = {
    "int64": "yes",
    "int16": "no",
    "bool": "yes, as uint8",
    "float8": "depends on NCCL and the GPU",
    "half": "yes",
    "bfloat16": "yes",
    "complex64": "as pairs, by torch; not every call",
    "no elements": "yes",
    "not contiguous": "no: torch raises",
    "0-d": "yes, where no dimension is split",
}
"""The backend by itself, for every kind of collective."""


def operand(case: str) -> Tensor:
    """Small integers, different on each rank."""
    x = torch.arange(8.0) % 3 + gm.rank()
    if case == "no elements":
        return x[:0]
    if case == "not contiguous":
        return x.view(4, 2).T
    if case == "0-d":
        return x[1].clone()
    return (x > 1) if case == "bool" else x.to(DTYPES[case])


def _wide(x: Tensor) -> Tensor:
    return x.real.float() if x.is_complex() else x.float()


def _outcome(call: Callable[[], Tensor], expected: Tensor | None) -> str:
    try:
        found = _wide(call())
    except (gm.GradmeshError, RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}"
    return "yes" if expected is not None and torch.equal(found, expected) else "**wrong**"


def on_each_rank(case: str, kind: str) -> tuple[str, str]:
    """What gradmesh and the backend itself do with a call on this rank."""
    x, expected = operand(case), None
    try:
        expected = KINDS[kind](_wide(x))
        if case == "bool":  # a sum of bools saturates
            expected = (expected > 0).float()
    except gm.GradmeshError:  # a 0-d tensor cannot be split
        return _outcome(lambda: KINDS[kind](x), None), "-"
    ours = _outcome(lambda: KINDS[kind](x), expected)

    def raw() -> Tensor:
        out = torch.empty(expected.shape, dtype=x.dtype)
        RAW[kind](x, out)
        return out

    return ours, _outcome(raw, expected) if case not in SHAPES else "-"


def cells(
    backend: str, cases: Sequence[str] = CASES, kinds: Sequence[str] = (*KINDS,)
) -> dict[str, dict[str, Any]]:
    """The outcomes on a backend by case and kind: gradmesh's, and the backend's own."""
    found: dict[str, dict[str, Any]] = {case: {} for case in cases}
    left = [(case, kind) for case in cases for kind in kinds]
    while left:
        with gm.Ranks(2, backend=backend, timeout=12) as ranks:
            while left:
                case, kind = left.pop(0)
                try:
                    outcomes = ranks.run(on_each_rank, case, kind)
                except gm.RankError:  # the ranks are gone
                    found[case][kind] = "**the ranks end**", "**the ranks end**"
                    break
                found[case][kind] = tuple(" / ".join(sorted({each[n] for each in outcomes})) for n in (0, 1))
    return found


def sent(case: str) -> str:
    """How gradmesh hands it to a backend of torch.distributed."""
    if case in SHAPES:
        return "a dense copy" if case == "not contiguous" else "as it is"
    if DTYPES[case] in CARRIED:
        return "as it is"
    summed = "refused" if case == "float8" else "exchanged as bytes and added by gradmesh"
    return f"as bytes; sums are {summed}"


def _joined(row: dict[str, Any], which: int) -> str:
    """One text if all kinds agree; otherwise the kinds of each."""
    by: dict[str, list[str]] = {}
    for kind, outcome in row.items():
        by.setdefault(outcome[which], []).append(kind)
    if len(by) == 1:
        return next(iter(by))
    return "; ".join(f"{text}: {', '.join(kinds)}" for text, kinds in by.items() if text != "-")


def page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The page."""
    heads = [
        "",
        "sent by gradmesh",
        *(f"gradmesh on {name}" for name in found),
        "Gloo itself",
        "NCCL itself (not run)",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in CASES:
        row = [case, sent(case), *(_joined(each[case], 0) for each in found.values())]
        row += [_joined(found["gloo"][case], 1), NCCL[case]]
        lines.append(f"| {' | '.join(row)} |")
    return PAGE.format(table="\n".join(lines), kinds=", ".join(f"`{kind}`" for kind in KINDS))


PAGE = """# What each backend carries: dtypes and shapes

Which dtypes and shapes of operands {kinds} take,
through gradmesh and by the backend itself, on two ranks. Written by `python -m tools.report docs/reports/backends.md`.
"yes": the result is right. An error's name: every rank raises it.
Where the kinds differ, each is named; "-": not tried. Sums of bool and float8 are refused by gradmesh on every backend.

{table}

Gloo itself is called by `torch.distributed`'s functions, with contiguous operands. NCCL's column is not
measured: it follows the map of dtypes in torch's `ProcessGroupNCCL.cpp`, and the checks of its arguments.
"""


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the page, or write it."""
    del arguments
    pages.show(page({backend: cells(backend) for backend in BACKENDS}), into)
    return 0


if __name__ == "__main__":
    from tools import backends  # whose functions the ranks can import

    sys.exit(backends.main())
