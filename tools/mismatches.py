"""Mismatched calls, forward, backward and in second order, and what every rank raises.

    python -m tools.mismatches
    python -m tools.report docs/reports/mismatches.md

Each mismatch is a pair of calls: rank 0 makes the first and rank 1 the second. Forward they are made like that.
Backward both ranks make both, and each rank's loss uses its own; twice backward both gradients are taken, and each rank
goes on from its own. Then each rank makes one more call, as a training step does. A cell says what both ranks raised,
and how long it took.

Under the deferred check every cell has a world of its own, and an optimizer steps at the end. A cell says so if it
stepped on some rank.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from tools.pages import parser_of

BACKENDS = ("threads", "shm", "gloo", "gloo deferred", "simulated device")
"""The last two are the deferred check: selected on Gloo, and the default of a device, here that of the tests."""
FORMS = ("forward", "backward", "second backward")
PATIENCE = 60.0
"""Seconds of the cells of a world, with its start."""

Made = Callable[[Tensor], list[Tensor]]


def _operand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.Generator().manual_seed(7 + gm.rank())
    drawn = torch.randn(shape, dtype=dtype, generator=draws, device="cpu")
    return drawn.to(torch.get_default_device()).requires_grad_()


def _rows(first: int, second: int) -> Callable[[], Tensor]:
    sizes = (first, second)
    return lambda: gm.all_gather(_operand(sizes[gm.rank()], 2), sizes=sizes)


def _parts(first: tuple[int, int], second: tuple[int, int]) -> Callable[[], Tensor]:
    """What each rank gives to each, as much as it takes from it."""

    def made() -> Tensor:
        mine = (first, second)[gm.rank()]
        return gm.all_to_all(_operand(4, 2), split_sizes=mine, concat_sizes=mine)

    return made


def _one(call: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [call()]


def _sum(*shape: int, **params: Any) -> Callable[[], Tensor]:
    return lambda: gm.all_reduce(_operand(*shape), dst=gm.R, **params)


def _swapped(first: int) -> Callable[[], list[Tensor]]:
    """Two calls of one shape, one of which is used; forward they are made in another order."""

    def made() -> list[Tensor]:
        x, y = _operand(2), _operand(2).square()
        if first:
            b = gm.all_gather(y)
            return [gm.all_gather(x), b][:1]
        a = gm.all_gather(x)
        return [a, gm.all_gather(y)][:1]

    return made


MISMATCHES: dict[str, tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]] = {
    "kind of call": (_one(_sum(4)), _one(lambda: gm.reduce_scatter(_operand(4)))),
    "number of elements": (_one(_sum(4)), _one(_sum(6))),
    "shape, as many elements": (_one(_sum(2, 3)), _one(_sum(3, 2))),
    "dtype": (
        _one(_sum(4)),
        _one(lambda: gm.all_reduce(_operand(4, dtype=torch.float32), dst=gm.R)),
    ),
    "sizes of a gather": (_one(_rows(2, 3)), _one(_rows(3, 2))),
    "sizes that two ranks tell each other": (
        _one(_parts((1, 3), (3, 1))),
        _one(_parts((2, 2), (2, 2))),
    ),
    "a call is missing": (_one(_sum(4)), list),
    "one call too many": (_one(_sum(4)), lambda: [_sum(4)(), _sum(4)()]),
    "sum against maximum": (_one(_sum(4)), _one(_sum(4, op="max"))),
    "sum against mean": (_one(_sum(4)), _one(_sum(4, op="mean"))),
    "root": (
        _one(lambda: gm.broadcast(_operand(4), root=0)),
        _one(lambda: gm.broadcast(_operand(4), root=1)),
    ),
    "dimension": (
        _one(lambda: gm.all_gather(_operand(2, 2), dim=0)),
        _one(lambda: gm.all_gather(_operand(2, 2), dim=1)),
    ),
    "convention": (
        _one(lambda: gm.all_gather(_operand(4), dst=gm.R)),
        _one(lambda: gm.all_gather(_operand(4), dst=gm.I)),
    ),
    "two calls of one shape changed places": (_swapped(0), _swapped(1)),
}


def _summed(outputs: list[Tensor]) -> Tensor | None:
    return sum((y.double() ** 3).sum() for y in outputs) if outputs else None  # type: ignore[return-value]


def provoked(name: str, form: str) -> None:
    """Make the mismatch on this rank, and go on."""
    mine, both = MISMATCHES[name][gm.rank()], MISMATCHES[name]
    if form == "forward":
        mine()
    else:
        losses = [_summed(made()) for made in both]
        if form == "second backward":
            losses = [None if loss is None else _gradient(loss) for loss in losses]
        loss = losses[gm.rank()]
        if loss is not None:
            loss.backward()
    gm.all_gather(torch.zeros(1))


def _gradient(loss: Tensor) -> Tensor:
    """The sum of the squares of the loss's gradient with respect to what it was made of."""
    leaves: list[Tensor] = []
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and node.variable.numel():
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    return sum((g.double() ** 2).sum() for g in grads)  # type: ignore[return-value]


def heard(name: str, form: str) -> tuple[str, float]:
    """What this rank raised, and after how many seconds."""
    gm.barrier()
    begin = time.monotonic()
    try:
        provoked(name, form)
    except gm.GradmeshError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def heard_later(name: str, form: str, on_device: bool) -> tuple[str, float]:
    """The same under the deferred check; with the device of the tests, on it."""
    if on_device:
        from tests import simulated_device

        found: list[tuple[str, float]] = []
        try:
            simulated_device.on_device(lambda: found.append(_stepped(name, form)))
        except RuntimeError:  # of the kernel whose collective was aborted, at the end
            if not found:
                raise
        return found[0]
    with gm.check("deferred"):
        return _stepped(name, form)


def _stepped(name: str, form: str) -> tuple[str, float]:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    optimizer.step()
    gm.all_gather(torch.zeros(1))
    optimizer.step()
    begin, stepped = time.monotonic(), ""
    try:
        provoked(name, form)
        optimizer.step()
        stepped = STEPPED
        gm.all_gather(torch.zeros(1))
        optimizer.step()
    except gm.GradmeshError as error:
        return stepped + str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


STEPPED = "after a step: "


def cell(name: str, form: str, ranks: gm.Ranks, backend: str) -> str:
    """A mismatch in one form, as the table has it."""
    if backend in BACKENDS[3:]:
        outcomes = ranks.run(heard_later, name, form, backend == BACKENDS[4])
    else:
        outcomes = ranks.run(heard, name, form)
    if not any(text for text, _ in outcomes):
        return "**silent**"
    if not all(text for text, _ in outcomes):
        return "**on one rank alone**"
    both = all("rank 0" in text and "rank 1" in text for text, _ in outcomes)
    lines = all("mismatches.py:" in text for text, _ in outcomes)
    said = "both calls" if both else "one rank"
    if any(text.startswith(STEPPED) for text, _ in outcomes):
        said = f"**after a step**, {said}"
    return f"{said}{', lines' if lines else ''}, {1000 * max(after for _, after in outcomes):.0f} ms"


def cells(name: str, backend: str) -> list[str]:
    """A mismatch in every form on one backend. A launch that fails is followed by another."""
    found: list[str] = []
    world = "gloo" if backend in BACKENDS[3:] else backend
    if backend == BACKENDS[4]:
        from tests.simulated_device import build

        build.module()  # before a rank has to wait for it
    while len(found) < len(FORMS):
        begin = time.monotonic()
        try:
            with gm.Ranks(2, backend=world, timeout=PATIENCE) as ranks:
                while len(found) < len(FORMS):
                    begin = time.monotonic()
                    found.append(cell(name, FORMS[len(found)], ranks, backend))
                    if backend in BACKENDS[3:]:
                        break
        except gm.RankError as error:
            kind = re.search(r"failed with \w+", str(error))
            found.append(f"the launch: {kind[0] if kind else 'RankError'}, {time.monotonic() - begin:.1f} s")
    return found


def table(backends: Sequence[str]) -> list[str]:
    """The table, as lines of Markdown."""
    heads = [f"{backend}, {form}" for backend in backends for form in FORMS]
    lines = [f"| mismatch | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in MISMATCHES:
        row = [text for backend in backends for text in cells(name, backend)]
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return lines


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the table, or write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="all by default")
    lines = table(parser.parse_args(arguments).backend or BACKENDS)
    if into is not None:
        into.write_text(PAGE.format(table="\n".join(lines), torch=torch.__version__))
    return 0


PAGE = """# Mismatch detection: what each rank receives when the ranks' calls differ

What gradmesh reports when two ranks make different collective calls at the same point: other ops, shapes, dtypes, sizes
or arguments. Written by `python -m tools.report docs/reports/mismatches.md` on torch {torch}, 2 ranks of
one machine.

Rank 0 makes one call of a pair and rank 1 the other: in forward; in the backward of two calls that both ranks made; in
the second backward. "both calls, lines": every rank raised an error of gradmesh with every rank's call and its line of
code; a backward call also names the line of the forward call. The time is until the last rank had raised. "the launch":
one rank had finished, and the launcher ended the other one's wait with an error that names both.

{table}

"gloo deferred" is `gm.check("deferred")`, with a new world for each cell, and an optimizer
steps after the mismatch: "after a step" would say that it stepped on some rank before the error. "simulated device" is
the same on the accelerator of the tests, where it is the default, and where collectives with operands of unexpected
sizes wait until their group is aborted, as on a GPU. What a deferred error cannot prevent is in
[call checking](../checking.md#deferred-tensors-off-the-cpu).

In forward, two calls of the same kind, shape and dtype that are swapped on one rank differ only in their lines;
`gradmesh.check("full")` warns of that. If a rank skips a call, its next call is compared with the others' skipped one.
"""

if __name__ == "__main__":
    sys.exit(main())
