"""Why inputs and losses cannot be checked: errors that every rank raises."""

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
    """What is known of a leaf of a rank beside its values."""

    name: str
    type: Type
    shape: tuple[int, ...]
    dtype: torch.dtype
    mark: tuple[float, ...]
    """Two products of a leaf that has to be the same on every rank; empty for others."""
    memory: tuple[int, int] | None = None
    """The process and the address of a module's parameter; None for what is copied anyway, or is empty."""


def disagreement(everyones: list[list[Kept]]) -> GradmeshError | None:
    """Why the ranks' leaves do not make one program."""
    by_name: dict[str, dict[int, Kept]] = {}
    for rank, leaves in enumerate(everyones):
        for kept in leaves:
            by_name.setdefault(kept.name, {})[rank] = kept
    if not by_name:
        return _error(
            "there is nothing to differentiate",
            "a floating-point or complex input",
            "none on any rank",
            "return tensors or modules from inputs(rank)",
        )
    for name, ranks in by_name.items():
        held = [kept.memory for kept in ranks.values() if kept.memory is not None]
        if len(set(held)) < len(held):
            return _error(
                "the ranks share one module",
                "a module of its own on each rank, since each has gradients of its own",
                f"{name} at one address on several ranks",
                "make the module inside inputs(rank) from one seed, or copy.deepcopy it there",
            )
        if len({kept.type for kept in ranks.values()}) > 1:
            got = ", ".join(f"{kept.type} on rank {rank}" for rank, kept in ranks.items())
            return _error(
                f"{name} has several types", "one type on all ranks", got, "declare it alike everywhere"
            )
        first = next(iter(ranks.values()))
        if first.type in (Type.V, Type.P):
            continue
        same = len({(kept.shape, kept.dtype, kept.mark) for kept in ranks.values()}) == 1
        if len(ranks) < len(everyones) or not same:
            shown = ", ".join(f"rank {rank}: {list(kept.shape)} {kept.mark}" for rank, kept in ranks.items())
            return _error(
                f"{name} is declared {first.type} and is not the same on every rank",
                "one value on all ranks",
                shown,
                "make it from one seed on every rank, or declare it gm.V",
            )
    return None


def unusable(
    loss: object, in_order: bool, rank: int, op: str = _GRADCHECK, double: bool = True
) -> GradmeshError | None:
    """Why a rank's loss cannot be differentiated.

    Args:
        loss: what its function returned.
        in_order: whether it runs in `gradmesh.ordered()`, where a rank may have no loss, or one of nothing.
        rank: the rank.
        op: what refuses it.
        double: whether it has to be of double precision.
    """
    if loss is None and in_order:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        return _error(
            "the function returns no scalar loss",
            "one real element on every rank",
            f"{got} on rank {rank}",
            "return the sum of what is to be differentiated; where a rank has no loss, None, with ordered=True",
            op=op,
        )
    if double and loss.dtype is not torch.float64:
        return _error(
            "the loss is not of double precision",
            "float64, since finite differences need the digits",
            f"{loss.dtype} on rank {rank}",
            "keep float64 inputs in float64 all the way",
            DTypeError,
        )
    if double and not math.isfinite(float(loss.detach())):
        return _error(
            "the loss is not finite",
            "a number of which differences can be taken",
            f"{float(loss.detach())} on rank {rank}",
            "give inputs at which the loss is finite on every rank",
            op=op,
        )
    if not loss.requires_grad and not in_order:
        return _error(
            "the loss does not require grad",
            "a loss that is differentiable on every rank",
            f"none on rank {rank}",
            "compute it from the inputs without detach or no_grad; where a rank's loss uses nothing, pass ordered=True",
            op=op,
        )
    return None


def unsteady(first: float, again: object, rank: int) -> GradmeshError | None:
    """Why the losses of two calls cannot be compared."""
    second = float(again.detach()) if isinstance(again, Tensor) else 0.0
    if abs(first - second) <= 1e-12 * abs(first) or (math.isnan(first) and math.isnan(second)):
        return None
    return _error(
        "the function gives another loss when it is called again",
        "the same loss for the same inputs",
        f"{first!r} and {second!r} on rank {rank}",
        "take random numbers from a generator that fn seeds, and put modules with dropout into eval()",
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
