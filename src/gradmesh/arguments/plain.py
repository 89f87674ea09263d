"""Normalise arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["integer", "kind_of", "verb"]


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


def verb(*required: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The implementation of a verb, whose overloads declare the types.

    Args:
        required: keyword arguments that get a default of None at run time, so that the verb can raise its own error.
    """

    def with_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
        if required:
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(required)}
        return function

    return with_defaults
