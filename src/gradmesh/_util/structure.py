"""Tuples, lists and dicts of tensors: flatten them to named tensors, and rebuild the structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from gradmesh.errors import ArgumentError

Tree = Tensor | Sequence["Tree"] | Mapping[Any, "Tree"]
"""A tensor, or a structure of them."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """Several tensors packed into one operand."""

    flat: Tensor  # their elements, concatenated
    operand_desc: str  # description of the tensors, which the ranks compare


def is_structure(x: object) -> bool:
    """Whether it is a tuple, list or dict."""
    return isinstance(x, (tuple, list, dict))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result, in order: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def leaves(x: object, verb: str, axis: str, name: str = "x") -> list[tuple[str, Tensor]]:
    """The tensors of a structure with their names, in order.

    Raises:
        ArgumentError: a leaf is not a tensor.

    Example:
        >>> [name for name, _ in leaves({"k": torch.zeros(1), "v": [torch.zeros(2)]}, "shift", "")]
        ["x['k']", "x['v'][0]"]
    """
    if isinstance(x, Tensor):
        return [(name, x)]
    if not is_structure(x):
        raise ArgumentError.of(
            f"{name} must be a tensor",
            op=verb,
            axis=axis,
            expected="a tensor, or a (nested) tuple, list or dict of tensors",
            got=f"{name} of type {type(x).__name__}",
            remedy=f"remove it, or convert it with torch.as_tensor({name})",
        )
    inside = x.items() if isinstance(x, dict) else enumerate(cast("Sequence[object]", x))
    return [leaf for key, value in inside for leaf in leaves(value, verb, axis, f"{name}[{key!r}]")]


def rebuilt(x: object, tensors: Iterator[Tensor]) -> Any:
    """The structure of `x` with other tensors; subclasses of list, tuple and dict become plain, named tuples stay.

    Example:
        >>> rebuilt(("a", ["b"]), iter([1, 2]))  # any leaves do
        (1, [2])
    """
    if isinstance(x, dict):
        return {key: rebuilt(value, tensors) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return sequence_like(x, [rebuilt(value, tensors) for value in x])
    return next(tensors)


def sequence_like(x: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    """The values as a list, a tuple or a named tuple, whichever `x` is."""
    if isinstance(x, list):
        return values
    return type(x)(*values) if hasattr(x, "_fields") else tuple(values)


def cut(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into copies with the shapes of `like`."""
    parts = whole.split([one.numel() for one in like])
    return [part.view(one.shape).clone() for part, one in zip(parts, like, strict=True)]


def cut_by_rank(whole: Tensor, like: Sequence[Tensor], dims: Sequence[int], ranks: int) -> list[Tensor]:
    """Split gathered flat tensors; each tensor's parts from all ranks are concatenated along its dimension."""
    rows = whole.view(ranks, -1).split([one.numel() for one in like], dim=1)
    made = []
    for row, one, dim in zip(rows, like, dims, strict=True):
        shape = one.shape
        parts = row.reshape(ranks, *shape).movedim(0, dim)
        made.append(parts.reshape(*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]).clone())
    return made
