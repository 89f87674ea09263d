"""Random programs, on ranks that do different things: what `gm.typed` claims, held against all ranks' values.

What is claimed R or I has to be the same bits on every rank. The sum over ranks of what is claimed P has to be what the
same operator makes of the operands' sums.
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

__all__ = ["Report", "attack"]

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
}
"""Operators, each with how many operands it takes."""

_VERBS = ("all_reduce", "all_gather", "shard", "shift", "partial", "replicate", "declared", "scan", "max")
_RANKED = ("scaled", "chosen", "aside", "noise", "alike")


def _patched(x: Tensor, y: Tensor) -> Tensor:
    made = x.clone()
    made[1:3] = y[1:3]
    return made * 1


@dataclass
class Report:
    """What an attack found.

    Attributes:
        claims: how many values were claimed to be of each type.
        wrong: claims that are not so, each with its program's number.
        refused: programs that ended with an error of the library, by its class.
        findings: findings, by kind.
    """

    claims: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"claims: {dict(sorted(self.claims.items()))}\nfindings: {dict(sorted(self.findings.items()))}\n"
            f"refused: {dict(self.refused)}\nwrong: {len(self.wrong)}\n" + "\n".join(self.wrong)
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
        claims = [types.of(x).get("world") for x in values]
    return [x.detach().clone() for x in values], claims, [finding.kind for finding in types.findings]


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
    """Run random programs.

    Args:
        programs: how many.
        seed: of the first.
        ranks: on how many ranks, which divides 6.
    """
    report = Report()
    for number in range(seed, seed + programs):
        program = drawn(number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", gm.CheckWarning)
                told = gm.launch(
                    lambda program=program, number=number: _run(program, learn=number % 2 == 0),
                    ranks,
                    backend="threads",
                )
        except gm.GradmeshError as error:
            report.refused[type(error).__name__ + ": " + str(error)] += 1
            continue
        for findings in (one[2] for one in told):
            report.findings.update(findings)
        _hold(report, number, program, [one[0] for one in told], [one[1] for one in told])
    return report


def _hold(
    report: Report,
    number: int,
    program: Program,
    values: list[list[Tensor]],
    claims: list[list[gm.Type | None]],
) -> None:
    for at, (name, picks, _) in enumerate(program):
        mine = [own[at] for own in values]
        claimed = {own[at] for own in claims}
        if len(claimed) > 1:
            report.wrong.append(f"program {number}, {name}: the ranks claim {claimed}")
            continue
        (kind,) = claimed
        report.claims[str(kind)] += 1
        if kind in (gm.R, gm.I) and any(not torch.equal(mine[0], one) for one in mine[1:]):
            report.wrong.append(f"program {number}, {name} of {picks} at {at}: {kind}, and differs")
        if kind is not gm.P or name not in OPERATORS:
            continue
        made, total = _dense(name, picks, values, claims[0]), torch.stack(mine).sum(0)
        if not torch.allclose(made, total, rtol=1e-4, atol=1e-4 * float(1 + total.abs().max())):
            report.wrong.append(f"program {number}, {name} of {picks} at {at}: P, and the sum is another")


def _dense(
    name: str, picks: tuple[int, ...], values: list[list[Tensor]], claims: list[gm.Type | None]
) -> Tensor:
    """What the sum over ranks has to be.

    Of pending sums and what every rank has, that is what the operator makes of the sums. Where something varies beside,
    it is what the sum is when the ranks' terms have changed places.
    """
    run, ranks = OPERATORS[name][1], len(values)
    if gm.V not in {claims[pick] for pick in picks}:
        whole = [torch.stack([own[pick] for own in values]).sum(0) for pick in picks]
        return run(
            *(x if claims[pick] is gm.P else values[0][pick] for x, pick in zip(whole, picks, strict=True))
        )
    turned = [
        [values[(rank + 1) % ranks if claims[pick] is gm.P else rank][pick] for pick in picks]
        for rank in range(ranks)
    ]
    return torch.stack([run(*given) for given in turned]).sum(0)
