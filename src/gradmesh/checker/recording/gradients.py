"""Which tensor is the gradient of which parameter, while backward, averaging and clipping go on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["Gradients", "gradient_of", "is_multiple"]


class Gradients:
    """Where the gradients of parameters are in memory; empty until a backward has ended.

    Args:
        parameters: those there are, each with its name.
    """

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._parameters = parameters
        self._at: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self._sought = False

    def find(self) -> None:
        """Look where they are, after a backward."""
        self._sought = True
        self._at = {}
        for name, p in self._parameters():
            gradient = gradient_of(p)
            if gradient is not None:
                self._at[_begin(gradient)] = name, weakref.ref(p)

    def forget(self) -> None:
        """A step is over."""
        self._at, self._sought = {}, False

    def name_at(self, x: Tensor) -> str | None:
        """The parameter whose gradient a tensor is; None for another tensor.

        Programs replace gradients, and memory that one has left is used again: what is found is looked at once more,
        and what is not found is sought.
        """
        if not self._sought or x.requires_grad:
            return None
        at = _begin(x)
        if not self._is_there(at):
            self.find()
        return self._at[at][0] if at in self._at and at else None

    def _is_there(self, at: int) -> bool:
        entry = self._at.get(at)
        p = None if entry is None else entry[1]()
        gradient = None if p is None else gradient_of(p)
        return gradient is not None and _begin(gradient) == at


def gradient_of(p: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    gradient: Any = p.grad
    return None if gradient is None else getattr(gradient, "_local_tensor", gradient)


def is_multiple(x: Tensor, of: Tensor) -> bool:
    """Whether a tensor is a number times another one, but for rounding."""
    a, b = x.detach().flatten().double(), of.detach().flatten().double()
    return bool((a @ b).abs() > (1 - 1e-5) * a.norm() * b.norm())


def _begin(x: Tensor) -> int:
    """Where a tensor itself begins; several may share a memory."""
    try:
        return x.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
