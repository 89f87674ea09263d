"""Process groups: duplicates, and rendezvous from the environment."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradmesh._torch.names import Attribute, find, required

_C10D = "torch.distributed.distributed_c10d"
_new = required(f"{_C10D}._new_process_group_helper", "async_op=True")
_store = required(f"{_C10D}._get_default_store", "async_op=True")


def duplicate_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Create a group with the ranks, CPU backend and timeout of another one; all its members must call this.

    `new_group` must be called by every rank of the world; with `use_local_synchronization` its members suffice, but the
    group's name then depends on the number of groups of each member. So this calls the underlying function with an
    explicit name, from the purpose, which is unique per group.
    """
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


def default_store() -> Any:
    """The store of the process group of all ranks."""
    world: Any = dist.group.WORLD
    return dist.distributed_c10d._world.pg_map[world][1]


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort the pending calls of a group; does nothing on backends that cannot, such as Gloo."""
    if _ABORT is not None:
        _ABORT(group)


_ABORT = find(
    "torch._C._distributed_c10d.ProcessGroup.abort",
    without="a rank that waits on a device for a mismatched call waits until the timeout of its process group",
)


def _backend(group: dist.ProcessGroup) -> str:
    """The backend for CPU tensors."""
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return f"cpu:{pairs['cpu']}"


_BACKEND = Attribute("torch.distributed.ProcessGroup._get_backend", "async_op=True")
_TIMEOUT = Attribute("torch.distributed.ProcessGroup.Options._timeout", "async_op=True")


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """The timeout of a group; torch's default if unknown."""
    own = getattr(group, "timeout", None)
    if isinstance(own, int | float):
        return datetime.timedelta(seconds=own)
    try:
        timeout = _TIMEOUT.of(_BACKEND.of(group)(torch.device("cpu")).options, None)
    except RuntimeError:
        return default_pg_timeout
    return timeout if isinstance(timeout, datetime.timedelta) else default_pg_timeout


_handlers: dict[str, Callable[..., Iterator[tuple[Any, int, int]]]] | None = find(
    "torch.distributed.rendezvous._rendezvous_handlers",
    without="a launched rank that calls init_process_group again creates a store that listens on all interfaces",
)


def join_through(store: Callable[[], Any]) -> None:
    """Use a store, made for each world, whenever this process joins one from its environment."""

    def handler(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(query.get("rank", os.environ["RANK"]))
        yield store(), rank, int(query.get("world_size", os.environ["WORLD_SIZE"]))

    if _handlers is not None:
        _handlers["env"] = handler
