"""Names of a tensor's dimensions, kept beside it, by which the verbs find the one that they are asked for.

They belong to the one tensor that was named and to what the verbs make of it. torch's operators know nothing of them:
what they make has no names, so that a name can be missing and never stand at another dimension.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from gradmesh._torch import compiling
from gradmesh.errors import ArgumentError, message

__all__ = ["DimLike", "Names", "known_names", "named", "names", "show_names", "stale", "with_names"]

DimLike = int | str
"""A dimension by its number or by its name."""

Names = tuple[str | None, ...]
"""A name for each dimension; None: it has none."""

_RECORD = "_gradmesh_dims"
"""The attribute of a named tensor: its names, and the shape and strides that it had; plain data, as it is pickled."""

TensorT = TypeVar("TensorT", bound=Tensor)


def named(x: TensorT, *names: str | None) -> TensorT:
    """Name the dimensions of a tensor, once; every verb then takes a name for `dim`, and its result has names again.

    ::

        x = gm.named(x, "N", "C")
        y = gm.all_gather(x, dim="N")        # the same as dim=0, and y has the names N and C

    Nothing is copied: it is the tensor itself, with a record beside it. What torch's operators make of it (a view, a
    sum, `x.t()`) is another tensor, which has no names until it is given some. Where the ranks' calls are compared,
    their names are too.

    Args:
        x: the tensor.
        names: a name for each dimension, each once; None for one that needs none.

    Returns:
        `x`.

    Raises:
        ArgumentError: not one name for each dimension, a name twice or one that is no identifier, or a tensor that has
            other names already.

    Example:
        >>> def on_each_rank():
        ...     x = gm.named(torch.full((1, 2), 1.0 + gm.rank()), "N", "C")
        ...     y = gm.all_gather(x, dim="N")
        ...     return y.shape, gm.names(y)
        >>> gm.launch(on_each_rank, 2, backend="threads")[0]
        (torch.Size([2, 2]), ('N', 'C'))
    """
    if not isinstance(x, Tensor):
        raise _refused("what is to be named is not a tensor", "a torch.Tensor", type(x).__name__)
    listed = tuple(names)
    if len(listed) != x.dim():
        raise _refused(
            "there is not one name for each dimension",
            f"{x.dim()} names for a {x.dim()}-d tensor, None for a dimension that needs none",
            f"{_listed(listed)} for shape {tuple(x.shape)}",
        )
    given = [name for name in listed if name is not None]
    if not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise _refused("a name is not an identifier", "names such as 'N' or 'channels'", _listed(listed))
    if len(set(given)) != len(given):
        raise _refused("a name stands at two dimensions", "each name once", _listed(listed))
    known = known_names(x)
    if known is not None and known != listed and not stale(x):
        raise ArgumentError(
            message(
                "the tensor has other names already",
                op="named",
                expected=_listed(known),
                got=_listed(listed),
                remedy="give a tensor its names once; x.view_as(x) is one without any, on the same memory",
            )
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
    """The names that a tensor was given, maybe before it was changed; None: it was given none."""
    record = getattr(x, _RECORD, None)
    return None if record is None else record[0]


def stale(x: Tensor) -> bool:
    """Whether a named tensor was given another shape in place since, by which its dimensions may have moved."""
    if compiling():  # where sizes may have no numbers
        return False
    _, shape, strides = getattr(x, _RECORD)
    return shape is not None and (shape, strides) != (tuple(x.shape), x.stride())


def with_names(x: TensorT, given: Names | None) -> TensorT:
    """Note the names of a tensor that has as many dimensions; where there are none to note, it stays as it is."""
    if given and x.dim() == len(given):
        plain = compiling()
        setattr(x, _RECORD, (given, None, None) if plain else (given, tuple(x.shape), x.stride()))
    return x


def show_names(given: Names) -> str:
    """Names in words.

    >>> said(("N", None))
    'dims N, _'
    """
    return f"dims {', '.join('_' if name is None else name for name in given)}"


def _listed(given: tuple[object, ...]) -> str:
    return ", ".join(map(repr, given)) or "no names"


def _refused(problem: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        message(
            problem,
            op="named",
            expected=expected,
            got=got,
            remedy='name each dimension once, as in gradmesh.named(x, "N", "C")',
        )
    )
