"""What a backward or a hook of the program makes of a gradient: its operators, so that they can be run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradmesh._torch.dispatched import WeakTensors, is_random
from gradmesh.checker.recording.numbering import mapped
from gradmesh.checker.recording.tape import Back, Op, ProgramInput
from gradmesh.type_inference.operators import tensors_in

__all__ = ["Writing"]


class Writing:
    """A backward that is running, and the tape of it.

    Args:
        number: gives a new number.
        met: the gradients that it was given.
    """

    def __init__(self, number: Callable[[], int], met: Sequence[Tensor | None]) -> None:
        self.back = Back([], [None if x is None else x.detach().clone() for x in met], [], [])
        self._next = number
        self._known: Any = WeakTensors()
        self._kept: list[Tensor] = []
        self.back.ins = [None if x is None else self._number(x) for x in met]

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and write it down where it works on the gradients or on what was made of them."""
        given = list(tensors_in((args, kwargs)))
        if not any(x in self._known for x in given):
            return func(*args, **kwargs)
        if is_random(func):
            self.back.repeats = self.back.repeats and not any(x in self._known for x in tensors_in(args[:1]))
            return func(*args, **kwargs)  # what was drawn is data
        taken = mapped(args, self._ref), mapped(kwargs, self._ref)
        result = func(*args, **kwargs)
        outs = [self._number(x) for x in tensors_in(result)]
        self.back.ops.append(Op(str(func), *taken, outs, -1, None))
        return result

    def ended(self, gave: Sequence[Tensor | None]) -> Back:
        """The tape, with what the backward returned."""
        self.back.gave = [None if x is None else x.detach().clone() for x in gave]
        self.back.outs = [None if x is None else self._ref(x) for x in gave]
        return self.back

    def _number(self, x: Tensor) -> int:
        known: int | None = self._known.get(x)
        if known is None:
            known = self._known[x] = self._next()
            self._kept.append(x)
        return known

    def _ref(self, x: Tensor) -> int:
        known: int | None = self._known.get(x)
        if known is None:
            known = self._number(x)
            self.back.ops.append(ProgramInput(known, x.detach().clone()))
        return known
