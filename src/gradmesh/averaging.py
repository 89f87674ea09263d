"""By what a wrapper divides gradients after backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradmesh._torch import fully_sharded, ignored_by_fsdp, is_replicated
from gradmesh.axis import Axis
from gradmesh.errors import ArgumentError, message

__all__ = ["divided_by"]

_PASS_A_NUMBER = "pass the number of ranks that gradients are averaged over"


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
            _refuse(axis, f"ddp={ddp}", _PASS_A_NUMBER)
        return ddp
    if not isinstance(ddp, nn.Module):
        _refuse(axis, f"ddp={ddp!r}", "pass the wrapped module, or True")
    divided: dict[int, float] = {}
    for part in _wrappers(ddp, axis):
        divided |= part
    if not divided:
        return 1
    outside = [name for name, p in ddp.named_parameters() if p.requires_grad and id(p) not in divided]
    if outside:
        _refuse(
            axis,
            f"a module with parameters outside of the wrapper, or ignored by it: {', '.join(outside[:3])}",
            "wrap the whole module, so that one factor is right for all parameters",
        )
    numbers = set(divided.values())
    if len(numbers) > 1:
        _refuse(
            axis,
            f"a module whose gradients are divided by {' and '.join(f'{n:g}' for n in sorted(numbers))}",
            "wrap all of it in one group, so that one factor is right for all parameters",
        )
    return numbers.pop()


def _wrappers(module: nn.Module, axis: Axis) -> Iterator[dict[int, float]]:
    """For each module that averages gradients, its parameters that require grad, and what it divides by."""
    # Who has such a module has loaded these; gradmesh does not, as that takes as long as loading torch.distributed.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            left_out = {
                id(p) for name, p in part.module.named_parameters() if name in part.parameters_to_ignore
            }
            yield _all_of(part, part.process_group.size(), left_out)
        elif fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            if "HYBRID" in part.sharding_strategy.name:
                _refuse(
                    axis,
                    f"FSDP with {part.sharding_strategy.name}, which averages over two groups",
                    "pass the number of ranks of both together",
                )
            yield _all_of(part, part.process_group.size(), ignored_by_fsdp(part))
        elif fsdp is not None and isinstance(part, fsdp.FSDPModule):
            own = fully_sharded(part)
            if own is None:
                _refuse(axis, "a module of fully_shard in a torch that does not tell it", _PASS_A_NUMBER)
            yield own
        elif is_replicated(part):
            _refuse(axis, "a module that replicate was applied to, which does not tell it", _PASS_A_NUMBER)


def _all_of(part: nn.Module, size: float, left_out: set[int]) -> dict[int, float]:
    return {id(p): size for p in part.parameters() if p.requires_grad and id(p) not in left_out}


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
