"""What ranks tell each other before a plan is made: whether they were told the same, and where its tensors are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.collectives import all_gather
from gradmesh.errors import MismatchError, message

__all__ = ["agree", "checksum", "device_of_root", "meeting", "words"]

_STEP, *_MIX = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The numbers of splitmix64 as int64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""


def agree(axis: Axis, verb: str, words: str, numbers: list[int], *tensors: Tensor) -> None:
    """See that the ranks were told the same.

    Args:
        axis: the ranks.
        verb: who asks.
        words: what is compared, for the error.
        numbers: some numbers.
        tensors: some tensors of int64; of these the shapes and a checksum are compared.
    """
    if axis.size == 1:
        return
    told = list(numbers)
    for x in tensors:
        told += [*x.shape, checksum(x)]
    rows = all_gather(torch.tensor([told], device=meeting(axis)), axis).tolist()
    differing = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if differing:
        raise MismatchError(
            message(
                "the ranks were told different things",
                op=verb,
                axis=str(axis),
                expected=f"the same {words} on every rank",
                got=f"others on rank {', '.join(map(str, differing))} than on rank 0",
                remedy="make them on one rank and broadcast them, or make them alike on all",
            )
        )


def words(*names: object) -> list[int]:
    """Two numbers made of some names, for `agree`."""
    said = repr(names).encode()
    return [len(said), int.from_bytes(said, "big") % (2**61 - 1)]


def checksum(numbers: Tensor) -> int:
    """A number made of all numbers of an int64 tensor and of their places."""
    mixed = numbers.reshape(-1) + torch.arange(numbers.numel(), device=numbers.device) * _STEP
    # A sum of products alone is the same for 0, 1, 1, 0 and 1, 0, 0, 1.
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return int((mixed ^ (mixed >> 31)).sum())


def meeting(axis: Axis) -> torch.device:
    """Where a tensor has to be for any ranks to exchange it: on the CPU if the group carries such, else on the GPU."""
    if axis.size == 1 or not torch.accelerator.is_available():
        return torch.device("cpu")
    carried = dist.get_backend_config(axis.group).split(",")
    return torch.device("cpu") if any(each.startswith("cpu:") for each in carried) else _accelerator()


def device_of_root(axis: Axis, root: int, given: Tensor | None) -> torch.device:
    """Where the root's tensors are, as this rank has such a place: its CPU, or its own accelerator.

    Args:
        axis: the ranks.
        root: which of them has the tensors.
        given: one of these, on the root.
    """
    place = meeting(axis)
    if place.type != "cpu" or not torch.accelerator.is_available():
        return place
    told = all_gather(torch.tensor([given is not None and not given.is_cpu]), axis)
    return _accelerator() if told[root] else place


def _accelerator() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind else "cpu", torch.accelerator.current_device_index())
