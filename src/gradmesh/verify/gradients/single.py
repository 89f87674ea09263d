"""`same_as_single`: a program of several ranks against the same program on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradmesh.errors import ArgumentError, GradcheckError, message
from gradmesh.launch import Ranks
from gradmesh.verify.gradients.comparison import Comparison
from gradmesh.verify.gradients.placements import Placement
from gradmesh.verify.gradients.program import Objective
from gradmesh.verify.gradients.single_diagnosis import why
from gradmesh.verify.gradients.single_names import refuse_names_apart
from gradmesh.verify.gradients.single_report import SingleReport
from gradmesh.verify.gradients.training import Plan, train

__all__ = ["same_as_single"]

Inputs = Callable[[int], Sequence[object]] | Sequence[object]


def same_as_single(
    distributed: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    *,
    inputs: Inputs = (),
    world_size: int,
    module: Callable[[], nn.Module] | None = None,
    parallel: Callable[[nn.Module], nn.Module] | None = None,
    parameters: Mapping[str, Placement] | None = None,
    outputs: Mapping[str, Placement] | None = None,
    objective: Objective = "sum",
    steps: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ordered: bool = False,
    backend: str = "threads",
    rtol: float = 1e-9,
    atol: float = 1e-10,
    diagnose: bool = True,
    raise_exception: bool = True,
    timeout: float | None = 60.0,
) -> SingleReport:
    """Check that a program of several ranks computes what the same program does on one process.

    Both are called as `fn(module, *inputs)`, or `fn(*inputs)` without a module, and return a loss, or the loss and a
    dict of other values. Both then run backward and a step of the optimizer, `steps` times. Everything is in float64.

    Args:
        distributed: runs on each rank, with that rank's part of the inputs.
        reference: runs alone, in a world of one rank, with the whole inputs. None: `distributed`, as every collective
            of a world of one is the identity.
        inputs: the whole inputs, or a function of the step that returns them. `Shard(x, dim=0)` is cut, and each rank
            has its part; `Input(x, gm.R)` and `Input(x, gm.I)` are whole on each rank, and have a gradient that is a
            share of the sum (R), or that sum itself (I); anything else is whole and constant.
        world_size: how many ranks.
        module: makes the module of the single process; called once, so that it may use the default generator.
        parallel: makes a rank's module of a copy of it; called on every rank. None: the copy itself. A parameter has
            the name that it has in the copy, or behind `module.`, and is given its part of the value there.
        parameters: how parameters lie on the ranks, by name or pattern: `Shard(dim=1)`, `gm.R` (each rank's gradient is
            a share, and is summed here, before the optimizer), or `gm.I` (each rank's is whole). By default R, or I
            inside of DistributedDataParallel. A DTensor says itself how it lies.
        outputs: how the other values lie: `Shard(dim=0)`, else the same on every rank.
        objective: how the ranks' losses make that of the single process: "sum", "mean" or "replicated".
        steps: how many steps.
        optimizer: makes the optimizer of a list of parameters; by default `torch.optim.SGD` with lr=0.1.
        ordered: run forward and backward inside `gradmesh.ordered()`. Then a rank may return None for its loss, which
            counts as 0.
        backend: as for `gradmesh.launch`.
        rtol: what an element may be off by, relative to the largest of its tensor.
        atol: the same, absolutely.
        diagnose: look for the reason of a failure, which takes a few more runs.
        raise_exception: raise if something is not the same.
        timeout: seconds for the run on the ranks.

    Returns:
        The report; true if all is the same.

    Raises:
        ArgumentError: a shard's sizes do not fit, a parameter has no like in the other module, a value is returned on
            one side alone, or a pattern fits no name.
        GradcheckError: something is not the same; the text has the first step that deviates, the names and the ranks.
        RankError: a rank failed.

    Example:
        >>> def loss(linear, x):
        ...     rows = gm.all_gather(linear(x))
        ...     return (rows**2).sum() / gm.world_size()
        >>> x = torch.arange(12.0).view(4, 3)
        >>> make = lambda: torch.nn.Linear(3, 2)
        >>> print(gm.verify.same_as_single(loss, inputs=(gm.verify.Shard(x),), module=make, world_size=2, steps=3))
        same_as_single on 2 ranks: all 33 losses, values, gradients and parameters are the same
    """
    _refuse_wrong(objective, steps, world_size)
    given = inputs if callable(inputs) else _Same(inputs)
    made = None if module is None else _Same(module())
    sgd = _sgd if optimizer is None else optimizer
    places = parameters or {}

    def plan(fn: Callable[..., Any]) -> Plan:
        return Plan(fn, given, made, parallel, places, sgd, steps, ordered)

    with (
        Ranks(1, backend, timeout, prefix=False) as alone,
        Ranks(world_size, backend, timeout, prefix=False) as ranks,
    ):
        (expected,) = alone.run(train, plan(reference or distributed), True)
        found = ranks.run(train, plan(distributed), False)
        for each in (expected, *found):
            if each.problem is not None:
                raise each.problem
        refuse_names_apart(expected, found, places, outputs or {})
        whole = frozenset(found[0].whole)
        comparison = Comparison(SingleReport(world_size), places, outputs or {}, objective, rtol, atol, whole)
        for number in range(steps):
            theirs = [each.steps[number] for each in found]
            comparison.step(number, expected.steps[number], theirs, given(number))
        report = comparison.report
        if not report.ok and diagnose:
            report.diagnosis = why(
                report,
                ranks.run,
                alone.run,
                plan(distributed),
                plan(reference or distributed),
                expected.steps[0],
                [each.steps[0] for each in found],
                objective,
            )
    if raise_exception and not report.ok:
        raise GradcheckError(message(str(report)), report)
    return report


class _Same:
    """Returns one object, whatever it is asked for; where it is sent to processes it is sent by value."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __call__(self, *_: object) -> Any:
        return self.x


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _refuse_wrong(objective: str, steps: int, world_size: int) -> None:
    """Refuse arguments that no rank could use."""
    wrong: tuple[str, str, object] | None = None
    if objective not in ("sum", "mean", "replicated"):
        wrong = "objective", "'sum', 'mean' or 'replicated'", objective
    elif steps < 1:
        wrong = "steps", "1 or more", steps
    elif world_size < 1:
        wrong = "world_size", "1 or more", world_size
    if wrong is not None:
        name, expected, got = wrong
        raise ArgumentError(
            message(
                f"{name} is not usable",
                op="verify.same_as_single",
                expected=expected,
                got=f"{name}={got!r}",
                remedy="see the documentation of gradmesh.verify.same_as_single",
            )
        )
