"""Tuples, lists and dicts of tensors, as verbs take them: their tensors by name, and the same structure of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from gradmesh.errors import ArgumentError, message

__all__ = ["Packed", "Tree", "cut", "cut_by_rank", "is_structure", "leaves", "rebuilt"]

Tree = Tensor | Sequence["Tree"] | Mapping[Any, "Tree"]
"""A tensor, or a structure of them."""


@dataclass(frozen=True)
class Packed:
    """Several tensors as one, in the place of an operand.

    Attributes:
        flat: their elements, one after another.
        made_of: what they are, in words, for the ranks to compare.
    """

    flat: Tensor
    operand_desc: str


def is_structure(x: object) -> bool:
    """Whether it is a tuple, a list or a dict; a tensor is not."""
    return isinstance(x, tuple | list | dict)


def leaves(x: object, verb: str, axis: str, name: str = "x") -> list[tuple[str, Tensor]]:
    """The tensors of a structure, each with its name, in the order in which they stand there.

    Args:
        x: the structure.
        verb: the verb that it was handed to, for the error.
        axis: the axis, for the error.
        name: what the structure is called.

    Raises:
        ArgumentError: something else than a tensor is in it.

    Example:
        >>> [name for name, _ in leaves({"k": torch.zeros(1), "v": [torch.zeros(2)]}, "shift", "")]
        ["x['k']", "x['v'][0]"]
    """
    if isinstance(x, Tensor):
        return [(name, x)]
    if not is_structure(x):
        raise ArgumentError(
            message(
                "there is something else than a tensor in the operand",
                op=verb,
                axis=axis,
                expected="a tensor, or tuples, lists and dicts of tensors",
                got=f"{name} of type {type(x).__name__}",
                remedy="leave it out, or make it a tensor",
            )
        )
    inside = x.items() if isinstance(x, dict) else enumerate(cast("Sequence[object]", x))
    return [leaf for key, value in inside for leaf in leaves(value, verb, axis, f"{name}[{key!r}]")]


def rebuilt(x: object, tensors: Iterator[Tensor]) -> Any:
    """The structure of `x` with other tensors in it. What is derived from a list, tuple or dict comes back as one.

    A named tuple stays one.

    Example:
        >>> rebuilt(("a", ["b"]), iter([1, 2]))  # any leaves do
        (1, [2])
    """
    if isinstance(x, dict):
        return {key: rebuilt(value, tensors) for key, value in x.items()}
    if isinstance(x, list):
        return [rebuilt(value, tensors) for value in x]
    if isinstance(x, tuple):
        values = [rebuilt(value, tensors) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    return next(tensors)


def cut(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a flat tensor into tensors of these shapes; copies, which can be written and kept without the others."""
    parts = whole.split([one.numel() for one in like])
    return [part.view(one.shape).clone() for part, one in zip(parts, like, strict=True)]


def cut_by_rank(whole: Tensor, like: Sequence[Tensor], dims: Sequence[int], ranks: int) -> list[Tensor]:
    """Cut what was gathered of flat tensors: each one's parts from all ranks are concatenated along its dimension."""
    rows = whole.view(ranks, -1).split([one.numel() for one in like], dim=1)
    made = []
    for row, one, dim in zip(rows, like, dims, strict=True):
        shape = one.shape
        parts = row.reshape(ranks, *shape).movedim(0, dim)
        made.append(parts.reshape(*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]).clone())
    return made
