"""Names of dimensions in the call of a verb: which number a name means, and the names of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from gradmesh.dims import Names, show_names, with_names

__all__ = ["dim_number", "refuse_stale", "with_result_names"]


def dim_number(dim: str, name: str, names: Names | None, x: Tensor, fail: Callable[..., NoReturn]) -> int:
    """The number of the dimension that has a name.

    Args:
        dim: its name.
        name: the argument that it was given for.
        names: those that the operand has; None: it has none.
        x: the operand.
        fail: raises the verb's error.
    """
    given = f"{name}={dim!r} for shape {tuple(x.shape)}"
    if names is None:
        fail(
            "the operand's dimensions have no names",
            expected="an int, or a name of a tensor whose dimensions were named",
            got=given,
            remedy='name them: x = gradmesh.named(x, "N", "C"); what torch\'s operators make of a named\ntensor is '
            "another one, without names",
        )
    if dim not in names:
        fail(
            "no dimension has this name",
            expected=f"{name} one of {', '.join(repr(known) for known in names if known is not None)}",
            got=f"{given} with {show_names(names)}",
            remedy="take one of its names, or count dimensions from 0",
        )
    return names.index(dim)


def refuse_stale(names: Names, x: Tensor, fail: Callable[..., NoReturn]) -> NoReturn:
    """Refuse an operand whose dimensions may not be where they were named."""
    fail(
        "the tensor was given another shape in place since it was named",
        expected=f"{show_names(names)} where they were",
        got=f"shape {tuple(x.shape)} and strides {x.stride()}, which were others",
        remedy="name it again: x = gradmesh.named(x, ...)",
    )


def with_result_names(names: Names | None, then: Callable[[Tensor], Any] | None, y: Tensor) -> Any:
    """What a verb returns of its op's result, with names: dimensions stay where they are."""
    made = y if then is None else then(y)
    if names is None:
        return made
    return [with_names(one, names) for one in made] if isinstance(made, list) else with_names(made, names)
