"""The settings of optimizers, such as the learning rate: their values at a step, and the lines that set them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from gradmesh.checker.recording.recorder import Recorder
from gradmesh.checker.recording.tape import Plateau, Settings

__all__ = ["Optimizers"]

_OF_THE_CODE = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that select an implementation and not a result."""
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr"}
"""What schedulers keep in a group and compute the rate from."""


class Optimizers:
    """The optimizers of a rank, with the lines that made them and that changed their settings.

    Args:
        recorder: gives the lines; its tape takes the values that a `ReduceLROnPlateau` is given.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._to = recorder
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._made: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._scheduled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._plateaus: WeakKeyDictionary[Any, Plateau] = WeakKeyDictionary()
        self._nested = 0

    def number(self, optimizer: Optimizer) -> int:
        """A number that stands for the optimizer on the tape: they are counted as they are made."""
        return self._numbers.setdefault(optimizer, len(self._numbers))

    def settings(self, optimizer: Optimizer) -> list[Settings]:
        """The settings of each parameter of an optimizer, in the order of its groups."""
        known = (set(getattr(optimizer, "defaults", ())) | _OF_SCHEDULERS) - _OF_THE_CODE
        made, scheduled = self._made.get(optimizer, -1), self._scheduled.get(optimizer, -1)
        found = []
        for group in optimizer.param_groups:
            values = {key: _numbers(group[key]) for key in sorted(known.intersection(group))}
            own = Settings({key: x for key, x in values.items() if x is not None}, made, scheduled)
            found += [own] * len(group["params"])
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Replace the methods of torch that make and schedule optimizers, so that their lines are recorded."""
        made, plateau = Optimizer.__init__, lr_scheduler.ReduceLROnPlateau.__init__
        steps = [(kind, kind.__dict__["step"]) for kind in _schedulers() if "step" in kind.__dict__]
        Optimizer.__init__ = self._makes(made)  # type: ignore[method-assign]
        lr_scheduler.ReduceLROnPlateau.__init__ = self._makes_plateau(plateau)  # type: ignore[method-assign]
        for kind, step in steps:
            kind.step = self._schedules(step)
        try:
            yield
        finally:
            Optimizer.__init__ = made  # type: ignore[method-assign]
            lr_scheduler.ReduceLROnPlateau.__init__ = plateau  # type: ignore[method-assign]
            for kind, step in steps:
                kind.step = step

    def _makes(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self._to.quiet:
                self.number(optimizer)
                self._made[optimizer] = self._to.site()
            original(optimizer, *args, **kwargs)

        return init

    def _makes_plateau(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(scheduler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self._to.quiet:
                made = Plateau(self.number(optimizer), self._to.site())
                self._plateaus[scheduler] = made
                self._to.tape.plateaus.append(made)
            original(scheduler, optimizer, *args, **kwargs)

        return init

    def _schedules(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(scheduler, "optimizer", None)
            if not self._to.quiet and isinstance(optimizer, Optimizer):
                self._scheduled[optimizer] = self._to.site()
            plateau = self._plateaus.get(scheduler)
            if plateau is not None and not self._to.quiet:
                given = args[0] if args else kwargs.get("metrics")
                with contextlib.suppress(TypeError, ValueError, RuntimeError), self._to.unseen():
                    plateau.given.append((float(given), self._to.site()))  # type: ignore[arg-type]
            return original(scheduler, *args, **kwargs)

        return step


def _schedulers() -> list[Any]:
    """The schedulers of torch and of the program, as far as they are defined."""
    found: list[Any] = [lr_scheduler.LRScheduler]
    for kind in found:
        found += [sub for sub in kind.__subclasses__() if sub not in found]
    return found


def _numbers(value: Any) -> tuple[float, ...] | None:
    """A setting as numbers; None if it is anything else."""
    if isinstance(value, Tensor):
        return (float(value),) if value.numel() == 1 and not _is_empty(value) else None
    if isinstance(value, (int, float)):
        return (float(value),)
    if isinstance(value, (list, tuple)) and value:
        parts = [_numbers(each) for each in value]
        return tuple(x for part in parts if part for x in part) if all(parts) else None
    return None


def _is_empty(x: Tensor) -> bool:
    return x.device == torch.device("meta")
