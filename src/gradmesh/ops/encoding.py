"""Encode an op as arguments of an operator of torch's dispatcher, and decode it.

An op is a value of dataclasses, tuples, numbers, strings and dtypes. Numbers are encoded separately, since they may be
symbolic (dynamic sizes). The axis is encoded as the name of its process group, so that the arguments are the same on
every rank.
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
        words: the names of its classes and dtypes, and placeholders for numbers and tensors, in order.
        numbers: its numbers, in order.
        tensors: its tensors, in order.
        group: the name of the process group.
    """

    words: str
    numbers: list[int]
    tensors: list[Tensor]
    group: str


_END = "\x1f"
"""Separator of words; torch.jit.trace does not support lists of str."""
_NUMBER, _TENSOR, _TEXT, _DTYPE, _TUPLE = "#", "@", "'", "torch.", "("
_NONE = ""
"""The group name of an axis of one rank, which has no group."""
_CONSTANTS = {"None": None, "True": True, "False": False}


def encode(op: Op) -> Encoded:
    """Encode an op."""
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
    """The fields that the constructor takes."""
    return [field.name for field in fields(kind) if field.init]


def decode(code: Encoded) -> Op:
    """Decode an op on the calling rank."""
    group = None if code.group == _NONE else resolve_group(code.group)
    if group is None:
        return decoded_on(code, 0, 1, None)
    return decoded_on(code, group.rank(), group.size(), group)


def decoded_on(code: Encoded, rank: int, size: int, group: ProcessGroup | None) -> Op:
    """Decode an op on a rank of an axis; without a group it cannot be applied."""
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
    """The class with a name."""
    if name not in _kinds:
        _kinds.update((kind.__name__, kind) for kind in _derived(Op))
    if name not in _kinds:
        raise ArgumentError(
            message(
                f"the exported program calls an unknown op, {name}",
                expected="an op of this version of gradmesh, or an imported subclass of Op",
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
    """As `decode`, cached, for plain numbers and no tensors."""
    key = (words, tuple(numbers), group)
    op: Op | None = _decoded.get(key)
    if op is None or op.axis.group is not resolve_group(group):
        op = _decoded[key] = decode(Encoded(words, list(numbers), [], group))
    return op
