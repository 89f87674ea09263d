"""`same_as_single`: trains a program on the ranks and on a single process, and compares the steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradmesh.autograd.ordered import ordered
from gradmesh.errors import GradcheckError, GradmeshError, RankError, ShapeError, message
from gradmesh.launch import Ranks
from gradmesh.types import Type
from gradmesh.verify.gradients import diagnosis as h
from gradmesh.verify.gradients.diagnosis import diagnosed
from gradmesh.verify.gradients.inputs import (
    Input,
    Placement,
    Shard,
    averaged_parameters,
    chosen,
    doubled,
    invalid,
    objective_check,
    part_of,
    raise_first,
    refuse_invalid,
    unusable,
)
from gradmesh.verify.gradients.program import Objective, Options, exchanged
from gradmesh.verify.gradients.report import NONE_FITS, Diagnosis


@dataclass(frozen=True)
class Deviation:
    """One tensor that differs from the single process.

    Attributes:
        step: the training step, from 0.
        kind: "loss", "value", "gradient", or "parameter" (after the step).
        name: the name of the value, input or parameter.
        rank: the rank; None: the sum over ranks.
        error: the largest difference of an element.
        expected: the largest absolute value on the single process.
        shapes: the actual and the expected shape, if they differ.
    """

    step: int
    kind: str
    name: str
    rank: int | None
    error: float
    expected: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        where = "all ranks (sum)" if self.rank is None else f"rank {self.rank}"
        if self.shapes is not None:
            got, expected = map(list, self.shapes)
            return (
                f"step {self.step}: {self.kind} {self.name} on {where} has shape {got}, expected {expected}"
            )
        off = f"max. error {self.error:.3g}, largest expected value {self.expected:.3g}"
        return f"step {self.step}: {self.kind} {self.name} on {where}: {off}"


@dataclass
class SingleReport:
    """The result of `same_as_single`; true if all results are the same.

    Attributes:
        world_size: the number of ranks.
        compared: the number of compared tensors and losses.
        deviations: the differences, in the order of occurrence.
        diagnosis: the cause of the deviations of the first step, if found.
    """

    world_size: int
    compared: int = 0
    deviations: list[Deviation] = field(default_factory=list)
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no deviations."""
        return not self.deviations

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> list[Deviation]:
        """The first deviations: those of the first kind in the first step that deviates."""
        return [
            each
            for each in self.deviations
            if (each.step, each.kind) == (self.deviations[0].step, self.deviations[0].kind)
        ]

    def __str__(self) -> str:
        head = f"same_as_single on {self.world_size} ranks: "
        if self.ok:
            return head + f"all {self.compared} losses, values, gradients and parameters are the same"
        lines = [head + f"{len(self.deviations)} of {self.compared} differ; the first:"]
        lines += [f"  {each}" for each in self.first]
        return "\n".join(lines + ([] if self.diagnosis is None else [str(self.diagnosis)]))


_OP = "verify.same_as_single"


@dataclass(frozen=True)
class Plan:
    """The program and its options; see `same_as_single`. `parallel` is None for the single process."""

    fn: Callable[..., Any]
    inputs: Callable[[int], Sequence[object]]
    module: Callable[[], nn.Module] | None
    parallel: Callable[[nn.Module], nn.Module] | None
    parameters: Mapping[str, Placement]
    objective: Objective
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    in_order: bool
    part: tuple[int, int] | None = None
    """(rank, world size) of the shard of the inputs that the single process gets; None: the full inputs."""


Step = dict[tuple[str, str], Tensor | None]
"""The results of one step on a rank, by kind (as in `Deviation`) and name; DTensors as full tensors.

The loss is the rank's term of the objective.
"""


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
        term = 0.0 if loss is None else float(loss.detach())
        if plan.objective == "mean" and not single:
            term /= dist.get_world_size()
        step: Step = {("loss", "loss"): torch.tensor(term, dtype=torch.float64)}
        step |= {("value", name): _whole(x.detach()) for name, x in values.items()}
        if not single:
            _sum_shares(plan, {name: p for name, p in named.items() if name not in result.whole})
        for name, x in {**leaves, **named}.items():
            step["gradient", name] = None if x.grad is None else _whole(x.grad)
        if optimizer is not None:
            optimizer.step()
        step |= {("parameter", name): _whole(parameter.detach()) for name, parameter in named.items()}
        result.steps.append(step)
    return result


def names_of(kind: str, step: Step) -> list[str]:
    """The names of the results of a kind."""
    return [name for of, name in step if of == kind]


def _agreed(result: Trained, problem: GradmeshError | None) -> bool:
    """Exchange errors; store the first one, if any, in every rank's result."""
    result.problem = next((each for each in exchanged(problem) if each is not None), None)
    return result.problem is not None


def _unusable(returned: object, in_order: bool) -> GradmeshError | None:
    """The error if a rank's function did not return a loss, or a loss and a dict of tensors."""
    loss, values = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    rank = dist.get_rank()
    if not isinstance(values, dict) or not all(isinstance(x, Tensor) for x in values.values()):
        return invalid(
            "invalid second return value",
            "a loss, or a loss and a dict of tensors",
            f"a loss and a {type(values).__name__} on rank {rank}",
            'return e.g. loss, {"logits": logits}',
            op=_OP,
        )
    return unusable(loss, in_order, rank, _OP, double=False)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.clone()


def made(plan: Plan, single: bool) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """This rank's module with the single process's parameter values, and its parameters by single-process name."""
    reference = copy.deepcopy(nn.Module() if plan.module is None else plan.module()).double()
    whole = dict(reference.named_parameters())
    if single:
        return reference, whole
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = reference if plan.parallel is None else plan.parallel(copy.deepcopy(reference))
    named: dict[str, nn.Parameter] = {}
    for full, parameter in module.named_parameters():
        name = next((n for n in (full, full.removeprefix("module.")) if n in whole), None)
        if name is None:
            raise invalid(
                "unknown parameter name in the parallel module",
                "a name of the single-process module: " + ", ".join(whole),
                full,
                "keep the parameter names of `module` in parallel(); only the prefix 'module.' may be added",
                op=_OP,
            )
        named[name] = parameter
        if isinstance(parameter, DTensor):
            continue
        part = part_of(whole[name].detach(), chosen(plan.parameters, name, Type.R), rank, ranks)
        if part.shape != parameter.shape:
            raise invalid(
                "the shape of a parameter does not match its placement",
                f"{name} of shape {list(part.shape)} on rank {rank}",
                f"shape {list(parameter.shape)}",
                f"pass how it is sharded, e.g. parameters={{{name!r}: gm.verify.Shard(dim=0)}}",
                ShapeError,
                op=_OP,
            )
        with torch.no_grad():
            parameter.copy_(part)
    return module, named


def _sum_shares(plan: Plan, named: Mapping[str, nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters over the ranks."""
    for name, parameter in named.items():
        if chosen(plan.parameters, name, Type.R) is Type.R:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            present = torch.tensor(parameter.grad is not None, dtype=torch.int64)
            dist.all_reduce(grad)
            dist.all_reduce(present)
            parameter.grad = grad if bool(present) else None


@dataclass(frozen=True)
class Argument:
    """One of the full inputs."""

    name: str  # its name in reports
    value: Any  # a tensor in double precision, or any other object
    placement: Placement | None  # how it is placed on the ranks; None: the same constant on every rank
    compared: bool  # whether its gradient is compared


def arguments(given: object) -> list[Argument]:
    """The full inputs of a step."""
    found = []
    for i, x in enumerate(given if isinstance(given, tuple | list) else (given,)):
        value = x.value if isinstance(x, Shard | Input) else x
        placement: Placement | None = x if isinstance(x, Shard) else None
        if isinstance(x, Input) and isinstance(x.type, Type):
            placement = x.type
        compared = placement is not None and not (isinstance(x, Shard) and x.constant)
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            value = doubled(value)
        else:
            compared = False
        found.append(Argument(f"inputs[{i}]", value, placement, compared))
    return found


def placed(given: object, place: tuple[int, int] | None) -> tuple[list[Any], dict[str, Tensor]]:
    """A rank's arguments, and those tensors among them whose gradients are compared."""
    args, leaves = [], {}
    for each in arguments(given):
        value = each.value
        if isinstance(value, Tensor):
            if each.placement is not None and place is not None:
                value = part_of(value, each.placement, *place)
            value = value.detach().clone().requires_grad_(each.compared)
        if each.compared:
            leaves[each.name] = value
        args.append(value)
    return args, leaves


@dataclass
class Comparison:
    """Adds deviations to a report."""

    report: SingleReport
    plan: Plan
    outputs: Mapping[str, Placement]  # the placement of returned values
    rtol: float  # the tolerance of an element relative to the largest of its tensor
    atol: float  # the absolute tolerance
    whole: set[str]  # the parameters that are available in full on every rank

    def step(self, number: int, single: Step, ranks: list[Step]) -> None:
        """Compare one step: each rank's tensor, or their sum, with the corresponding one of the single process."""
        inputs = {each.name: each.placement for each in arguments(self.plan.inputs(number))}
        for (kind, name), expected in single.items():
            found = [rank.get((kind, name)) for rank in ranks]
            if expected is None and all(each is None for each in found):
                continue
            placement = inputs.get(name) if kind == "gradient" else None
            placement = self._placement(kind, name) if placement is None else placement
            deviation = partial(Deviation, number, kind, name)
            if placement is Type.R:
                there = [each for each in found if each is not None]
                self._pair(partial(deviation, None), expected, torch.stack(there).sum(0) if there else None)
                continue
            for rank, each in enumerate(found):
                part = None if expected is None else part_of(expected, placement, rank, len(found))
                self._pair(partial(deviation, rank), part, each)

    def _placement(self, kind: str, name: str) -> Placement:
        if kind == "loss":
            return Type.I if self.plan.objective == "replicated" else Type.R
        if kind == "value":
            return chosen(self.outputs, name, Type.I)
        placement = Type.I if name in self.whole else chosen(self.plan.parameters, name, Type.I)
        # Training already summed the ranks' contributions to a replicated parameter.
        return Type.I if placement is Type.R else placement

    def _pair(
        self, deviation: Callable[..., Deviation], expected: Tensor | None, found: Tensor | None
    ) -> None:
        self.report.compared += 1
        either = expected if expected is not None else found
        if either is None or (either.numel() == 0 and (found is None or found.shape == either.shape)):
            return
        expected = torch.zeros_like(either) if expected is None else expected
        size = float(expected.abs().max()) if expected.numel() else 0.0
        got = torch.zeros_like(either) if found is None else found
        alike = got.shape == expected.shape
        error = float((got - expected).abs().max()) if alike else float("inf")
        if not error <= self.atol + self.rtol * size:
            shapes = None if alike else (tuple(got.shape), tuple(expected.shape))
            self.report.deviations.append(deviation(error, size, shapes))


Launch = Callable[..., list[Any]]
"""Runs a function with its arguments on every rank."""


def why(
    report: SingleReport,
    run: Launch,
    run_single: Launch,
    plan: Plan,
    single_plan: Plan,
    single: Step,
    ranks: Sequence[Step],
) -> Diagnosis | None:
    """Explain deviations in the first step; None if it has none, or none that can be explained."""
    kinds = {each.kind for each in report.deviations if each.step == 0}
    try:
        if "loss" in kinds:
            losses = [_loss(step) for step in ranks]
            whole = losses[0] if plan.objective == "replicated" else sum(losses)
            return _local_means(run_single, single_plan, single, len(ranks), whole)
        return _gradients_only(run, plan) if "gradient" in kinds else None
    except RankError as error:
        return Diagnosis(NONE_FITS, f"the diagnosis failed: {str(error).splitlines()[0]}")


def _loss(step: Step) -> float:
    return float(cast("Tensor", step["loss", "loss"]))


def _gradients_only(run: Launch, plan: Plan) -> Diagnosis:
    """Explain wrong gradients of a program whose losses are correct."""

    def fn(*args: Any) -> Tensor:
        returned = plan.fn(*args)
        loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return loss

    options = Options(objective=plan.objective, in_order=plan.in_order)
    inputs = partial(_typed, plan)
    found = diagnosed(lambda job, *args: run(job, fn, inputs, *args), options)
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
    args, leaves = placed(given, (rank, dist.get_world_size()))
    for each, arg in zip(arguments(given), args, strict=True):
        if isinstance(arg, Tensor):
            kind = Type.V if isinstance(each.placement, Shard) else each.placement
            arg = Input(arg, kind if each.name in leaves else None)
        result.append(arg)
    return result


def _local_means(
    run_single: Launch, plan: Plan, single: Step, ranks: int, objective: float
) -> Diagnosis | None:
    """Test whether the ranks average over their own rows and then over ranks; None if not.

    Runs the single process on each rank's shard. The hypothesis holds if the mean of these losses is the ranks'
    objective, while the full gradient is a differently weighted mean of their gradients; the weights are fitted.
    """
    parts: list[Trained] = [
        run_single(train, dataclasses.replace(plan, part=(rank, ranks), steps=1), True)[0]
        for rank in range(ranks)
    ]
    if any(part.problem is not None for part in parts):
        return None
    steps = [part.steps[0] for part in parts]
    mean = sum(map(_loss, steps)) / ranks
    if abs(mean - objective) > 1e-9 * (1 + abs(mean)):
        return None
    names = [name for name in names_of("parameter", single) if single["gradient", name] is not None]
    if not names or any(step["gradient", name] is None for step in steps for name in names):
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
        f"the ranks' losses are averaged with equal weights 1/{ranks}; on a single process "
        f"their rows have the weights {shown}",
        names,
        list(range(ranks)),
    )


def _flat(step: Step, names: Sequence[str]) -> Tensor:
    return torch.cat([cast("Tensor", step["gradient", name]).reshape(-1) for name in names])


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
    refuse_invalid(
        _OP,
        objective_check(objective),
        (steps >= 1, "steps", steps, "an int >= 1", "pass e.g. steps=3"),
        (world_size >= 1, "world_size", world_size, "an int >= 1", "pass e.g. world_size=2"),
    )
    given = inputs if callable(inputs) else _Same(inputs)
    made = None if module is None else _Same(module())
    sgd = partial(torch.optim.SGD, lr=0.1) if optimizer is None else optimizer
    plan = Plan(distributed, given, made, parallel, parameters or {}, objective, sgd, steps, ordered)
    single_plan = dataclasses.replace(plan, fn=reference or distributed)
    with (
        Ranks(1, backend, timeout, prefix=False) as single,
        Ranks(world_size, backend, timeout, prefix=False) as ranks,
    ):
        (expected,) = single.run(train, single_plan, True)
        found = ranks.run(train, plan, False)
        raise_first([each.problem for each in (expected, *found)])
        _check_names(expected, found, plan.parameters, outputs or {})
        report = SingleReport(world_size)
        comparison = Comparison(report, plan, outputs or {}, rtol, atol, found[0].whole)
        for number in range(steps):
            comparison.step(number, expected.steps[number], [each.steps[number] for each in found])
        if not report.ok and diagnose:
            first = [each.steps[0] for each in found]
            report.diagnosis = why(report, ranks.run, single.run, plan, single_plan, expected.steps[0], first)
    if raise_exception and not report.ok:
        raise GradcheckError(message(str(report)), report)
    return report


class _Same:
    """A constant function that can be pickled by value, unlike a lambda."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __call__(self, *_: object) -> Any:
        return self.x


def _check_names(
    single: Trained,
    ranks: Sequence[Trained],
    parameters: Mapping[str, Placement],
    outputs: Mapping[str, Placement],
) -> None:
    """Raise if a value is missing on one side, or a pattern matches no name."""
    for number, step in enumerate(single.steps):
        for rank, each in enumerate(ranks):
            wanted, found = names_of("value", step), names_of("value", each.steps[number])
            if set(found) != set(wanted):
                raise invalid(
                    "the ranks and the single process return different values",
                    f"{_listed(wanted)}, as on the single process",
                    f"{_listed(found)} on rank {rank} in step {number}",
                    "return a dict with the same keys from both functions on every rank",
                    op=_OP,
                )
    values = {name for step in single.steps for name in names_of("value", step)}
    names = {name for step in single.steps for name in names_of("parameter", step)}
    for argument, patterns, there in (("parameters", parameters, names), ("outputs", outputs, values)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in there):
                raise invalid(
                    f"a pattern in {argument} matches no name",
                    f"a pattern that matches one of {_listed(there)}",
                    repr(pattern),
                    "use the name on the single process, or remove the pattern",
                    op=_OP,
                )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
