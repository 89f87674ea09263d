"""What was measured: cells, memory, and what was left out; to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.benchmark import Measurement
from torch.utils.benchmark.utils.common import TaskSpec

from benchmarks.speed.tasks import said
from gradmesh.errors import ArgumentError, message

__all__ = ["Cell", "Key", "Memory", "Results", "loaded"]

_FORMAT = 1


class Key(NamedTuple):
    """Which cell: everything but who was timed."""

    ranks: int
    verb: str
    way: str
    size: int


@dataclass(frozen=True)
class Cell:
    """A contender at one task, one way.

    Attributes:
        ranks: how many.
        verb: its name.
        way: "forward" or "backward".
        size: bytes of a rank's part.
        contender: who was timed.
        number: how many calls there are in a sample.
        samples: seconds of each sample on its slowest rank, one for each round.
    """

    ranks: int
    verb: str
    way: str
    size: int
    contender: str
    number: int
    samples: tuple[float, ...]

    @property
    def key(self) -> Key:
        """The table cell of the measurement, for any system."""
        return Key(self.ranks, self.verb, self.way, self.size)

    @cached_property
    def measurement(self) -> Measurement:
        """The samples as torch keeps them: a table for each verb, way and number of ranks, a column for each size."""
        spec = TaskSpec(
            stmt="call()",
            setup="",
            label=f"{self.verb} {self.way}, {self.ranks} ranks",
            sub_label=self.contender,
            description=said(self.size),
        )
        return Measurement(self.number, list(self.samples), spec)

    @property
    def median(self) -> float:
        """Seconds of a call."""
        return self.measurement.median

    @property
    def times(self) -> list[float]:
        """Seconds of a call, round by round."""
        return self.measurement.times


@dataclass(frozen=True)
class Memory:
    """What a rank needs at most for a forward and a backward, results included.

    Attributes:
        ranks: how many.
        verb: its name.
        size: bytes of a rank's part.
        contender: who was weighed.
        bytes: the largest growth of a rank's process.
        output: bytes of the result.
    """

    ranks: int
    verb: str
    size: int
    contender: str
    bytes: int
    output: int


@dataclass(frozen=True)
class Results:
    """A run.

    Attributes:
        machine: what it ran on, by what each is called.
        command: how it was asked for.
        settings: what it was asked to do.
        cells: what was timed.
        memory: what was weighed.
        left_out: who was not timed, or not all of it, and why.
    """

    machine: dict[str, str]
    command: str
    settings: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @cached_property
    def table(self) -> dict[tuple[Key, str], Cell]:
        """The cells, by which and who."""
        return {(cell.key, cell.contender): cell for cell in self.cells}

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks."""
        return list(dict.fromkeys(cell.ranks for cell in self.cells))

    @property
    def verbs(self) -> list[str]:
        """The verbs' names."""
        return list(dict.fromkeys(cell.verb for cell in self.cells))

    @property
    def sizes(self) -> list[int]:
        """The sizes, ascending."""
        return sorted({cell.size for cell in self.cells})

    @property
    def contenders(self) -> list[str]:
        """Who was timed."""
        return list(dict.fromkeys(cell.contender for cell in self.cells))

    def median(self, key: Key, contender: str) -> float | None:
        """Seconds of a call, if it was timed."""
        cell = self.table.get((key, contender))
        return None if cell is None else cell.median

    def keys(
        self,
        *,
        ranks: Sequence[int] | None = None,
        verbs: Sequence[str] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Iterator[Key]:
        """Which cells there are, of those numbers of ranks, verbs and sizes."""
        for key in dict.fromkeys(cell.key for cell in self.cells):
            given = ((ranks, key.ranks), (verbs, key.verb), (sizes, key.size))
            if all(of is None or value in of for of, value in given):
                yield key

    def ratio(self, key: Key, contender: str, other: str) -> float | None:
        """How many times as long as the other it takes."""
        mine, theirs = self.median(key, contender), self.median(key, other)
        return None if mine is None or theirs is None else mine / theirs

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        cells = [
            {**asdict(cell), "median": cell.median, "iqr": cell.measurement.iqr, "unit": "s"}
            for cell in self.cells
        ]
        return {
            "format": _FORMAT,
            "machine": self.machine,
            "command": self.command,
            "settings": self.settings,
            "left_out": self.left_out,
            "cells": cells,
            "memory": [asdict(memory) for memory in self.memory],
        }


def loaded(path: Path) -> Results:
    """The results that a file holds.

    Raises:
        ArgumentError: it holds none.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        cells = [
            Cell(**{name: each[name] for name in Cell.__annotations__} | {"samples": tuple(each["samples"])})
            for each in data["cells"]
        ]
        memory = [Memory(**each) for each in data["memory"]]
        return Results(data["machine"], data["command"], data["settings"], cells, memory, data["left_out"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            message(
                "this file holds no results",
                expected=f"what `benchmarks.speed --json` writes, format {_FORMAT}",
                got=f"{path}: {type(error).__name__}: {error}",
                remedy="measure anew with `python -m benchmarks.speed --json PATH`",
            )
        ) from error
