"""What a verb gives, told to type checkers: a structure for a structure, and a `Pending` with `async_op=True`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from torch import Tensor

from gradmesh.overlap.pending import Pending
from gradmesh.structure import Tree

__all__ = ["AsyncVerb", "Verb", "async_verb", "pytree_verb"]

StructureT = TypeVar("StructureT", bound=Sequence[Tree] | Mapping[Any, Tree])
P = ParamSpec("P")
Result = TypeVar("Result")


class Verb(Protocol[P]):
    """A verb that takes a tensor and gives one, or takes a structure of tensors and gives one like it."""

    __name__: str

    @overload
    def __call__(self, x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, x: StructureT, *args: P.args, **kwargs: P.kwargs) -> StructureT: ...
    @overload
    def __call__(self, x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
    @overload
    def __call__(
        self, x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any
    ) -> Pending[StructureT]: ...
    @overload
    def __call__(self, x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...


def pytree_verb(verb: Callable[Concatenate[Tensor, P], Tensor]) -> Verb[P]:
    """Tell type checkers that a verb takes structures too; when the program runs, this is the verb itself."""
    return cast("Verb[P]", verb)


class AsyncVerb(Protocol[P, Result]):
    """A verb that gives something, or a `Pending` of it."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...
    @overload
    def __call__(self, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Result]: ...
    @overload
    def __call__(self, *args: Any, async_op: bool, **kwargs: Any) -> Result | Pending[Result]: ...


def async_verb(verb: Callable[P, Result]) -> AsyncVerb[P, Result]:
    """Tell type checkers what a verb gives with `async_op=True`; when the program runs, this is the verb itself."""
    return cast("AsyncVerb[P, Result]", verb)
