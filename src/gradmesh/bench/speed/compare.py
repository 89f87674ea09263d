"""Two runs against each other: what has become slower."""

from __future__ import annotations

from dataclasses import dataclass

from gradmesh.bench.speed.results import Key, Results
from gradmesh.bench.speed.tasks import said
from gradmesh.errors import ArgumentError, message

__all__ = ["Change", "changes", "other_machine"]


@dataclass(frozen=True)
class Change:
    """A cell of both runs.

    Attributes:
        key: which.
        contender: who was timed.
        old: seconds of a call before.
        new: seconds of a call after.
    """

    key: Key
    contender: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes now."""
        return self.new / self.old

    def __str__(self) -> str:
        ranks, verb, way, size = self.key
        times = f"{1e6 * self.old:.1f} us before, {1e6 * self.new:.1f} us now"
        return f"{self.contender}, {verb} {way}, {ranks} ranks, {said(size)}: {self.ratio:.2f} times, {times}"


def changes(old: Results, new: Results) -> list[Change]:
    """The cells that both runs have.

    Raises:
        ArgumentError: there are none.
    """
    common = [at for at in new.table if at in old.table]
    if not common:
        raise ArgumentError(
            message(
                "the two runs have no cell in common",
                op="compare",
                expected="the same ranks, verbs, sizes and systems in both, at least in part",
                got=f"{_extent(old)}\nand {_extent(new)}",
                remedy="measure with the same options of `gradmesh bench`",
            )
        )
    return [Change(*at, old.table[at].median, new.table[at].median) for at in common]


def _extent(results: Results) -> str:
    return f"ranks {results.ranks}, verbs {results.verbs}, sizes {results.sizes}, {results.contenders}"


def other_machine(old: Results, new: Results) -> list[str]:
    """What is different about the machines of the two runs and their software."""
    names = dict.fromkeys([*old.machine, *new.machine])
    pairs = [(name, old.machine.get(name, "none"), new.machine.get(name, "none")) for name in names]
    return [f"{name}: {before} before, {after} now" for name, before, after in pairs if before != after]
