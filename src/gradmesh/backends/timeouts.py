"""The timeout of a group whose creator did not pass one."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

__all__ = ["timeout_of_group"]


def timeout_of_group(given: datetime.timedelta) -> datetime.timedelta:
    """The timeout of a new group: that of the world if the caller passed none.

    torch passes its default to every group that is created without a timeout, ignoring the world's.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    seconds = getattr(world, "timeout", None)
    if given == default_pg_timeout and isinstance(seconds, float):
        return datetime.timedelta(seconds=seconds)
    return given
