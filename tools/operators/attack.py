"""Random programs, on ranks that do different things: what `gm.typed` claims, compared with all ranks' values.

What is claimed R or I has to be the same bits on every rank. The sum over ranks of what is claimed P has to be what the
same operator makes of the operands' sums. Programs with one operator, with a pending sum among its operands and nothing
that varies, have a finding if and only if the sum is wrong: no error is missed, and no correct program is accused.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import gradmesh as gm

SIZE = 6

Program = list[tuple[str, tuple[int, ...], int]]
"""Statements: what is done, with which of the values so far, and a number to be drawn from."""

OPERATORS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, torch.add),
    "sub": (2, torch.sub),
    "mul": (2, torch.mul),
    "div": (2, lambda x, y: x / (y.abs() + 1)),
    "exp": (1, lambda x: (x / 8).exp()),
    "tanh": (1, torch.tanh),
    "neg": (1, torch.neg),
    "double": (1, lambda x: x * 2),
    "more": (1, lambda x: x + 1),
    "halves": (1, lambda x: torch.cat([x[SIZE // 2 :], x[: SIZE // 2]])),
    "swapped": (1, lambda x: x.view(2, SIZE // 2).t().reshape(SIZE)),
    "cumsum": (1, lambda x: x.cumsum(0) / SIZE),
    "mean": (1, lambda x: x.mean().expand(SIZE)),
    "softmax": (1, lambda x: x.softmax(0)),
    "outer": (2, lambda x, y: torch.outer(x, y).sum(1) / SIZE),
    "where": (2, lambda x, y: torch.where(torch.arange(SIZE) < 3, x, y)),
    "picked": (1, lambda x: x[torch.tensor([5, 0, 1, 1, 2, 4])]),
    "into": (2, lambda x, y: torch.zeros(SIZE).add_(x).mul_(2).add_(y)),
    "patched": (2, lambda x, y: _patched(x, y)),
    "foreach": (2, lambda x, y: torch._foreach_add([x, y], [y, x])[0]),
    "addcmul": (3, torch.addcmul),
    "linear": (2, lambda x, y: torch.nn.functional.linear(x.view(2, 3), y.view(2, 3)).sum().expand(SIZE)),
    "where zero": (1, lambda x: torch.where(torch.arange(SIZE) % 2 > 0, x, 0.0)),
    "where one": (1, lambda x: torch.where(torch.arange(SIZE) % 2 > 0, torch.ones(()), x)),
    "beta 0": (2, lambda x, y: torch.addmv(x, torch.eye(SIZE), y, beta=0)),
    "alpha 0": (2, lambda x, y: torch.add(x, y, alpha=0)),
}
"""Operators, each with how many operands it takes."""


def _in_place(write: Callable[..., object]) -> Callable[..., Tensor]:
    """An operator that writes into a copy of its first operand, and reads that afterwards."""

    def written(x: Tensor, *others: Tensor) -> Tensor:
        made = x.clone()
        found = write(made, *others)
        return found * 1 if write in _READ_THEN and isinstance(found, Tensor) else made * 1

    return written


def _set(x: Tensor, at: object, to: object) -> None:
    x[at] = to  # type: ignore[index, assignment]


def _buffer(x: Tensor, y: Tensor) -> Tensor:
    """Rows of both in memory that held something else."""
    out = torch.ones(SIZE)
    out[: SIZE // 2] = x[: SIZE // 2]
    out[SIZE // 2 :].copy_(y[SIZE // 2 :])
    return out


def _beside(x: Tensor, y: Tensor) -> Tensor:
    """A part of the first that was not written."""
    even, odd = x[::2], x[1::2]
    odd.copy_(y[:3])
    return torch.cat([even, even])


_MASK = torch.tensor([True, False, False, True, True, False])
_SPOTS = torch.tensor([4, 0])

WRITES: dict[str, tuple[int, Callable[..., object]]] = {
    "set row": (2, lambda x, y: _set(x, 0, y[0])),
    "set rows": (2, lambda x, y: _set(x.view(2, 3), slice(0, 1), y[:3])),
    "set number": (1, lambda x: _set(x, 2, 1.5)),
    "set zero": (1, lambda x: _set(x, slice(1, 4), 0.0)),
    "set masked": (1, lambda x: _set(x, _MASK, 2.0)),
    "set masked zero": (1, lambda x: _set(x, _MASK, 0.0)),
    "set spots": (2, lambda x, y: _set(x, _SPOTS, y[:2])),
    "set nothing": (2, lambda x, y: _set(x, slice(0, 0), y[:0])),
    "view add": (2, lambda x, y: x[2:4].add_(y[2:4])),
    "view scale": (1, lambda x: x.view(3, 2).t()[0].mul_(3)),
    "view exp": (1, lambda x: x[:2].exp_()),
    "copy": (2, lambda x, y: x.view(2, 3)[1].copy_(y[3:])),
    "copy all": (2, lambda x, y: x.copy_(y)),
    "through data": (2, lambda x, y: x.data[1:2].copy_(y[:1])),
    "diagonal": (1, lambda x: x.view(2, 3).fill_diagonal_(1.0)),
    "diagonal zero": (1, lambda x: x.view(2, 3).diagonal().zero_()),
    "masked_fill": (1, lambda x: x.masked_fill_(_MASK, 1.0)),
    "masked_fill zero": (1, lambda x: x.masked_fill_(_MASK, 0.0)),
    "masked none": (1, lambda x: x.masked_fill_(torch.zeros(SIZE, dtype=torch.bool), 0.0)),
    "masked_scatter": (2, lambda x, y: x.masked_scatter_(_MASK, y)),
    "index_put": (2, lambda x, y: x.index_put_((_SPOTS,), y[:2])),
    "index_put added": (2, lambda x, y: x.index_put_((_SPOTS,), y[:2], accumulate=True)),
    "index_add": (2, lambda x, y: x.index_add_(0, _SPOTS, y[:2])),
    "index_fill": (1, lambda x: x.index_fill_(0, _SPOTS, 0.0)),
    "scatter": (2, lambda x, y: x.scatter_(0, _SPOTS, y[:2])),
    "scatter number": (1, lambda x: x.scatter_(0, _SPOTS, 1.0)),
    "lists": (2, lambda x, y: torch._foreach_add_([x[:3], x[3:]], [y[:3], y[3:]])),
    "lists scaled": (1, lambda x: torch._foreach_mul_([x[:3], x[3:]], 2.0)),
    "out": (2, lambda x, y: torch.add(y[:3].detach(), y[3:].detach(), out=x.detach()[:3])),
    "zeroed": (2, lambda x, y: x.zero_().add_(y)),
    "buffer": (2, _buffer),
    "beside": (2, _beside),
    "rows": (2, lambda x, y: [x[i].sub_(y[i]) for i in range(SIZE)]),
}
"""Writes in place and through views, each with how many operands there are; the copy is read then."""

_READ_THEN = (_buffer, _beside)
"""Those whose result is read in its place."""

OPERATORS |= {name: (taken, _in_place(write)) for name, (taken, write) in WRITES.items()}

_VERBS = ("all_reduce", "all_gather", "shard", "shift", "partial", "replicate", "declared", "scan", "max")
_RANKED = ("scaled", "chosen", "aside", "noise", "alike")


def _patched(x: Tensor, y: Tensor) -> Tensor:
    made = x.clone()
    made[1:3] = y[1:3]
    return made * 1


@dataclass
class Report:
    """What an attack found."""

    call_checks: Counter[str] = field(default_factory=Counter)
    # claims that are not so, wrong sums without a finding, and findings of right sums, each with its
    # program's number
    wrong: list[str] = field(default_factory=list)
    # programs that ended with an error of the library, by its class
    refused: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)  # findings, by kind
    # how many programs with one operator there were, and how many of them with a finding
    single: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"claims: {dict(sorted(self.call_checks.items()))}\nfindings: {dict(sorted(self.findings.items()))}\n"
            f"refused: {dict(self.refused)}\none operator: {dict(self.single)}\nwrong: {len(self.wrong)}\n"
            + "\n".join(self.wrong)
        )


def drawn(seed: int, length: int = 24) -> Program:
    """A random program."""
    draw = random.Random(seed)
    program: Program = [("parameter", (), 1), ("data", (), 2), ("varying", (), 3)]
    for number in range(length):
        kind = draw.random()
        name = draw.choice(
            [*OPERATORS]
            if kind < 0.6
            else _VERBS
            if kind < 0.85
            else _RANKED
            if kind < 0.95
            else ["data", "varying"]
        )
        taken = OPERATORS[name][0] if name in OPERATORS else 1
        # The latest values are taken most, so that chains are long.
        picks = tuple(max(0, len(program) - 1 - int(draw.expovariate(0.3))) for _ in range(taken))
        program.append((name, picks, 100 * seed + number))
    return program


def single(seed: int) -> Program:
    """A program with one operator, one of whose operands is a pending sum and none varies."""
    draw = random.Random(seed)
    made = ["parameter", "data", "varying", "declared", "varying", "declared"]
    program: Program = [
        (name, (at - 1,) if name == "declared" else (), 100 * seed + at) for at, name in enumerate(made)
    ]
    name = [*OPERATORS][seed % len(OPERATORS)]
    picks = [draw.choice([0, 1, 3, 3, 5]) for _ in range(OPERATORS[name][0])]
    if not {3, 5} & {*picks}:
        picks[draw.randrange(len(picks))] = 3
    return [*program, (name, tuple(picks), 0)]


def _run(program: Program, *, learn: bool) -> tuple[list[Tensor], list[gm.Type | None], list[str]]:
    """A rank's part: its values, what each is claimed to be, and the findings."""
    rank, ranks = gm.rank(), gm.world_size()
    values: list[Tensor] = []
    with gm.typed() as types:
        for name, picks, number in program:
            given = [values[pick] for pick in picks]
            values.append(_step(name, given, values, number, rank, ranks))
        if learn and values[-1].requires_grad:
            values[-1].square().sum().backward()
        call_checks = [types.of(x).get("world") for x in values]
    return [x.detach().clone() for x in values], call_checks, [finding.kind for finding in types.findings]


def _step(name: str, given: list[Tensor], values: list[Tensor], number: int, rank: int, ranks: int) -> Tensor:
    if name in OPERATORS:
        return OPERATORS[name][1](*given)
    shared = torch.Generator().manual_seed(number)
    own = torch.Generator().manual_seed(1000 * number + rank)
    x = given[0] if given else torch.empty(0)
    match name:
        case "parameter":
            return torch.randn(SIZE, generator=shared).requires_grad_()
        case "data":
            return torch.randn(SIZE, generator=shared)
        case "varying":
            return torch.randn(SIZE, generator=own)
        case "noise":
            return x + torch.randn(SIZE, generator=own)
        case "alike":
            return x + torch.randn(SIZE, generator=shared)
        case "scaled":
            return x * (1 + rank)
        case "chosen":
            return values[(number + rank) % len(values)] * 1
        case "aside":
            if rank == number % ranks:
                x.exp().sum().item()
            return x.clone()
        case "all_reduce":
            return gm.all_reduce(x, dst=gm.R if number % 2 else gm.I) / ranks
        case "max":
            return gm.all_reduce(x, op="max", dst=gm.R if number % 2 else gm.I)
        case "all_gather":
            gathered = gm.all_gather(x, dst=gm.R) if number % 2 else gm.all_gather(x, dst=gm.I)
            return gathered.view(ranks, SIZE).mean(0)
        case "shard":
            return gm.shard(x, src=gm.R if number % 2 else gm.I).repeat(ranks)
        case "shift":
            return gm.shift(x)
        case "scan":
            return gm.scan(x)
        case "partial":
            return gm.convert(x, src=gm.V, dst=gm.P)
        case "declared":
            return gm.assert_type(x * 1, gm.P)
        case _:
            return gm.replicate(x)


def attack(programs: int, seed: int = 0, ranks: int = 3) -> Report:
    """Run random programs: as many long ones, and as many with one operator."""
    report = Report()
    for number in range(seed, seed + programs):
        _one(report, number, drawn(number), ranks, learn=number % 2 == 0)
        program = single(number)
        outcome = _one(report, number, program, ranks, learn=False)
        if outcome is not None:
            _hold_single(report, number, program, *outcome)
    return report


Claims = tuple[list[list[Tensor]], list[list[gm.Type | None]], list[list[str]]]
"""Each rank's values, what they are claimed to be, and the findings."""


def _one(report: Report, number: int, program: Program, ranks: int, *, learn: bool) -> Claims | None:
    """Run a program, and compare what is claimed with its values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gm.CheckWarning)
            claims = gm.launch(lambda: _run(program, learn=learn), ranks, backend="threads")
    except gm.GradmeshError as error:
        report.refused[" ".join(str(error).split())[:300]] += 1
        return None
    for findings in (one[2] for one in claims):
        report.findings.update(findings)
    values, call_checks, found = (
        [one[0] for one in claims],
        [one[1] for one in claims],
        [one[2] for one in claims],
    )
    _hold(report, number, program, values, call_checks)
    return values, call_checks, found


def _hold_single(
    report: Report,
    number: int,
    program: Program,
    values: list[list[Tensor]],
    call_checks: list[list[gm.Type | None]],
    found: list[list[str]],
) -> None:
    """Whether there is a finding where the sum is another, and nowhere else."""
    name, picks, _ = program[-1]
    made, total = _dense(name, picks, values, call_checks[0]), torch.stack([own[-1] for own in values]).sum(0)
    same = gm.R in {call_checks[0][-1]} or gm.I in {call_checks[0][-1]}  # overwritten whole
    right = same or torch.allclose(made, total, rtol=1e-4, atol=1e-4 * float(1 + total.abs().max()))
    report.single["right" if right else "wrong"] += 1
    for findings in found:
        if right and findings:
            report.wrong.append(f"program {number}, {name} of {picks}: {findings}, and the sum is right")
        if not right and not findings:
            report.wrong.append(f"program {number}, {name} of {picks}: no finding, and the sum is another")


def _hold(
    report: Report,
    number: int,
    program: Program,
    values: list[list[Tensor]],
    call_checks: list[list[gm.Type | None]],
) -> None:
    for at, (name, picks, _) in enumerate(program):
        mine = [own[at] for own in values]
        claimed = {own[at] for own in call_checks}
        if len(claimed) > 1:
            report.wrong.append(f"program {number}, {name}: the ranks claim {claimed}")
            continue
        (kind,) = claimed
        report.call_checks[str(kind)] += 1
        if kind in (gm.R, gm.I) and any(not torch.equal(mine[0], one) for one in mine[1:]):
            report.wrong.append(f"program {number}, {name} of {picks} at {at}: {kind}, and differs")
        if (
            kind is not gm.P or name not in OPERATORS or name == "view exp"
        ):  # a V beside the rest, with a finding
            continue
        made, total = _dense(name, picks, values, call_checks[0]), torch.stack(mine).sum(0)
        if not torch.allclose(made, total, rtol=1e-4, atol=1e-4 * float(1 + total.abs().max())):
            report.wrong.append(f"program {number}, {name} of {picks} at {at}: P, and the sum is another")


def _dense(
    name: str, picks: tuple[int, ...], values: list[list[Tensor]], call_checks: list[gm.Type | None]
) -> Tensor:
    """What the sum over ranks has to be.

    Of pending sums and what every rank has, that is what the operator makes of the sums. Where something varies beside,
    it is what the sum is when the ranks' terms have changed places.
    """
    run, ranks = OPERATORS[name][1], len(values)
    if gm.V not in {call_checks[pick] for pick in picks}:
        whole = [torch.stack([own[pick] for own in values]).sum(0) for pick in picks]
        return run(
            *(
                x if call_checks[pick] is gm.P else values[0][pick]
                for x, pick in zip(whole, picks, strict=True)
            )
        )
    turned = [
        [values[(rank + 1) % ranks if call_checks[pick] is gm.P else rank][pick] for pick in picks]
        for rank in range(ranks)
    ]
    return torch.stack([run(*given) for given in turned]).sum(0)
