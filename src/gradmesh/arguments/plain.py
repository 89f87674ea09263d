"""What arguments are, in their plain forms."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["explained", "integer", "kind_of"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def integer(value: object) -> int | None:
    """An int, or what Python takes for one (a NumPy integer, a tensor of one); None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def kind_of(x: object) -> str:
    """What something is, in words, that was handed in for an operand."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"a {'nested' if x.is_nested else 'quantized' if x.is_quantized else x.layout} tensor"


def explained(*names: str) -> Callable[[FunctionT], FunctionT]:
    """Let a call without these keyword arguments reach the function, which explains them better than Python does.

    They get the default None, of which type checkers know nothing: to them the arguments are owed.
    """

    def with_defaults(function: FunctionT) -> FunctionT:
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(names)}
        return function

    return with_defaults
