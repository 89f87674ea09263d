"""What the layers ask of a tensor: whether its numbers can be looked at, and its wide form."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh._torch import is_fake, transforms_active
from gradmesh.transport import compiling

__all__ = ["known", "widened"]


def known(x: Tensor) -> bool:
    """Whether a number can be asked for without waiting for a device or stopping a tracer."""
    return x.device.type == "cpu" and not compiling() and not is_fake(x) and not transforms_active()


def widened(x: Tensor) -> Tensor:
    """The tensor in float32, where it is narrower."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
