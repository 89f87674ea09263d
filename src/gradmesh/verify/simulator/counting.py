"""Input and sent bytes of a collective on a rank.

`payload` is the size of the rank's input tensors in the dtype that is sent; for `broadcast` the buffer of every rank.

`sent` does not depend on the algorithm. It is the data of this rank that other ranks receive, counted once for each of
them: for `all_gather` the local shard times W - 1, for `broadcast` the tensor times W - 1 at the root and 0 elsewhere,
for `all_to_all` the parts for other ranks. For reductions it is the terms of other ranks' sums: for `reduce_scatter`
the parts for other ranks, for `reduce` the tensor on every rank but the root. `all_reduce` counts as a reduce_scatter
with the balanced split, then an all_gather: 2 (W - 1) / W of the tensor if W divides its size. In total, ranks send as
much as must be received; a real algorithm may send more, and less on a single rank.
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
    """The kind of transfer; "withdrawn" for a call that the rank aborted."""
    return _OPS.get(part.call.partition("(")[0], "withdrawn")


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """The size of the tensors; for sparse ones that of their values and indices."""
    return sum(_bytes(tensor) for tensor in tensors if tensor is not None)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().coalesce()
        return bytes_of([tensor.values(), tensor.indices()])
    return tensor.numel() * tensor.itemsize


def payload_of(part: Contribution) -> int:
    """The bytes of a rank's input tensors."""
    return bytes_of(part.inputs)


def sent_by(place: int, part: Contribution, size: int) -> int:
    """The bytes that a rank sends to others.

    Args:
        place: the rank in the group.
        part: its contribution to the call.
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
        return (size - 1) * _bytes(tensor)  # the ranks' indices differ, so all values are gathered
    share, more = divmod(tensor.numel(), size)
    local = share + (place < more)
    return (tensor.numel() - local + (size - 1) * local) * tensor.itemsize
