"""By what `fully_shard` divides gradients."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["fully_sharded_divisors"]


def fully_sharded_divisors(module: nn.Module) -> set[float] | None:
    """By what the gradients of the parameters that a `FSDPModule` itself has are divided after backward.

    Between forward and backward its parameters may be plain tensors, which do not tell their mesh.

    Returns:
        The numbers, mostly one, or none where modules inside have all parameters; None if this torch does not tell.
    """
    try:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # a list from torch 2.13 on
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        return {_divisor(group) for group in groups}
    except AttributeError:
        return None


def _divisor(group: Any) -> float:
    told: float | None = group.gradient_divide_factor
    if told is not None:
        return told
    info = group.mesh_info
    sizes = [getattr(info, name, 1) for name in ("shard_mesh_size", "replicate_mesh_size")]
    if not any(hasattr(info, name) for name in ("shard_mesh_size", "replicate_mesh_size")):
        raise AttributeError("mesh_info without a size")
    return float(sizes[0] * sizes[1])
