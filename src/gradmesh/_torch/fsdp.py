"""Of which parameters wrappers average the gradients, and by what they divide, where they tell nobody."""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import nn

__all__ = ["fully_sharded", "ignored_by_fsdp", "is_replicated"]


def fully_sharded(module: nn.Module) -> dict[int, float] | None:
    """The parameters that a `FSDPModule` itself has, by identity, and by what it divides their gradients.

    Between forward and backward its parameters may be plain tensors, which do not tell their mesh.

    Returns:
        Those that require grad; None if this torch does not tell.
    """
    try:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # a list from torch 2.13 on
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        found = {}
        for group in groups:
            for one in group.fsdp_params:
                parameter = getattr(one._module_info.module, one._module_info.param_name)
                if parameter.requires_grad:
                    found[id(parameter)] = _divisor(group)
        return found
    except AttributeError:
        return None


def _divisor(group: Any) -> float:
    told: float | None = group.gradient_divide_factor
    if told is not None:
        return told
    sizes = [getattr(group.mesh_info, name, 0) for name in ("shard_mesh_size", "replicate_mesh_size")]
    if not any(sizes):
        raise AttributeError("mesh_info without a size")
    return float(math.prod(size for size in sizes if size))


def ignored_by_fsdp(module: nn.Module) -> set[int]:
    """The parameters, by identity, that a `FullyShardedDataParallel` was told to ignore."""
    return {id(parameter) for parameter in getattr(module, "_ignored_params", ())}


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied to a module, which leaves no class to know it by."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    find = getattr(contract, "_get_registry", None)
    return find is not None and "replicate" in (find(module) or {})
