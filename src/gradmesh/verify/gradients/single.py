"""`same_as_single`: compares a multi-rank program with the same program on a single process."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradmesh.errors import ArgumentError, GradcheckError, message
from gradmesh.launch import Ranks
from gradmesh.verify.gradients.placements import Placement
from gradmesh.verify.gradients.program import Objective
from gradmesh.verify.gradients.single_comparison import Comparison
from gradmesh.verify.gradients.single_diagnosis import why
from gradmesh.verify.gradients.single_report import SingleReport
from gradmesh.verify.gradients.training import Plan, Trained, train

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
    """Check that a multi-rank program computes the same as a single-process reference.

    Both are called as `fn(module, *inputs)`, or `fn(*inputs)` without a module, and return a loss, or the loss and a
    dict of other values. Both then run backward and an optimizer step, `steps` times. All computation is in float64.

    Args:
        distributed: runs on each rank, with that rank's part of the inputs.
        reference: runs in a world of one rank, with the full inputs. None: `distributed`, since every collective of a
            world of one is the identity.
        inputs: the full inputs, or a function of the step that returns them. `Shard(x, dim=0)` is partitioned over the
            ranks. `Input(x, gm.R)` and `Input(x, gm.I)` are replicated; the gradient on a rank is a summand of the full
            gradient (R), or the full gradient (I). Anything else is replicated and constant.
        world_size: the number of ranks.
        module: returns the module of the single process; called once, so that it may use the default generator.
        parallel: converts a copy of that module into a rank's module; called on every rank. None: the copy itself.
            Parameters keep their names, optionally with the prefix `module.`, and are set to their part of the value.
        parameters: the placement of parameters, by name or pattern: `Shard(dim=1)`; `gm.R`: each rank's gradient is a
            summand, and they are summed before the optimizer step; `gm.I`: each rank's gradient is complete. Defaults
            to R, or I inside of DistributedDataParallel. For a DTensor its placements count.
        outputs: the placement of the other values: `Shard(dim=0)`; by default the same on every rank.
        objective: how the ranks' losses are combined: "sum", "mean" or "replicated".
        steps: the number of training steps.
        optimizer: creates the optimizer for a list of parameters; defaults to `torch.optim.SGD` with lr=0.1.
        ordered: run forward and backward inside `gradmesh.ordered()`. A rank may then return None as its loss, which
            counts as 0.
        backend: as for `gradmesh.launch`.
        rtol: the tolerance of an element relative to the largest of its tensor.
        atol: the absolute tolerance.
        diagnose: search for the cause of a failure; needs a few more runs.
        raise_exception: raise if the results differ.
        timeout: seconds for the run on the ranks.

    Returns:
        The report; true if all results are the same.

    Raises:
        ArgumentError: the sizes of a shard do not add up, a parameter is missing in the single-process module, the two
            sides return different values, or a pattern matches no name.
        GradcheckError: the results differ; the message names the first step that deviates, the tensors and the ranks.
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
        Ranks(1, backend, timeout, prefix=False) as single,
        Ranks(world_size, backend, timeout, prefix=False) as ranks,
    ):
        (expected,) = single.run(train, plan(reference or distributed), True)
        found = ranks.run(train, plan(distributed), False)
        for each in (expected, *found):
            if each.problem is not None:
                raise each.problem
        _check_names(expected, found, places, outputs or {})
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
                single.run,
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
    """A constant function that can be pickled by value, unlike a lambda."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __call__(self, *_: object) -> Any:
        return self.x


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _refuse_wrong(objective: str, steps: int, world_size: int) -> None:
    """Raise if an argument is invalid."""
    for valid, name, got, expected, remedy in (
        (
            objective in ("sum", "mean", "replicated"),
            "objective",
            objective,
            "'sum', 'mean' or 'replicated'",
            "pass objective='sum' unless a wrapper such as DDP averages the gradients ('mean')",
        ),
        (steps >= 1, "steps", steps, "an int >= 1", "pass e.g. steps=3"),
        (world_size >= 1, "world_size", world_size, "an int >= 1", "pass e.g. world_size=2"),
    ):
        if not valid:
            raise _error(f"invalid {name}", expected, f"{name}={got!r}", remedy)


def _check_names(
    single: Trained,
    ranks: Sequence[Trained],
    parameters: Mapping[str, Placement],
    outputs: Mapping[str, Placement],
) -> None:
    """Raise if a value is missing on one side, or a pattern matches no name."""
    for number, step in enumerate(single.steps):
        for rank, each in enumerate(ranks):
            found = each.steps[number].values
            if set(found) != set(step.values):
                raise _error(
                    "the ranks and the single process return different values",
                    f"{_listed(step.values)}, as on the single process",
                    f"{_listed(found)} on rank {rank} in step {number}",
                    "return a dict with the same keys from both functions on every rank",
                )
    values = {name for step in single.steps for name in step.values}
    names = {name for step in single.steps for name in step.parameters}
    for argument, patterns, there in (("parameters", parameters, names), ("outputs", outputs, values)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in there):
                raise _error(
                    f"a pattern in {argument} matches no name",
                    f"a pattern that matches one of {_listed(there)}",
                    repr(pattern),
                    "use the name on the single process, or remove the pattern",
                )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _error(problem: str, expected: str, got: str, remedy: str) -> ArgumentError:
    return ArgumentError(
        message(problem, op="verify.same_as_single", expected=expected, got=got, remedy=remedy)
    )
