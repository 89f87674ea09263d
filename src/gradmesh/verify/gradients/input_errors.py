"""Validates inputs and losses of all ranks; every rank raises the same error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, DTypeError, GradmeshError, message
from gradmesh.types import Type

__all__ = ["Kept", "disagreement", "raise_first", "unsteady", "unusable"]


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
        return _error(
            "the inputs contain no differentiable tensor",
            "at least one floating-point or complex tensor or module",
            "none on any rank",
            "return tensors or modules from inputs(rank), e.g. (torch.randn(3), model)",
        )
    for name, ranks in by_name.items():
        held = [kept.memory for kept in ranks.values() if kept.memory is not None]
        if len(set(held)) < len(held):
            return _error(
                "the ranks share one module",
                "a separate module object on each rank, because each rank has separate gradients",
                f"{name} at the same address on several ranks",
                "create the module inside inputs(rank) after torch.manual_seed(0), or copy.deepcopy it there",
            )
        if len({kept.type for kept in ranks.values()}) > 1:
            got = ", ".join(f"{kept.type} on rank {rank}" for rank, kept in ranks.items())
            return _error(
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
            return _error(
                f"{name} has type {first.type} but differs between ranks",
                "the same shape and values on all ranks",
                shown,
                "create it from the same seed on every rank, or declare it gm.V: gm.verify.Input(x, gm.V)",
            )
    return None


def unusable(
    loss: object, in_order: bool, rank: int, op: str = _GRADCHECK, double: bool = True
) -> GradmeshError | None:
    """The error if a rank's loss cannot be differentiated.

    Args:
        loss: the return value of its function.
        in_order: whether it runs in `gradmesh.ordered()`, where a loss may be None or not require grad.
        rank: the rank.
        op: the op that the error names.
        double: whether it must be in double precision.
    """
    if loss is None and in_order:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        return _error(
            "the function does not return a scalar loss",
            "a real tensor with one element on every rank",
            f"{got} on rank {rank}",
            "return a scalar such as y.sum(); on a rank without a loss return None and pass ordered=True",
            op=op,
        )
    if double and loss.dtype is not torch.float64:
        return _error(
            "the loss is not in double precision",
            "float64, because finite differences lose half of the digits",
            f"{loss.dtype} on rank {rank}",
            "compute in the inputs' dtype, float64: remove casts such as .float() and autocast from fn",
            DTypeError,
        )
    if double and not math.isfinite(float(loss.detach())):
        return _error(
            "the loss is not finite",
            "a finite loss on every rank",
            f"{float(loss.detach())} on rank {rank}",
            "pass inputs for which the loss is finite on every rank",
            op=op,
        )
    if not loss.requires_grad and not in_order:
        return _error(
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
    return _error(
        "the function returns different losses for the same inputs",
        "the same loss from every call",
        f"{first!r} and {second!r} on rank {rank}",
        "call torch.manual_seed(0) inside fn, and switch dropout off with module.eval()",
    )


def _error(
    problem: str,
    expected: str,
    got: str,
    remedy: str,
    kind: type[GradmeshError] = ArgumentError,
    op: str = _GRADCHECK,
) -> GradmeshError:
    return kind(message(problem, op=op, expected=expected, got=got, remedy=remedy))


def raise_first(problems: list[GradmeshError | None]) -> None:
    """Raise the problem of the first rank that has one."""
    for problem in problems:
        if problem is not None:
            raise problem
