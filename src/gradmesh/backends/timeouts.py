"""How long the calls of a group may wait, where torch does not say what its caller said."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

__all__ = ["timeout_of_group"]


def timeout_of_group(given: datetime.timedelta) -> datetime.timedelta:
    """The timeout of a group that is being made: that of the world, where the caller gave none.

    torch hands its own default to every group that is made without a timeout, whatever the world's is.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    seconds = getattr(world, "timeout", None)
    if given == default_pg_timeout and isinstance(seconds, float):
        return datetime.timedelta(seconds=seconds)
    return given
