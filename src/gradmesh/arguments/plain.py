"""Normalise arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["explained", "integer", "kind_of"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def integer(value: object) -> int | None:
    """The value as an int, also of a NumPy integer or a tensor of one int; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def kind_of(x: object) -> str:
    """Describe an invalid operand for error messages."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"a {'nested' if x.is_nested else 'quantized' if x.is_quantized else x.layout} tensor"


def explained(*names: str) -> Callable[[FunctionT], FunctionT]:
    """Give required keyword arguments a runtime default of None, so that the function can raise its own error.

    Type checkers still treat them as required.
    """

    def with_defaults(function: FunctionT) -> FunctionT:
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(names)}
        return function

    return with_defaults
