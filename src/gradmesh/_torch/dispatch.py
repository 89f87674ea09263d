"""Being called for every operator."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from gradmesh._torch.names import find

__all__ = ["DispatchMode", "WeakTensors", "arguments", "group_of", "is_random", "reduction_of", "written"]

_WITHOUT = "programs cannot be followed operator by operator: no gradmesh check"

DispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode", without=_WITHOUT) or object
"""A context whose `__torch_dispatch__` is called for every operator, below autograd."""

WeakTensors: Any = find("torch.utils.weak.WeakIdKeyDictionary", without=_WITHOUT) or dict
"""A dictionary of tensors by identity that does not keep them alive."""


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by their names."""
    names = [each.name for each in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@functools.cache
def written(func: Any) -> frozenset[str]:
    """The names of the arguments that an operator writes to."""
    return frozenset(
        each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write
    )


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def group_of(boxed: Any) -> Any:
    """The process group that an operator was handed in."""
    return dist.ProcessGroup.unbox(boxed)


def reduction_of(boxed: Any) -> str:
    """How an operator combines the ranks' tensors, in lower case."""
    return _REDUCTIONS.get(int(boxed.op()), "other")


_REDUCTIONS = {
    int(getattr(dist.ReduceOp, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    if dist.is_available()
}
