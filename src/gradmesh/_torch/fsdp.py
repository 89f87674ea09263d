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

from gradmesh._torch.names import Attribute

_FSDP2 = "gm.objective(ddp=model) with fully_shard"
_STATE = Attribute("torch.distributed.fsdp.FSDPModule._get_fsdp_state", _FSDP2)
_PARAM_GROUPS = Attribute("FSDPModule._get_fsdp_state()._fsdp_param_groups", _FSDP2)
_PARAM_GROUP = Attribute("FSDPModule._get_fsdp_state()._fsdp_param_group", _FSDP2)
_MODULE_INFO = Attribute("FSDPParam._module_info", _FSDP2)


def fully_sharded(module: nn.Module) -> dict[int, tuple[float, DeviceMesh]]:
    """The divisor and mesh of each parameter of a `FSDPModule` itself that requires grad, by id of the parameter.

    Includes the gathered parameters that autograd uses between forward and backward, which are plain tensors.
    """
    state = _STATE.of(module)()
    groups = _PARAM_GROUPS.of(state, None)  # a list from torch 2.13 on
    if groups is None:
        one_group = _PARAM_GROUP.of(state)
        groups = [] if one_group is None else [one_group]
    found = {}
    for group in groups:
        for one in group.fsdp_params:
            info = _MODULE_INFO.of(one)
            parameter = getattr(info.module, info.param_name)
            if parameter.requires_grad:
                how = _divisor(group), group.mesh_info.mesh
                found[id(parameter)] = how
                with contextlib.suppress(AttributeError):  # before its first forward
                    found[id(one.unsharded_param)] = how
    return found


def _divisor(group: Any) -> float:
    factor: float | None = group.gradient_divide_factor
    if factor is not None:
        return factor
    sizes = [getattr(group.mesh_info, name, 0) for name in ("shard_mesh_size", "replicate_mesh_size")]
    return float(math.prod(size for size in sizes if size))


_FSDP1 = "gradmesh with FullyShardedDataParallel"
_WRAPPER = "torch.distributed.fsdp.FullyShardedDataParallel"
_HANDLE = Attribute(f"{_WRAPPER}._handle", _FSDP1)
_IGNORED = Attribute(f"{_WRAPPER}._ignored_params", _FSDP1)
_PARAMS = Attribute("FlatParameter._params", _FSDP1)
_PARAM_INFOS = Attribute("FlatParameter._param_infos", _FSDP1)
_SHARD_INFOS = Attribute("FlatParameter._shard_param_infos", _FSDP1)
_FLATTENED = Attribute("torch.nn.Parameter._fsdp_flattened", _FSDP1)
_REGISTRY = Attribute(
    "torch.distributed._composable.contract._get_registry", "gm.objective(ddp=model) with replicate"
)


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The flat parameter of a `FullyShardedDataParallel` itself, of which the module's parameters are views."""
    handle = _HANDLE.of(module)
    return [] if handle is None else [handle.flat_param]


def ignored_by_fsdp(module: nn.Module) -> set[int]:
    """The ids of the `ignored_parameters` of a `FullyShardedDataParallel`."""
    return {id(parameter) for parameter in _IGNORED.of(module)}


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied to a module, which does not change its class."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (_REGISTRY.of(contract)(module) or {})


def flattened(
    module: nn.Module,
) -> Iterator[tuple[Tensor, ProcessGroup | None, nn.Module, str, slice | None]]:
    """The original parameters that a `FullyShardedDataParallel` itself has flattened.

    Returns:
        For each of them: the parameter that contains its local shard; the group over which it is sharded (None: not
        sharded); its module and name; and the slice of its shard (None: the entire parameter).
    """
    handle = _HANDLE.of(module)
    if handle is None:
        return
    flat = handle.flat_param
    group = handle.process_group if handle.uses_sharded_strategy else None
    params, infos = _PARAMS.of(flat), _PARAM_INFOS.of(flat)
    for parameter, info, part in zip(
        params or [flat] * len(infos), infos, _SHARD_INFOS.of(flat), strict=True
    ):
        begin = part.offset_in_shard or 0
        place = slice(begin, begin + (part.numel_in_shard or 0))
        yield parameter, group, info.module, info.param_name, None if params else place


def is_flattened(tensor: Tensor) -> bool:
    """Whether a tensor is, or is part of, a flat parameter of a `FullyShardedDataParallel`."""
    flattened: bool = _FLATTENED.of(tensor, False)
    return flattened
