"""Process groups: duplicates, rendezvous from the environment, and the gradient divisors of FSDP and replicate.

Duplicates a process group; only its members need to call this.
`new_group` must be called by every rank of the world; with `use_local_synchronization` its members suffice, but the
group's name then depends on the number of groups of each member. So this calls the underlying function with an explicit
name.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradmesh._torch.names import find, gone, refuse

_REFUSED = "async_op=True raises"
_C10D = "torch.distributed.distributed_c10d"
_new = find(f"{_C10D}._new_process_group_helper", without=_REFUSED)
_store = find(f"{_C10D}._get_default_store", without=_REFUSED)
_NEEDED = f"{_C10D}._new_process_group_helper", f"{_C10D}._get_default_store"


def duplicate_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Create a group with the ranks, CPU backend and timeout of another one; all its members must call this.

    Args:
        group: the group.
        purpose: the description of the new group; unique per group.
    """
    if not set(gone).isdisjoint(_NEEDED):
        refuse("async_op=True", *_NEEDED)
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup
    made, _ = _new(
        len(ranks),
        group.rank(),
        ranks,
        _backend(group),
        _store(),
        f"{group.group_name} {purpose}",
        timeout=_timeout(group),
        group_desc=purpose,
    )
    world: Any = dist.distributed_c10d._world  # present wherever groups exist
    world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def is_known(group: dist.ProcessGroup | None) -> bool:
    """Whether a group exists, i.e. was created and not destroyed."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _backend(group: dist.ProcessGroup) -> str:
    """The backend for CPU tensors."""
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return f"cpu:{pairs['cpu']}"


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout of a group; None if unknown, which means torch's default."""
    own = getattr(group, "timeout", None)
    if isinstance(own, int | float):
        return datetime.timedelta(seconds=own)
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, datetime.timedelta) else None


_handlers: dict[str, Callable[..., Iterator[tuple[Any, int, int]]]] | None = find(
    "torch.distributed.rendezvous._rendezvous_handlers",
    without="a launched rank that calls init_process_group again creates a store that listens on all interfaces",
)


def join_through(store: Callable[[], Any]) -> None:
    """Use a given store whenever this process joins a world from its environment.

    Args:
        store: creates the store for one world.
    """

    def handler(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(query.get("rank", os.environ["RANK"]))
        yield store(), rank, int(query.get("world_size", os.environ["WORLD_SIZE"]))

    if _handlers is not None:
        _handlers["env"] = handler


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
