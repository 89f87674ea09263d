"""Dimension names: attach names to a tensor's dimensions, which the verbs accept for `dim`.

Only the named tensor and the verbs' results have names. Results of torch's operators have none, so a name can be
missing but never moves to a different dimension.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from gradmesh._torch import compiling
from gradmesh.errors import ArgumentError

__all__ = ["DimLike", "Names", "known_names", "named", "names", "show_names", "stale", "with_names"]

DimLike = int | str
"""A dimension, by number or name."""

Names = tuple[str | None, ...]
"""A name or None for each dimension."""

RECORD = "_gradmesh_dims"
"""The attribute of a named tensor: its names, and its shape and strides when named; plain data, for pickle."""

TensorT = TypeVar("TensorT", bound=Tensor)


def named(x: TensorT, *names: str | None) -> TensorT:
    """Name the dimensions of a tensor; every verb then accepts a name for `dim`, and its result has the names too.

    ::

        x = gm.named(x, "N", "C")
        y = gm.all_gather(x, dim="N")        # the same as dim=0, and y has the names N and C

    Nothing is copied: the names are an attribute of the tensor. Results of torch's operators (a view, a sum, `x.t()`)
    have no names. Where the ranks' calls are compared, names are too.

    Args:
        x: the tensor.
        names: a different name, or None, for each dimension.

    Returns:
        `x`.

    Raises:
        ArgumentError: not one name for each dimension, a repeated name, one that is not an identifier, or a tensor that
            has other names already.

    Example:
        >>> def on_each_rank():
        ...     x = gm.named(torch.full((1, 2), 1.0 + gm.rank()), "N", "C")
        ...     y = gm.all_gather(x, dim="N")
        ...     return y.shape, gm.names(y)
        >>> gm.launch(on_each_rank, 2, backend="threads")[0]
        (torch.Size([2, 2]), ('N', 'C'))
    """
    if not isinstance(x, Tensor):
        raise _refused("the first argument must be a tensor", "a torch.Tensor", type(x).__name__)
    listed = tuple(names)
    if len(listed) != x.dim():
        raise _refused(
            "each dimension needs one name or None",
            f"{x.dim()} names for a {x.dim()}-d tensor, None for an unnamed dimension",
            f"{_listed(listed)} for shape {tuple(x.shape)}",
        )
    given = [name for name in listed if name is not None]
    if not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise _refused("names must be identifiers", "names such as 'N' or 'channels'", _listed(listed))
    if len(set(given)) != len(given):
        raise _refused("a name is used for two dimensions", "each name once", _listed(listed))
    known = known_names(x)
    if known is not None and known != listed and not stale(x):
        raise ArgumentError.of(
            "the tensor has other names already",
            op="named",
            expected=_listed(known),
            got=_listed(listed),
            remedy="name a view instead, gradmesh.named(x.view_as(x), ...), which shares the memory",
        )
    return with_names(x, listed)


def names(x: Tensor) -> Names:
    """The names of a tensor's dimensions; None for each that has none.

    Args:
        x: the tensor.

    Example:
        >>> x = gm.named(torch.zeros(2, 3), "N", None)
        >>> gm.names(x), gm.names(x + 1)
        (('N', None), (None, None))
    """
    known = known_names(x)
    return (None,) * x.dim() if known is None or stale(x) else known


def known_names(x: Any) -> Names | None:
    """The names of a tensor, even if it was changed since; None: it was not named."""
    record = getattr(x, RECORD, None)
    return None if record is None else record[0]


def stale(x: Tensor) -> bool:
    """Whether a named tensor's shape or strides were changed in place since, so that its dimensions may have moved."""
    if compiling():  # sizes may be symbolic
        return False
    _, shape, strides = getattr(x, RECORD)
    return shape is not None and (shape, strides) != (tuple(x.shape), x.stride())


def with_names(x: TensorT, given: Names | None) -> TensorT:
    """Set the names of a tensor with as many dimensions; without names, return it unchanged."""
    if given and x.dim() == len(given):
        plain = compiling()
        setattr(x, RECORD, (given, None, None) if plain else (given, tuple(x.shape), x.stride()))
    return x


def show_names(given: Names) -> str:
    """Names as text.

    >>> show_names(("N", None))
    'dims N, _'
    """
    return f"dims {', '.join('_' if name is None else name for name in given)}"


def _listed(given: tuple[object, ...]) -> str:
    return ", ".join(map(repr, given)) or "no names"


def _refused(problem: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError.of(
        problem,
        op="named",
        expected=expected,
        got=got,
        remedy='name each dimension once, as in gradmesh.named(x, "N", "C")',
    )
