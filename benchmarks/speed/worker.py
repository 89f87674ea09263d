"""What a rank does between two requests of the parent: the same on processes, on threads and under MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.peak import peak
from benchmarks.speed.calls import Calls, Place
from benchmarks.speed.contenders import Contender
from benchmarks.speed.tasks import WAYS, Task, cotangent, operand

__all__ = ["Worker"]


class Worker:
    """A rank at work.

    Args:
        rank: which one.
        contenders: who is timed here.
        groups: the process group of each backend, or MPI's communicator.
        barrier: waits for the other ranks.
    """

    def __init__(
        self,
        rank: int,
        contenders: Sequence[Contender],
        groups: Mapping[str, Any],
        barrier: Callable[[], object],
    ) -> None:
        self._rank = rank
        self._contenders = {contender.name: contender for contender in contenders}
        self._groups = groups
        self._barrier = barrier
        self._places: dict[str, Place] = {}
        self._calls: dict[str, Calls] = {}

    def prepare(self, task: Task, names: Sequence[str]) -> None:
        """Lay the operands and the calls of a task out, in place of those of the last one."""
        self._places, self._calls = {}, {}
        x, back = operand(task, self._rank), cotangent(task, self._rank)
        for name in names:
            contender = self._contenders[name]
            place = Place(task, self._rank, self._groups.get(contender.backend), x, back)
            self._places[name], self._calls[name] = place, contender.makers[task.verb](place)

    def check(self, task: Task, names: Sequence[str]) -> dict[tuple[str, str], Tensor | str]:
        """Each contender's result both ways, or the error that it raised instead."""
        found: dict[tuple[str, str], Tensor | str] = {}
        for name in names:
            for way in WAYS:
                try:
                    self.prepare(task, [name])
                    result: Tensor = getattr(self._calls[name], way)()
                    found[name, way] = result.detach().clone()
                except Exception as error:
                    first = str(error).splitlines()[:1] or [""]
                    found[name, way] = f"{type(error).__name__}: {first[0]}"
        return found

    def sample(self, way: str, numbers: Mapping[str, int]) -> dict[str, float]:
        """The seconds of so many calls of each contender, one contender after another.

        torch's Timer calls each at least twice before it starts the clock, so that the ranks are in step by then.
        """
        found = {}
        for name, number in numbers.items():
            timer = Timer("call()", globals={"call": getattr(self._calls[name], way)})
            self._barrier()
            found[name] = timer.timeit(number).raw_times[0]
        return found

    def memory(self, name: str) -> int:
        """The bytes by which the process grows at most over one forward and backward, its results included."""
        place = self._places[name]
        self._calls.pop(name)

        def both() -> object:
            self._calls[name] = self._contenders[name].makers[place.task.verb](place)
            return self._calls[name].both()

        return peak(both, self._barrier)
