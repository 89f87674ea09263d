"""A second process group of the same ranks, which its members alone make.

`new_group` wants every rank of the world to call it; with `use_local_synchronization` its members are enough, but the
name that they have to agree in counts the groups that each of them is in. So the function below that is called, with a
name of our own.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from gradmesh._torch.names import find, gone, refuse

__all__ = ["duplicate_group", "is_known"]

_REFUSED = "async_op=True is refused"
_C10D = "torch.distributed.distributed_c10d"
_new = find(f"{_C10D}._new_process_group_helper", without=_REFUSED)
_store = find(f"{_C10D}._get_default_store", without=_REFUSED)
_NEEDED = f"{_C10D}._new_process_group_helper", f"{_C10D}._get_default_store"


def duplicate_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Make a group of the ranks of another, for CPU tensors, with its backend and timeout; all of them have to call.

    Args:
        group: the group.
        purpose: what the new one is for; a second one for the same purpose cannot be made.
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
    world: Any = dist.distributed_c10d._world  # without which there are no groups either
    world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def is_known(group: dist.ProcessGroup | None) -> bool:
    """Whether a group was made and not destroyed."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _backend(group: dist.ProcessGroup) -> str:
    """What carries CPU tensors."""
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return f"cpu:{pairs['cpu']}"


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long its calls wait; None where nothing tells: then torch's own default."""
    own = getattr(group, "timeout", None)
    if isinstance(own, int | float):
        return datetime.timedelta(seconds=own)
    try:
        told = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return told if isinstance(told, datetime.timedelta) else None
