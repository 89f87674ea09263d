"""Of which parameters wrappers average the gradients, and by what they divide, where they tell nobody."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "flat_parameters",
    "flattened",
    "fully_sharded",
    "ignored_by_fsdp",
    "is_flattened",
    "is_replicated",
]


def fully_sharded(module: nn.Module) -> dict[int, tuple[float, DeviceMesh]] | None:
    """The parameters that a `FSDPModule` itself has, by identity: by what it divides their gradients, over which mesh.

    Between forward and backward its parameters may be plain tensors, which do not know their mesh. Autograd sees the
    gathered ones, which exist only in between: they are included.

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
                    how = _divisor(group), group.mesh_info.mesh
                    found[id(parameter)] = how
                    # AttributeError of the class: unknown torch. The object has it from its first forward on.
                    gathered = type(one).unsharded_param.fget
                    with contextlib.suppress(AttributeError):
                        found[id(gathered(one))] = how
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


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a `FullyShardedDataParallel` itself hands to autograd, of which the module's are views."""
    handle: Any = getattr(module, "_handle", None)
    flat: nn.Parameter | None = getattr(handle, "flat_param", None)
    return [] if flat is None else [flat]


def ignored_by_fsdp(module: nn.Module) -> set[int]:
    """The parameters, by identity, that a `FullyShardedDataParallel` was told to ignore."""
    return {id(parameter) for parameter in getattr(module, "_ignored_params", ())}


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied to a module, which leaves no class to know it by."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    find = getattr(contract, "_get_registry", None)
    return find is not None and "replicate" in (find(module) or {})


def flattened(
    module: nn.Module,
) -> Iterator[tuple[Tensor, ProcessGroup | None, nn.Module, str, slice | None]]:
    """The original parameters that a `FullyShardedDataParallel` itself has flattened.

    Returns:
        For each of them, the parameter that holds this rank's part of it; over which ranks it is sharded (None: it is
        whole); the module and the name that it had; and where the part lies (None: it is all of the parameter that
        holds it).

    Raises:
        AttributeError: this torch keeps them elsewhere.
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
    """Whether a `FullyShardedDataParallel` holds it, as a part of a flat parameter or as one itself."""
    return getattr(tensor, "_fsdp_flattened", False)
