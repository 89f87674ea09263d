"""Trains a program on one rank, step by step; the single process is a world of one rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradmesh.autograd.ordered import ordered
from gradmesh.errors import ArgumentError, GradmeshError, ShapeError, message
from gradmesh.types import Type
from gradmesh.verify.gradients.input_errors import unusable
from gradmesh.verify.gradients.inputs import Input, averaged_parameters
from gradmesh.verify.gradients.placements import Placement, Shard, chosen, part_of

__all__ = ["Plan", "Step", "Trained", "made", "placed", "train"]


_OP = "verify.same_as_single"


@dataclass(frozen=True)
class Plan:
    """The program and its options; see `same_as_single`. `parallel` is None for the single process."""

    fn: Callable[..., Any]
    inputs: Callable[[int], Sequence[object]]
    module: Callable[[], nn.Module] | None
    parallel: Callable[[nn.Module], nn.Module] | None
    parameters: Mapping[str, Placement]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    in_order: bool
    part: tuple[int, int] | None = None
    """(rank, world size) of the shard of the inputs that the single process gets; None: the full inputs."""


@dataclass
class Step:
    """The results of one step on a rank: the loss, values, gradients and new parameters; DTensors as full tensors."""

    loss: float
    values: dict[str, Tensor] = field(default_factory=dict)
    input_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Trained:
    """The steps of a rank, the names of its parameters that are complete, and the error that stopped it."""

    steps: list[Step] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    problem: GradmeshError | None = None


def train(plan: Plan, single: bool) -> Trained:
    """Train on this rank."""
    result = Trained()
    place = plan.part if single else (dist.get_rank(), dist.get_world_size())
    named: dict[str, nn.Parameter] = {}
    problem: GradmeshError | None = None
    module = None
    try:
        if plan.module is not None:
            module, named = made(plan, single)
        placed(plan.inputs(0), place)
    except GradmeshError as error:
        problem = error
    if _agreed(result, problem):
        return result
    averaged = set() if module is None else averaged_parameters(module)
    result.whole = {
        name
        for name, parameter in named.items()
        if isinstance(parameter, DTensor)
        or (id(parameter) in averaged and chosen(plan.parameters, name, None) is None)
    }
    optimizer = plan.optimizer(list(named.values())) if named else None
    for number in range(plan.steps):
        args, leaves = placed(plan.inputs(number), place)
        for parameter in named.values():
            parameter.grad = None
        with torch.enable_grad(), ordered() if plan.in_order else contextlib.nullcontext() as order:
            returned = plan.fn(*([] if module is None else [module]), *args)
            problem = _unusable(returned, plan.in_order)
            if _agreed(result, problem):
                if order is not None:
                    order.join(None)
                return result
            loss, values = returned if isinstance(returned, tuple) else (returned, {})
            if order is not None:
                order.backward(loss)
            else:
                loss.backward()
        step = Step(
            0.0 if loss is None else float(loss.detach()),
            {name: _whole(x.detach()) for name, x in values.items()},
        )
        step.input_gradients = {
            name: None if x.grad is None else x.grad.clone() for name, x in leaves.items()
        }
        _sum_shares(plan, {name: p for name, p in named.items() if name not in result.whole}, single)
        step.gradients = {name: None if p.grad is None else _whole(p.grad) for name, p in named.items()}
        if optimizer is not None:
            optimizer.step()
        step.parameters = {name: _whole(parameter.detach()) for name, parameter in named.items()}
        result.steps.append(step)
    return result


def _agreed(result: Trained, problem: GradmeshError | None) -> bool:
    """Exchange errors; store the first one, if any, in every rank's result."""
    problems: list[GradmeshError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    result.problem = next((each for each in problems if each is not None), None)
    return result.problem is not None


def _unusable(returned: object, in_order: bool) -> GradmeshError | None:
    """The error if a rank's function did not return a loss, or a loss and a dict of tensors."""
    loss, values = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    rank = dist.get_rank()
    if not isinstance(values, dict) or not all(isinstance(x, Tensor) for x in values.values()):
        return ArgumentError(
            message(
                "invalid second return value",
                op=_OP,
                expected="a loss, or a loss and a dict of tensors",
                got=f"a loss and a {type(values).__name__} on rank {rank}",
                remedy='return e.g. loss, {"logits": logits}',
            )
        )
    return unusable(loss, in_order, rank, _OP, double=False)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.clone()


def made(plan: Plan, single: bool) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """This rank's module with the single process's parameter values, and its parameters by single-process name."""
    reference = _only(plan.module)
    whole = dict(reference.named_parameters())
    if single:
        return reference, whole
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = reference if plan.parallel is None else plan.parallel(copy.deepcopy(reference))
    named: dict[str, nn.Parameter] = {}
    for full, parameter in module.named_parameters():
        name = next((n for n in (full, full.removeprefix("module.")) if n in whole), None)
        if name is None:
            raise ArgumentError(
                message(
                    "unknown parameter name in the parallel module",
                    op="verify.same_as_single",
                    expected="a name of the single-process module: " + ", ".join(whole),
                    got=full,
                    remedy="keep the parameter names of `module` in parallel(); only the prefix 'module.' may be added",
                )
            )
        named[name] = parameter
        if isinstance(parameter, DTensor):
            continue
        part = part_of(whole[name].detach(), chosen(plan.parameters, name, Type.R), rank, ranks)
        if part.shape != parameter.shape:
            raise ShapeError(
                message(
                    "the shape of a parameter does not match its placement",
                    op="verify.same_as_single",
                    expected=f"{name} of shape {list(part.shape)} on rank {rank}",
                    got=f"shape {list(parameter.shape)}",
                    remedy=f"pass how it is sharded, e.g. parameters={{{name!r}: gm.verify.Shard(dim=0)}}",
                )
            )
        with torch.no_grad():
            parameter.copy_(part)
    return module, named


def _only(module: Callable[[], nn.Module] | None) -> nn.Module:
    made = module() if module is not None else nn.Module()
    return copy.deepcopy(made).double()


def _sum_shares(plan: Plan, named: Mapping[str, nn.Parameter], single: bool) -> None:
    """Sum the gradients of replicated parameters over the ranks."""
    if single:
        return
    for name, parameter in named.items():
        if chosen(plan.parameters, name, Type.R) is Type.R:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            present = torch.tensor(parameter.grad is not None, dtype=torch.int64)
            dist.all_reduce(grad)
            dist.all_reduce(present)
            parameter.grad = grad if bool(present) else None


def placed(given: Sequence[object], place: tuple[int, int] | None) -> tuple[list[Any], dict[str, Tensor]]:
    """A rank's arguments, and those tensors among them whose gradients are compared.

    Args:
        given: the full inputs.
        place: (rank, world size); None: the full inputs.
    """
    args, leaves = [], {}
    for i, x in enumerate(given if isinstance(given, tuple | list) else (given,)):
        placement: Placement | None = x if isinstance(x, Shard) else None
        compared = isinstance(x, Shard) and not x.constant
        if isinstance(x, Input) and isinstance(x.type, Type):
            placement, compared = x.type, True
        value = x.value if isinstance(x, Shard | Input) else x
        if not isinstance(value, Tensor):
            args.append(value)
            continue
        if value.is_floating_point() or value.is_complex():
            value = value.to(torch.complex128 if value.is_complex() else torch.float64)
        else:
            compared = False
        if placement is not None and place is not None:
            value = part_of(value, placement, *place)
        value = value.detach().clone()
        if compared:
            leaves[f"inputs[{i}]"] = value.requires_grad_()
        args.append(value)
    return args, leaves
