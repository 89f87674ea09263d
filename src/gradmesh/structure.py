"""Tuples, lists and dicts of tensors, as verbs take them: their tensors by name, and the same structure of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from torch import Tensor

from gradmesh.errors import ArgumentError, message

if TYPE_CHECKING:
    from gradmesh.overlap.pending import Pending

__all__ = [
    "Begins",
    "Packed",
    "Tree",
    "Verb",
    "begins",
    "is_structure",
    "leaves",
    "rebuilt",
    "takes_structures",
]

Tree = Tensor | Sequence["Tree"] | Mapping[Any, "Tree"]
"""A tensor, or a structure of them."""

StructureT = TypeVar("StructureT", bound=Sequence[Tree] | Mapping[Any, Tree])
P = ParamSpec("P")
Result = TypeVar("Result")


class Verb(Protocol[P]):
    """A verb that takes a tensor and gives one, or takes a structure of tensors and gives one like it."""

    __name__: str

    # P has async_op too; who passes True means these.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any
    ) -> Pending[Tensor]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any
    ) -> Pending[StructureT]: ...
    @overload
    def __call__(self, x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, x: StructureT, *args: P.args, **kwargs: P.kwargs) -> StructureT: ...


def takes_structures(verb: Callable[Concatenate[Tensor, P], Tensor]) -> Verb[P]:
    """Tell type checkers that a verb takes structures too; when the program runs, this is the verb itself."""
    return cast("Verb[P]", verb)


class Begins(Protocol[P, Result]):
    """A verb that gives something, or a `Pending` of it."""

    __name__: str

    @overload
    def __call__(self, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Result]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


def begins(verb: Callable[P, Result]) -> Begins[P, Result]:
    """Tell type checkers what a verb gives with `async_op=True`; when the program runs, this is the verb itself."""
    return cast("Begins[P, Result]", verb)


@dataclass(frozen=True)
class Packed:
    """Several tensors as one, in the place of an operand.

    Attributes:
        flat: their elements, one after another.
        made_of: what they are, in words, for the ranks to compare.
    """

    flat: Tensor
    made_of: str


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
