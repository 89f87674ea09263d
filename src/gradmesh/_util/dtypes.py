"""Dtypes that torch barely supports."""

from __future__ import annotations

import torch


def _named(*names: str) -> frozenset[torch.dtype]:
    """The dtypes with these names that exist in this torch version."""
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


NEVER_COPIED = _named(*(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)))
"""Dtypes without a copy kernel."""

BITS = _named("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2")
"""Dtypes with a copy kernel only."""
