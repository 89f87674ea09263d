"""By what a wrapper divides gradients after backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradmesh._torch import fully_sharded_divisors
from gradmesh.axis import Axis
from gradmesh.errors import ArgumentError, message

__all__ = ["divided_by"]


def divided_by(ddp: bool | float | nn.Module, axis: Axis) -> float:
    """The number that gradients are divided by after backward; 1: they are not averaged.

    Args:
        ddp: what `gradmesh.objective` was told.
        axis: the ranks that True stands for.

    Raises:
        ArgumentError: the number cannot be found.
    """
    if isinstance(ddp, bool):
        return axis.size if ddp else 1
    if isinstance(ddp, int | float):
        if not ddp > 0:
            _refuse(axis, f"ddp={ddp}", "pass the number of ranks that gradients are averaged over")
        return ddp
    if not isinstance(ddp, nn.Module):
        _refuse(axis, f"ddp={ddp!r}", "pass the wrapped module, or True")
    found: set[float] = set()
    inside: set[str] = set()
    for prefix, part, numbers in _wrappers(ddp, axis):
        found |= numbers
        inside.update(name for name, _ in part.named_parameters(prefix=prefix))
    missing = [name for name, p in ddp.named_parameters() if p.requires_grad and name not in inside]
    if missing and found:
        _refuse(
            axis,
            f"a module with parameters outside of the wrapper: {', '.join(missing[:3])}",
            "wrap the whole module, so that one factor is right for all parameters",
        )
    if len(found) > 1:
        _refuse(
            axis,
            f"a module whose gradients are divided by {' and '.join(f'{n:g}' for n in sorted(found))}",
            "wrap all of it in one group, so that one factor is right for all parameters",
        )
    return found.pop() if found else 1


def _wrappers(module: nn.Module, axis: Axis) -> Iterator[tuple[str, nn.Module, set[float]]]:
    """The modules that average gradients, with what they divide by."""
    # Who has such a module has loaded these; gradmesh does not, as that takes as long as loading torch.distributed.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for prefix, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            yield prefix, part, {part.process_group.size()}
        elif fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            if "HYBRID" in part.sharding_strategy.name:
                _refuse(
                    axis,
                    f"FSDP with {part.sharding_strategy.name}, which averages over two groups",
                    "pass the number of ranks of both together",
                )
            yield prefix, part, {part.process_group.size()}
        elif fsdp is not None and isinstance(part, fsdp.FSDPModule):
            numbers = fully_sharded_divisors(part)
            if numbers is None:
                _refuse(
                    axis,
                    "a module of fully_shard in a torch that does not tell it",
                    "pass the number of ranks that gradients are averaged over",
                )
            yield prefix, part, numbers


def _refuse(axis: Axis, got: str, remedy: str) -> NoReturn:
    raise ArgumentError(
        message(
            "by what gradients are divided is not to be seen",
            op="objective",
            axis=str(axis),
            expected="a module of which DDP or FSDP averages all gradients alike; or True, False or a number",
            got=got,
            remedy=remedy,
        )
    )
