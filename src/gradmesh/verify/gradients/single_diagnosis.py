"""Explains why a multi-rank program differs from the single-process reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh.errors import RankError
from gradmesh.types import Type
from gradmesh.verify.gradients import hypotheses as h
from gradmesh.verify.gradients.diagnosis import diagnosed
from gradmesh.verify.gradients.findings import NONE_FITS, Diagnosis
from gradmesh.verify.gradients.inputs import Input
from gradmesh.verify.gradients.measure import Options
from gradmesh.verify.gradients.placements import Shard, chosen
from gradmesh.verify.gradients.program import Objective
from gradmesh.verify.gradients.single_report import SingleReport
from gradmesh.verify.gradients.training import Plan, Step, Trained, made, placed, train

__all__ = ["why"]

Run = Callable[..., list[Any]]


def why(
    report: SingleReport,
    run: Run,
    run_single: Run,
    plan: Plan,
    single_plan: Plan,
    single: Step,
    ranks: Sequence[Step],
    objective: Objective,
) -> Diagnosis | None:
    """Explain deviations in the first step; None if it has none, or none that can be explained.

    Args:
        report: the deviations.
        run: runs a function on every rank.
        run_single: runs a function on the single process.
        plan: the plan of the ranks.
        single_plan: the plan of the single process.
        single: its first step.
        ranks: the first step of each rank.
        objective: how the ranks' losses are combined.
    """
    kinds = {each.kind for each in report.deviations if each.step == 0}
    try:
        if "loss" in kinds:
            losses = [step.loss for step in ranks]
            whole = losses[0] if objective == "replicated" else sum(losses)
            return _local_means(
                run_single, single_plan, single, ranks, whole / (len(ranks) if objective == "mean" else 1)
            )
        return _gradients_only(run, plan, objective) if "gradient" in kinds else None
    except RankError as error:
        return Diagnosis(NONE_FITS, f"the diagnosis failed: {str(error).splitlines()[0]}")


def _gradients_only(run: Run, plan: Plan, objective: Objective) -> Diagnosis:
    """Explain wrong gradients of a program whose losses are correct."""

    def fn(*args: Any) -> Tensor:
        returned = plan.fn(*args)
        loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return loss

    found = diagnosed(
        run, fn, lambda rank: _typed(plan, rank), Options(objective=objective, in_order=plan.in_order)
    )
    if plan.module is not None:
        found.names = [name.removeprefix("inputs[0].").removeprefix("module.") for name in found.names]
    return found


def _typed(plan: Plan, rank: int) -> list[object]:
    """A rank's arguments in the first step, each with its type."""
    result: list[object] = []
    if plan.module is not None:
        module, named = made(plan, False)
        names = {id(parameter): name for name, parameter in named.items()}
        types: dict[str, Type | None] = {}
        for full, parameter in module.named_parameters():
            place = chosen(plan.parameters, names[id(parameter)], None)
            if place is not None:
                types[full] = Type.V if isinstance(place, Shard) else place
        result.append(Input(module, types))
    given = plan.inputs(0)
    listed = list(given) if isinstance(given, tuple | list) else [given]
    args, _ = placed(listed, (rank, torch.distributed.get_world_size()))
    for x, arg in zip(listed, args, strict=True):
        if isinstance(x, Shard):
            result.append(Input(arg, None if x.constant else Type.V))
        elif isinstance(arg, Tensor):
            result.append(Input(arg, x.type if isinstance(x, Input) else None))
        else:
            result.append(arg)
    return result


def _local_means(
    run_single: Run, plan: Plan, single: Step, ranks: Sequence[Step], objective: float
) -> Diagnosis | None:
    """Test whether the ranks average over their own rows and then over ranks; None if not.

    Runs the single process on each rank's shard. The hypothesis holds if the mean of these losses is the ranks'
    objective, while the full gradient is a differently weighted mean of their gradients; the weights are fitted.

    Args:
        run_single: runs a function on the single process.
        plan: the plan of the single process.
        single: its first step.
        ranks: the first steps of the ranks.
        objective: the value of the ranks' objective.
    """
    parts: list[Trained] = [
        run_single(train, dataclasses.replace(plan, part=(rank, len(ranks)), steps=1), True)[0]
        for rank in range(len(ranks))
    ]
    if any(part.problem is not None for part in parts):
        return None
    steps = [part.steps[0] for part in parts]
    mean = sum(step.loss for step in steps) / len(steps)
    if abs(mean - objective) > 1e-9 * (1 + abs(mean)):
        return None
    names = [name for name, grad in single.gradients.items() if grad is not None]
    if not names or any(step.gradients[name] is None for step in steps for name in names):
        return None
    whole, columns = _flat(single, names), torch.stack([_flat(step, names) for step in steps], 1)
    weights = torch.linalg.lstsq(columns, whole.unsqueeze(1)).solution.squeeze(1)
    close = (columns @ weights - whole).abs().max() <= 1e-8 * (1 + whole.abs().max())
    uneven = float(weights.max() - weights.min()) > 1e-6
    if not bool(close) or not uneven or abs(float(weights.sum()) - 1) > 1e-6:
        return None
    shown = ", ".join(f"{float(weight):.4g}" for weight in weights)
    return Diagnosis(
        h.MEANS,
        f"the ranks' losses are averaged with equal weights 1/{len(ranks)}; on a single process "
        f"their rows have the weights {shown}",
        names,
        list(range(len(ranks))),
    )


def _flat(step: Step, names: Sequence[str]) -> Tensor:
    return torch.cat([grad.reshape(-1) for name in names if (grad := step.gradients[name]) is not None])
