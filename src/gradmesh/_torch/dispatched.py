"""Operators in a dispatch mode: their arguments by name, which of them they write, and tensor versions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch.names import find, refuse

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode",
    "WeakTensors",
    "arguments",
    "arguments_of",
    "dispatched_name",
    "group_behind",
    "is_random",
    "need_dispatch",
    "reduction_of",
    "version_of",
    "written",
]

_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
_SCHEMA = "torch.ops.aten.add.Tensor._schema"
_UNBOX = "torch._C._distributed_c10d.ProcessGroup.unbox"
_NO_TYPES = "gradmesh.typed raises"
_mode, _schema = find(_MODE, without=_NO_TYPES), find(_SCHEMA, without=_NO_TYPES)
_unbox = find(
    _UNBOX,
    without="gradmesh.typed treats results of raw collectives as new tensors and infers their types from values",
)

WeakTensors: Any = (
    find(
        "torch.utils.weak.WeakIdKeyDictionary",
        without="gradmesh check keeps tensors alive that a script frees",
    )
    or dict
)
"""A dictionary of tensors by identity that does not keep them alive."""

if not TYPE_CHECKING:
    DispatchMode = object if _mode is None else _mode


def need_dispatch() -> None:
    """Raise if dispatch modes or operator schemas are not available.

    Raises:
        TorchVersionError: this torch lacks them.
    """
    if _mode is None or _schema is None:
        refuse("types of tensors", _MODE, _SCHEMA)


@functools.cache
def arguments_of(func: Any) -> tuple[tuple[str, bool], ...]:
    """The arguments of an operator: name, and whether the operator writes to it.

    >>> arguments_of(torch.ops.aten.relu_.default)
    (('self', True),)
    """
    return tuple(
        (arg.name, arg.alias_info is not None and arg.alias_info.is_write) for arg in func._schema.arguments
    )


@functools.cache
def dispatched_name(func: Any) -> tuple[str, str]:
    """The namespace and the name of an operator, without the overload.

    >>> dispatched_name(torch.ops.aten.add.Tensor)
    ('aten', 'add')
    """
    space, name = func._schema.name.split("::")
    return space, name


def version_of(x: Tensor) -> int:
    """The version counter of a tensor; -1 if it has none."""
    try:
        version: int = x._version
    except (AttributeError, RuntimeError):  # missing in this torch, or an inference tensor
        return -1
    return version


def group_behind(boxed: Any) -> torch.distributed.ProcessGroup | None:
    """The process group argument of a c10d operator; None if it cannot be determined."""
    if _unbox is None:
        return None
    try:
        group: torch.distributed.ProcessGroup = _unbox(boxed)
    except (RuntimeError, TypeError):
        return None
    return group


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator call by name."""
    return {**dict(zip((name for name, _ in arguments_of(func)), args, strict=False)), **kwargs}


@functools.cache
def written(func: Any) -> frozenset[str]:
    """The names of the arguments that an operator writes to."""
    return frozenset(name for name, is_written in arguments_of(func) if is_written)


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


_REDUCTIONS = {
    int(getattr(dist.ReduceOp, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    if dist.is_available()
}


def reduction_of(boxed: Any) -> str:
    """The reduction of a c10d operator, in lower case; "other" if it is not a standard one."""
    return _REDUCTIONS.get(int(boxed.op()), "other")
