"""FSDP and replicate: which parameters they shard or flatten, and by what they divide gradients."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def fully_sharded(module: nn.Module) -> dict[int, tuple[float, DeviceMesh]] | None:
    """The divisor and mesh of each parameter of a `FSDPModule` itself, by id of the parameter.

    Includes the gathered parameters that autograd uses between forward and backward, which are plain tensors.

    Returns:
        Those that require grad; None if this torch does not provide the information.
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
                    how = _divisor(group), group.mesh_info.mesh
                    found[id(parameter)] = how
                    # An AttributeError of the class means an unknown torch; the object has it after its first forward.
                    gathered = type(one).unsharded_param.fget
                    with contextlib.suppress(AttributeError):
                        found[id(gathered(one))] = how
        return found
    except AttributeError:
        return None


def _divisor(group: Any) -> float:
    factor: float | None = group.gradient_divide_factor
    if factor is not None:
        return factor
    sizes = [getattr(group.mesh_info, name, 0) for name in ("shard_mesh_size", "replicate_mesh_size")]
    if not any(sizes):
        raise AttributeError("mesh_info without a size")
    return float(math.prod(size for size in sizes if size))


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The flat parameter of a `FullyShardedDataParallel` itself, of which the module's parameters are views."""
    handle: Any = getattr(module, "_handle", None)
    flat: nn.Parameter | None = getattr(handle, "flat_param", None)
    return [] if flat is None else [flat]


def ignored_by_fsdp(module: nn.Module) -> set[int]:
    """The ids of the `ignored_parameters` of a `FullyShardedDataParallel`."""
    return {id(parameter) for parameter in getattr(module, "_ignored_params", ())}


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied to a module, which does not change its class."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    find = getattr(contract, "_get_registry", None)
    return find is not None and "replicate" in (find(module) or {})


def flattened(
    module: nn.Module,
) -> Iterator[tuple[Tensor, ProcessGroup | None, nn.Module, str, slice | None]]:
    """The original parameters that a `FullyShardedDataParallel` itself has flattened.

    Returns:
        For each of them: the parameter that contains its local shard; the group over which it is sharded (None: not
        sharded); its module and name; and the slice of its shard (None: the entire parameter).

    Raises:
        AttributeError: this torch stores them differently.
    """
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return
    flat = handle.flat_param
    group = handle.process_group if handle.uses_sharded_strategy else None
    own = flat._params or [flat] * len(flat._param_infos)
    for parameter, info, part in zip(own, flat._param_infos, flat._shard_param_infos, strict=True):
        begin = part.offset_in_shard or 0
        place = slice(begin, begin + (part.numel_in_shard or 0))
        yield parameter, group, info.module, info.param_name, None if flat._params else place


def is_flattened(tensor: Tensor) -> bool:
    """Whether a tensor is, or is part of, a flat parameter of a `FullyShardedDataParallel`."""
    return getattr(tensor, "_fsdp_flattened", False)
