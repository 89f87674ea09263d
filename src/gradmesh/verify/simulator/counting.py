"""How many bytes a rank hands in and has to give away, from what it brings to a call.

`payload` is the size of the tensors that the rank hands in, in the dtype that travels; for `broadcast` every rank
hands in its buffer.

`sent` depends on no algorithm. Where tensors are moved it is what other ranks get of this rank's, counted once for each
of them: in `all_gather` the own part times W - 1, in `broadcast` the tensor times W - 1 at the root and nothing
elsewhere, in `all_to_all` the parts for others. Where tensors are summed it is the terms that belong to other ranks'
sums: in `reduce_scatter` the parts for others, in `reduce` the tensor on every rank but the root. `all_reduce` is a
reduce_scatter over the balanced split, then an all_gather: 2 (W - 1) / W of the tensor where W divides it. So over all
ranks as much is sent as has to be received, and an algorithm may have to send more, and for one rank less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradmesh.backends.threads.rendezvous import Contribution

__all__ = ["op_of", "payload_of", "sent_by"]

_OPS = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "relay": "permute",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


def op_of(part: Contribution) -> str:
    """What travels; "withdrawn" for a call that its rank could not make."""
    return _OPS.get(part.call.partition("(")[0], "withdrawn")


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The size of the tensors; of sparse ones that of their values and indices."""
    return sum(_bytes(tensor) for tensor in tensors if tensor is not None)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().coalesce()
        return bytes_of([tensor.values(), tensor.indices()])
    return tensor.numel() * tensor.itemsize


def payload_of(part: Contribution) -> int:
    """Bytes of the tensors that a rank hands in."""
    return bytes_of(part.inputs)


def sent_by(place: int, part: Contribution, size: int) -> int:
    """Bytes that a rank has to give to others.

    Args:
        place: the rank in the group.
        part: what it brings.
        size: the number of ranks.
    """
    op, pieces = op_of(part), part.pieces
    if op == "all_reduce":
        return sum(_sum_everywhere(tensor, place, size) for tensor in part.inputs)
    if op == "reduce":
        root = int(part.call.rpartition("root ")[2].rstrip(")"))
        return 0 if place == root else payload_of(part)
    if op == "permute":
        return 0 if pieces == place else payload_of(part)
    if op == "send":
        return payload_of(part)
    if isinstance(pieces, Sequence):
        return sum(_given(batch, place) for batch in pieces)
    return 0


def _given(batch: Any, place: int) -> int:
    return bytes_of(tensor for target, tensor in enumerate(batch.give) if target != place)


def _sum_everywhere(tensor: torch.Tensor, place: int, size: int) -> int:
    if tensor.layout is not torch.strided:
        return (size - 1) * _bytes(tensor)  # nobody knows where another rank's values lie: all are gathered
    share, more = divmod(tensor.numel(), size)
    own = share + (place < more)
    return (tensor.numel() - own + (size - 1) * own) * tensor.itemsize
