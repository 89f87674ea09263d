"""Dimension names in verb calls: look up a name, and name the result."""

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
        name: the argument that it was passed for.
        names: the names of the operand's dimensions; None: it has none.
        x: the operand.
        fail: raises the verb's error.
    """
    given = f"{name}={dim!r} for shape {tuple(x.shape)}"
    if names is None:
        fail(
            f"{name} is a name, but the operand's dimensions have no names",
            expected=f"an int, such as {name}=0, or a tensor named with gradmesh.named",
            got=given,
            remedy='name them: x = gradmesh.named(x, "N", "C"); results of torch operators have no names, so name\n'
            "the tensor right before the call",
        )
    if dim not in names:
        fail(
            f"no dimension is named {dim!r}",
            expected=f"{name} one of {', '.join(repr(known) for known in names if known is not None)}",
            got=f"{given} with {show_names(names)}",
            remedy=f"pass one of its names, or an int such as {name}=0",
        )
    return names.index(dim)


def refuse_stale(names: Names, x: Tensor, fail: Callable[..., NoReturn]) -> NoReturn:
    """Raise for an operand whose dimensions may have moved since they were named."""
    fail(
        "the tensor's shape or strides were changed in place after it was named",
        expected=f"{show_names(names)} with the shape and strides that it had",
        got=f"shape {tuple(x.shape)} and strides {x.stride()}",
        remedy='name it again: x = gradmesh.named(x, "N", "C")',
    )


def with_result_names(names: Names | None, then: Callable[[Tensor], Any] | None, y: Tensor) -> Any:
    """A verb's return value with the operand's dimension names."""
    made = y if then is None else then(y)
    if names is None:
        return made
    return [with_names(one, names) for one in made] if isinstance(made, list) else with_names(made, names)
