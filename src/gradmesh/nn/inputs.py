"""What layers check of their arguments: which values they may read, and whether the ranks' arguments are equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh._torch import is_fake, to_list, transforms_active
from gradmesh.errors import MismatchError, ShapeError
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import compiling
from gradmesh.transport.run import accelerator, exchange_device
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import all_gather


def readable(x: Tensor) -> bool:
    """True if reading a value neither synchronizes with a device nor breaks a trace."""
    return x.device.type == "cpu" and not compiling() and not is_fake(x) and not transforms_active()


def outside(numbers: Tensor, limit: int) -> str:
    """The range of integers that are not all in 0 ... limit - 1, for an error; else empty. Reads them."""
    if not numbers.numel():
        return ""
    first, last = int(numbers.min()), int(numbers.max())
    return f"from {first} to {last}" if first < 0 or last >= limit else ""


HALVES = (torch.float16, torch.bfloat16)


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32 if it is float16 or bfloat16, whose sums and counts would overflow."""
    return x.float() if x.dtype in HALVES else x


def check_own_size(call: Call, sizes: Sequence[int], size: int, unit: str, name: str = "sizes") -> None:
    """Raise unless the entry of this rank in `sizes` is its true size."""
    rank = call.axis.rank
    if sizes[rank] != size:
        call.fail(
            f"{name} does not match this rank's number of {unit}",
            expected=f"{sizes[rank]} {unit}, from {name}={tuple(sizes)}",
            got=f"{size} {unit}",
            remedy=f'pass each rank\'s number of {unit} as {name}, here {size} for rank {rank}, or {name}="auto" to '
            "exchange them",
            kind=ShapeError,
        )


_STEP, *_MIX = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64 as int64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""


def agree(axis: Axis, verb: str, names: str, numbers: list[int], *tensors: Tensor) -> None:
    """Raise on every rank if numbers, or the shapes or checksums of int64 tensors, differ; `names` is for the error."""
    if axis.size == 1:
        return
    local = list(numbers)
    for x in tensors:
        local += [*x.shape, checksum(x)]
    rows = to_list(all_gather(torch.tensor([local], device=exchange_device(axis)), axis))
    differing = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if differing:
        raise MismatchError.of(
            "the ranks' arguments differ",
            op=verb,
            axis=str(axis),
            expected=f"the same {names} on every rank",
            got=f"different values on rank {', '.join(map(str, differing))} and on rank 0",
            remedy="compute them on one rank and broadcast them, or compute them deterministically on every rank",
        )


def fingerprint(*names: object) -> list[int]:
    """Two numbers that identify some names, for `agree`."""
    text = repr(names).encode()
    return [len(text), int.from_bytes(text, "big") % (2**61 - 1)]


def checksum(numbers: Tensor) -> int:
    """A checksum of the values and their order."""
    mixed = numbers.reshape(-1) + torch.arange(numbers.numel(), device=numbers.device) * _STEP
    # Mix bits: a sum of products is the same for 0, 1, 1, 0 and 1, 0, 0, 1.
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return int((mixed ^ (mixed >> 31)).sum())


def device_of_root(axis: Axis, root: int, given: Tensor | None) -> torch.device:
    """This rank's device of the kind that the root's tensors are on; `given` is one of them, on the root."""
    device = exchange_device(axis)
    if device.type != "cpu" or not torch.accelerator.is_available():
        return device
    on_accelerator = all_gather(torch.tensor([given is not None and not given.is_cpu]), axis)
    return accelerator() if on_accelerator[root] else device
