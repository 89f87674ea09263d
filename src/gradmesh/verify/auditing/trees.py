"""The tensors in what a function takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["replaced", "tensors"]


def tensors(x: Any) -> list[Tensor]:
    """The tensors in tuples, lists, mappings, dataclasses and iterators, in the order in which they stand there."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = list(x.values())
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        x = [getattr(x, field.name) for field in dataclasses.fields(x)]
    return [y for part in x for y in tensors(part)] if isinstance(x, tuple | list | Iterator) else []


def replaced(x: Any, others: Iterator[Tensor]) -> Any:
    """The tuple, list or dict with other tensors for its own; a part that holds none stays what it is."""
    if isinstance(x, Tensor):
        return next(others)
    if not isinstance(x, tuple | list | dict) or not tensors(x):
        return x
    if isinstance(x, dict):
        return {key: replaced(value, others) for key, value in x.items()}
    values = [replaced(value, others) for value in x]
    if isinstance(x, list):
        return values
    return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
