"""An op in the plain arguments that an op of torch's dispatcher may have, and back.

An op is a value made of dataclasses, tuples, numbers, names and dtypes. Its numbers are told apart from the rest,
since a compiler may know them only by name: sizes that change from step to step. The axis is told by the name of its
process group, so that the arguments are the same on every rank where the call is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradmesh._torch import constant_to_compilers, resolve_group
from gradmesh.axis import Axis
from gradmesh.bounded_cache import BoundedCache
from gradmesh.errors import ArgumentError, message
from gradmesh.ops.base import Op
from gradmesh.ops.neighbor import Picked
from gradmesh.ops.permute import Extents
from gradmesh.ops.sizes import Sizes

__all__ = ["Encoded", "decode", "decoded_on", "encode", "recalled"]


class Encoded(NamedTuple):
    """An op as arguments.

    Attributes:
        words: the names of its classes and dtypes, and marks for what stands elsewhere, in order.
        numbers: its numbers, in order.
        tensors: its tensors, in order.
        group: the name of the process group.
    """

    words: str
    numbers: list[int]
    tensors: list[Tensor]
    group: str


_END = "\x1f"
"""Stands behind every word; torch.jit.trace has no lists of them."""
_NUMBER, _TENSOR, _TEXT, _DTYPE, _TUPLE = "#", "@", "'", "torch.", "("
_NONE = ""
"""The group of an axis of this rank alone, on which nothing is sent."""
_CONSTANTS = {"None": None, "True": True, "False": False}


def encode(op: Op) -> Encoded:
    """The arguments that stand for an op."""
    words: list[str] = []
    numbers: list[int] = []
    tensors: list[Tensor] = []
    _put(op, words, numbers, tensors)
    group = op.axis.group
    return Encoded(_END.join(words), numbers, tensors, _NONE if group is None else group.group_name)


def _put(value: Any, words: list[str], numbers: list[int], tensors: list[Tensor]) -> None:
    if value is None or value is True or value is False:
        words.append(str(value))
    elif isinstance(value, (int, torch.SymInt)):
        words.append(_NUMBER)
        numbers.append(value)  # type: ignore[arg-type]  # a SymInt stands for an int
    elif isinstance(value, Tensor):
        words.append(_TENSOR)
        tensors.append(value)
    elif isinstance(value, str):
        words.append(_TEXT + value.replace(_END, " "))
    elif isinstance(value, torch.dtype):
        words.append(str(value))
    elif isinstance(value, Axis):
        words.append(_TEXT + value.name)
    elif isinstance(value, tuple):
        words.append(_TUPLE + str(len(value)))
        for each in value:
            _put(each, words, numbers, tensors)
    else:
        words.append(type(value).__name__)
        for name in _fields(type(value)):
            _put(getattr(value, name), words, numbers, tensors)


@constant_to_compilers
def _fields(kind: type[Any]) -> list[str]:
    """The fields that the class is made from."""
    return [field.name for field in fields(kind) if field.init]


def decode(code: Encoded) -> Op:
    """The op that the arguments stand for, on the calling rank."""
    group = None if code.group == _NONE else resolve_group(code.group)
    if group is None:
        return decoded_on(code, 0, 1, None)
    return decoded_on(code, group.rank(), group.size(), group)


def decoded_on(code: Encoded, rank: int, size: int, group: ProcessGroup | None) -> Op:
    """The op that the arguments stand for, on a rank of an axis; without a group it cannot be called."""
    words, numbers, tensors = iter(code.words.split(_END)), iter(code.numbers), iter(code.tensors)

    def axis(name: str) -> Axis:
        return Axis(name.removeprefix(_TEXT), rank, size, group)  # type: ignore[arg-type]

    found: Op = _take(words, numbers, tensors, axis)
    return found


def _take(
    words: Iterator[str], numbers: Iterator[int], tensors: Iterator[Tensor], axis: Callable[[str], Axis]
) -> Any:
    word = next(words)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if word == _NUMBER:
        return next(numbers)
    if word == _TENSOR:
        return next(tensors)
    if word.startswith(_TEXT):
        return word.removeprefix(_TEXT)
    if word.startswith(_DTYPE):
        return getattr(torch, word.removeprefix(_DTYPE))
    if word.startswith(_TUPLE):
        return tuple(_take(words, numbers, tensors, axis) for _ in range(int(word.removeprefix(_TUPLE))))
    kind = _kind(word)
    return kind(
        **{
            name: axis(next(words)) if name == "axis" else _take(words, numbers, tensors, axis)
            for name in _fields(kind)
        }
    )


_kinds: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sizes, Extents, Picked)}


def _kind(name: str) -> type[Any]:
    """The class of a name."""
    if name not in _kinds:
        _kinds.update((kind.__name__, kind) for kind in _derived(Op))
    if name not in _kinds:
        raise ArgumentError(
            message(
                "a recorded program calls an op that does not exist",
                expected="an op of this version of gradmesh, or a subclass of Op that was imported",
                got=repr(name),
                remedy="import the module that defines the op, or export the program again with this version",
            )
        )
    return _kinds[name]


def _derived(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _derived(each)


_decoded = BoundedCache()


def recalled(words: str, numbers: Sequence[int], group: str) -> Op:
    """As `decode`, of plain numbers and no tensors: the same object again for the same arguments in the same group."""
    key = (words, tuple(numbers), group)
    op: Op | None = _decoded.get(key)
    if op is None or op.axis.group is not resolve_group(group):
        op = _decoded[key] = decode(Encoded(words, list(numbers), [], group))
    return op
