"""The inputs of a checked program: their types, their leaves on each rank, placements over the ranks, and errors."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradmesh._util.call_sites import PARSING
from gradmesh._util.structure import sequence_like
from gradmesh.errors import ArgumentError, DTypeError, GradmeshError
from gradmesh.ops.sizes import balanced
from gradmesh.types import Type

InputType = Type | None | Mapping[str, Type | None]


def doubled(x: Tensor) -> Tensor:
    """A floating-point or complex tensor in double precision; any other tensor as it is."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


@dataclass(frozen=True)
class Input:
    """An input of a checked function, with its type over the ranks.

    Args:
        value: a tensor, a module, or a nested structure of them.
        type: `gm.V`, `gm.R`, `gm.I` or `gm.P` for all its tensors; None for a constant, which is not differentiated.
            For modules and dicts also a mapping from names or `fnmatch` patterns to types; the first match counts, and
            a name without a match keeps the default.

    Example:
        >>> model = torch.nn.Linear(2, 2).double()
        >>> Input(model, {"bias": gm.I, "*": gm.R}).type["bias"]
        I
    """

    value: object
    type: InputType


@dataclass
class Leaf:
    """One tensor that is differentiated."""

    name: str  # its name in reports
    type: Type  # its type over the ranks
    base: Tensor  # its value
    # the module's parameter that holds it and is written in place; None: it is passed as an argument
    parameter: Tensor | None = None
    current: Tensor | None = None  # the tensor of the last call, whose `.grad` is read

    def renew(self, offset: Tensor | None) -> Tensor:
        """The leaf for another call, shifted by `offset`."""
        value = self.base if offset is None else self.base + offset
        if self.parameter is None:
            self.current = value.detach().clone().requires_grad_()
            return self.current
        self.current = self.parameter
        self.parameter.grad = None
        with torch.no_grad():
            local_shard(self.parameter).copy_(value)
        return self.parameter

    @property
    def grad(self) -> Tensor | None:
        """The local gradient of the last backward pass."""
        return None if self.current is None else local_gradient(self.current, self.current.grad)


def local_shard(x: Tensor) -> Tensor:
    """The tensor, or the local shard of a DTensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def local_gradient(of: Tensor, grad: Tensor | None) -> Tensor | None:
    """The local gradient, with the placements of the tensor it belongs to."""
    if isinstance(grad, DTensor) and isinstance(of, DTensor):
        grad = grad.redistribute(placements=of.placements)
    return None if grad is None else local_shard(grad.detach()).clone()


class RankInputs:
    """The inputs of one rank."""

    def __init__(self, given: object) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.modules: list[nn.Module] = []
        listed = tuple(given) if isinstance(given, tuple | list) else (given,)
        self._args = [self._taken(x, f"inputs[{i}]", {}) for i, x in enumerate(listed)]

    def args(self, offsets: Mapping[str, Tensor] | None = None) -> list[Any]:
        """The arguments for a call, with some leaves shifted; all tensors are new leaves."""
        moved = offsets or {}
        for leaf in self.leaves.values():
            leaf.renew(moved.get(leaf.name))
        return [_filled(x) for x in self._args]

    @contextlib.contextmanager
    def duals(self, along: Mapping[str, Tensor]) -> Iterator[list[Any]]:
        """The arguments for a call under forward-mode AD: every leaf has a tangent."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for leaf in self.leaves.values():
                primal = leaf.base.clone().requires_grad_()
                dual = forward_ad.make_dual(primal, along.get(leaf.name, torch.zeros_like(leaf.base)))
                if leaf.parameter is None:
                    leaf.current = dual
                else:
                    replaced += self._replaced(leaf.parameter, dual)
            yield [_filled(x) for x in self._args]
        finally:
            for part, attribute, parameter in replaced:
                delattr(part, attribute)
                part.register_parameter(attribute, parameter)

    def _replaced(self, parameter: Tensor, dual: Tensor) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Replace a parameter by a dual tensor in all modules."""
        found = [
            (part, attribute, held)
            for module in self.modules
            for part in module.modules()
            for attribute, held in part.named_parameters(recurse=False, remove_duplicate=False)
            if held is parameter
        ]
        for part, attribute, _ in found:
            delattr(part, attribute)
            setattr(part, attribute, dual)
        return found

    def restore(self) -> None:
        """Restore the parameters of modules and clear their gradients."""
        for leaf in self.leaves.values():
            leaf.renew(None)
            leaf.current = None

    def settle(self) -> None:
        """Release what modules keep between forward and backward, such as FSDP's gathered parameters."""
        for module in self.modules:
            for part in module.modules():
                reshard = getattr(part, "reshard", None)
                if callable(reshard):
                    reshard()

    def _taken(self, x: object, name: str, kind: InputType) -> Any:
        """The structure with differentiable tensors replaced by leaves."""
        if isinstance(x, Input):
            return self._taken(x.value, name, x.type)
        if isinstance(x, nn.Module):
            self.modules.append(x)
            averaged = averaged_parameters(x)
            for path, parameter in x.named_parameters():
                chosen = _of(kind, path, Type.I if id(parameter) in averaged else _default(parameter))
                if not parameter.requires_grad or chosen is None:
                    continue
                full = f"{name}.{path}"
                if parameter.dtype not in (torch.float64, torch.complex128):
                    raise invalid(
                        "a module's parameter is not in double precision",
                        "float64 or complex128, because finite differences lose half of the digits",
                        f"{full} of dtype {parameter.dtype}",
                        "call module.double() before wrapping or sharding the module",
                        DTypeError,
                    )
                base = local_shard(parameter.detach()).clone()
                self.leaves[full] = Leaf(full, chosen, base, parameter)
            return x
        if isinstance(x, Tensor):
            return self._tensor(x, name, _of(kind, name, Type.V))
        if isinstance(x, dict):
            return {
                key: self._taken(value, f"{name}[{key!r}]", _of(kind, str(key), kind))
                for key, value in x.items()
            }
        if isinstance(x, tuple | list):
            return sequence_like(x, [self._taken(value, f"{name}[{i}]", kind) for i, value in enumerate(x)])
        return x

    def _tensor(self, x: Tensor, name: str, kind: Type | None) -> Any:
        value = doubled(x.detach()).clone()
        if kind is None or not (x.is_floating_point() or x.is_complex()):
            return value
        self.leaves[name] = Leaf(name, kind, value)
        return self.leaves[name]


def averaged_parameters(module: nn.Module) -> set[int]:
    """The ids of the parameters whose gradients DistributedDataParallel averages."""
    wrappers = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}


def _default(parameter: Tensor) -> Type:
    """The default type of a parameter: R; for a DTensor by its placements."""
    if not isinstance(parameter, DTensor):
        return Type.R
    return Type.V if any(place.is_shard() for place in parameter.placements) else Type.I


def _of(kind: InputType, name: str, default: Any) -> Any:
    """The type for a name: that of the first matching pattern in a mapping, else the default."""
    return chosen(kind, name, default) if isinstance(kind, Mapping) else kind


def _filled(x: Any) -> Any:
    if isinstance(x, Leaf):  # a clone, since leaves do not allow in-place writes
        return None if x.current is None else x.current.clone()
    if isinstance(x, dict):
        return {key: _filled(value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return sequence_like(x, [_filled(value) for value in x])
    return x


def refuse_wrong_call(fn: Callable[..., object], args: list[Any]) -> None:
    """Check the number of inputs against the function's signature."""
    try:
        with PARSING:
            signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins may have no signature
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise invalid(
            "the inputs do not match the function's signature",
            f"fn{signature}",
            f"{len(args)} inputs: {error}",
            f"return one value per parameter from inputs(rank): ({', '.join(signature.parameters)})",
        ) from error


_GRADCHECK = "verify.gradcheck"


@dataclass(frozen=True)
class Kept:
    """The properties of a leaf on a rank that are exchanged between ranks."""

    name: str
    type: Type
    shape: tuple[int, ...]
    dtype: torch.dtype
    mark: tuple[float, ...]
    """A checksum of a leaf that must be the same on every rank; empty for others."""
    memory: tuple[int, int] | None = None
    """The process id and address of a module's parameter; None for tensors, which are copied, and if empty."""


def disagreement(everyones: list[list[Kept]]) -> GradmeshError | None:
    """The error if the ranks' leaves are inconsistent."""
    by_name: dict[str, dict[int, Kept]] = {}
    for rank, leaves in enumerate(everyones):
        for kept in leaves:
            by_name.setdefault(kept.name, {})[rank] = kept
    if not by_name:
        return invalid(
            "the inputs contain no differentiable tensor",
            "at least one floating-point or complex tensor or module",
            "none on any rank",
            "return tensors or modules from inputs(rank), e.g. (torch.randn(3), model)",
        )
    for name, ranks in by_name.items():
        held = [kept.memory for kept in ranks.values() if kept.memory is not None]
        if len(set(held)) < len(held):
            return invalid(
                "the ranks share one module",
                "a separate module object on each rank, because each rank has separate gradients",
                f"{name} at the same address on several ranks",
                "create the module inside inputs(rank) after torch.manual_seed(0), or copy.deepcopy it there",
            )
        if len({kept.type for kept in ranks.values()}) > 1:
            got = ", ".join(f"{kept.type} on rank {rank}" for rank, kept in ranks.items())
            return invalid(
                f"{name} has different types on different ranks",
                "the same type on all ranks",
                got,
                "pass the same type on every rank, e.g. gm.verify.Input(x, gm.R)",
            )
        first = next(iter(ranks.values()))
        if first.type in (Type.V, Type.P):
            continue
        same = len({(kept.shape, kept.dtype, kept.mark) for kept in ranks.values()}) == 1
        if len(ranks) < len(everyones) or not same:
            shown = ", ".join(f"rank {rank}: {list(kept.shape)} {kept.mark}" for rank, kept in ranks.items())
            return invalid(
                f"{name} has type {first.type} but differs between ranks",
                "the same shape and values on all ranks",
                shown,
                "create it from the same seed on every rank, or declare it gm.V: gm.verify.Input(x, gm.V)",
            )
    return None


def unusable(
    loss: object, in_order: bool, rank: int, op: str = _GRADCHECK, double: bool = True
) -> GradmeshError | None:
    """The error if a rank's loss cannot be differentiated; in `gradmesh.ordered()` it may be None."""
    if loss is None and in_order:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        return invalid(
            "the function does not return a scalar loss",
            "a real tensor with one element on every rank",
            f"{got} on rank {rank}",
            "return a scalar such as y.sum(); on a rank without a loss return None and pass ordered=True",
            op=op,
        )
    if double and loss.dtype is not torch.float64:
        return invalid(
            "the loss is not in double precision",
            "float64, because finite differences lose half of the digits",
            f"{loss.dtype} on rank {rank}",
            "compute in the inputs' dtype, float64: remove casts such as .float() and autocast from fn",
            DTypeError,
        )
    if double and not math.isfinite(float(loss.detach())):
        return invalid(
            "the loss is not finite",
            "a finite loss on every rank",
            f"{float(loss.detach())} on rank {rank}",
            "pass inputs for which the loss is finite on every rank",
            op=op,
        )
    if not loss.requires_grad and not in_order:
        return invalid(
            "the loss does not require grad",
            "a loss that requires grad on every rank",
            f"requires_grad=False on rank {rank}",
            "compute it from the inputs without detach() or no_grad(); for a constant loss pass ordered=True",
            op=op,
        )
    return None


def unsteady(first: float, again: object, rank: int) -> GradmeshError | None:
    """The error if two calls of the function return different losses."""
    second = float(again.detach()) if isinstance(again, Tensor) else 0.0
    if abs(first - second) <= 1e-12 * abs(first) or (math.isnan(first) and math.isnan(second)):
        return None
    return invalid(
        "the function returns different losses for the same inputs",
        "the same loss from every call",
        f"{first!r} and {second!r} on rank {rank}",
        "call torch.manual_seed(0) inside fn, and switch dropout off with module.eval()",
    )


def invalid(
    problem: str,
    expected: str,
    got: str,
    remedy: str,
    kind: type[GradmeshError] = ArgumentError,
    op: str = _GRADCHECK,
) -> GradmeshError:
    """The error about an input, a loss or an argument of a check."""
    return kind.of(problem, op=op, expected=expected, got=got, remedy=remedy)


Check = tuple[bool, str, object, str, str]
"""Whether an argument is valid, its name, its value, what is expected, and the remedy."""


def refuse_invalid(op: str, *checks: Check) -> None:
    """Raise for the first argument that is invalid."""
    for valid, name, got, expected, remedy in checks:
        if not valid:
            raise invalid(f"invalid {name}", expected, f"{name}={got!r}", remedy, op=op)


def objective_check(objective: str) -> Check:
    """The check of the argument `objective`."""
    return (
        objective in ("sum", "mean", "replicated"),
        "objective",
        objective,
        "'sum', 'mean' or 'replicated'",
        "pass objective='sum' unless a wrapper such as DDP averages the gradients ('mean')",
    )


def raise_first(problems: list[GradmeshError | None]) -> None:
    """Raise the problem of the first rank that has one."""
    for problem in problems:
        if problem is not None:
            raise problem


@dataclass(frozen=True)
class Shard:
    """A tensor that is sharded along a dimension; its type over the ranks is V.

    Args:
        value: the full tensor, for an input; None for parameters and outputs, which are given by name.
        dim: the dimension.
        sizes: each rank's size along `dim`, e.g. (4, 3). None: balanced, with the first ranks one larger, as in
            `gradmesh.shard`.
        constant: True: the input's gradient is not compared.

    Example:
        >>> part_of(torch.arange(5), Shard(sizes=(1, 4)), 1, 2)
        tensor([1, 2, 3, 4])
    """

    value: Tensor | None = None
    dim: int = 0
    sizes: Sequence[int] | None = None
    constant: bool = False


Placement = Shard | Type

T = TypeVar("T")


def part_of(whole: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """A rank's part of a full tensor."""
    if not isinstance(placement, Shard):
        return whole
    total = whole.shape[placement.dim]
    sizes = list(balanced(total, ranks) if placement.sizes is None else placement.sizes)
    if len(sizes) != ranks or sum(sizes) != total:
        raise invalid(
            "the sizes of a shard do not add up to the tensor's size",
            f"{ranks} sizes that add up to {total}, the size along dim {placement.dim}",
            f"sizes={tuple(sizes)}",
            f"pass e.g. sizes={tuple(balanced(total, ranks))}, or leave sizes out for this balanced split",
            op="verify.same_as_single",
        )
    return whole.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])


def chosen(placements: Mapping[str, T], name: str, default: T) -> T:
    """The placement for a name: that of the first matching `fnmatch` pattern, else the default."""
    return next(
        (place for pattern, place in placements.items() if fnmatch.fnmatchcase(name, pattern)), default
    )
