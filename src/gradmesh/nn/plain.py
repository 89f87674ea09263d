"""Helpers of the layers: can a tensor's values be read, and upcast to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh._torch import is_fake, transforms_active
from gradmesh.transport import compiling

__all__ = ["readable", "upcast"]


def readable(x: Tensor) -> bool:
    """True if reading a value neither synchronizes with a device nor breaks a trace."""
    return x.device.type == "cpu" and not compiling() and not is_fake(x) and not transforms_active()


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32 if it is float16 or bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
