"""`barrier`, whose calls the ranks compare like those of the verbs."""

from __future__ import annotations

import torch.distributed as dist

from gradmesh._torch import in_plain_mode
from gradmesh.axis import AxisLike, resolve
from gradmesh.checking import check_level
from gradmesh.errors import NotInitializedError, message
from gradmesh.transport import compiling, group_cache, transport
from gradmesh.transport.call_checks import call_check, calls_of
from gradmesh.withdrawal import on_cpu

__all__ = ["barrier"]


def barrier(axis: AxisLike = None) -> None:
    """Wait until every rank of an axis has called `barrier`.

    It does not pair with `torch.distributed.barrier` on another rank. Where the ranks compare their calls, every rank
    raises if a rank makes another call instead.

    Args:
        axis: as in `gradmesh.axis`.

    Raises:
        MismatchError: another rank, or another thread of this one, makes another call on the axis.
        NotInitializedError: the group was destroyed.

    Example:
        >>> def on_each_rank():
        ...     if gm.rank() == 0:
        ...         pass  # write a file
        ...     gm.barrier()
        ...     return gm.rank()  # and here every rank can read it
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0, 1]
    """
    here = resolve(axis, "barrier")
    try:
        if here.size == 1 or compiling() or not on_cpu(None, here) or not check_level():
            dist.barrier(group=here.group)
            return
        signature, calls = call_check("barrier", str(here), "barrier()"), calls_of(here.group)
        with calls.lock:
            if group_cache(here.group) is None:
                in_plain_mode(transport(here, signature).compare)
            else:  # gradmesh's backends compare the calls of torch.distributed themselves
                signature.count(calls)
            dist.barrier(group=here.group)
    except ValueError as error:  # torch no longer knows the group
        raise NotInitializedError(
            message(
                "the process group was destroyed",
                op="barrier",
                axis=str(here),
                expected="an initialized process group",
                got=str(error),
                remedy="call barrier() before destroy_process_group(), or create a new group with dist.new_group(...)",
            )
        ) from error
