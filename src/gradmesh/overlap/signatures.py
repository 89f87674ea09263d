"""Overloads of the verbs for type checkers: tuples, lists and dicts, and a `Pending` with `async_op=True`."""

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
    """A verb on a tensor, or on a tuple, list or dict of tensors."""

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
    """Add the overloads for tuples, lists and dicts; at run time this is the identity."""
    return cast("Verb[P]", verb)


class AsyncVerb(Protocol[P, Result]):
    """A verb that returns a result, or a `Pending` of it."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...
    @overload
    def __call__(self, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Result]: ...
    @overload
    def __call__(self, *args: Any, async_op: bool, **kwargs: Any) -> Result | Pending[Result]: ...


def async_verb(verb: Callable[P, Result]) -> AsyncVerb[P, Result]:
    """Add the overload for `async_op=True`; at run time this is the identity."""
    return cast("AsyncVerb[P, Result]", verb)
