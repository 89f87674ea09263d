"""The environment variables that gradmesh reads: all of them, and what each may be.

A variable is read when it is first needed, and kept. One that is not usable is an error there and then, with the
variable's name; importing gradmesh reads none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gradmesh.errors import ArgumentError, message

__all__ = ["CHECK", "CHECK_LEVELS", "RECYCLE", "SHM_CHUNK", "TRACEBACK", "VARIABLES", "Variable", "table"]

T = TypeVar("T")


@dataclass
class Variable(Generic[T]):
    """An environment variable.

    Attributes:
        name: its name.
        default: the text that stands for it when it is not set.
        expected: what it may be, for the error and the docs.
        meaning: what it does, for the docs.
        parse: makes the value of a text; raises ValueError for one that is not usable.
    """

    name: str
    default: str
    expected: str
    meaning: str
    parse: Callable[[str], T]
    _kept: list[T] = field(default_factory=list, init=False, repr=False)

    def value(self) -> T:
        """The value, read from the environment at the first call.

        Raises:
            ArgumentError: the text is not usable.
        """
        if not self._kept:
            self._kept.append(self.read())
        return self._kept[0]

    def read(self) -> T:
        """The value that the environment has now.

        Raises:
            ArgumentError: the text is not usable.
        """
        text = os.environ.get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError:
            raise ArgumentError(
                message(
                    f"{self.name} is not usable",
                    expected=self.expected,
                    got=f"{self.name}={text!r}",
                    remedy="unset it, or set it to what is expected",
                )
            ) from None

    def forget(self) -> None:
        """Read it anew at the next call."""
        self._kept.clear()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


CHECK_LEVELS = {"0": 0, "1": 1, "full": 2}
"""How much is compared, by what GRADMESH_CHECK says."""


def _level(text: str) -> int:
    if text not in CHECK_LEVELS:
        raise ValueError(text)
    return CHECK_LEVELS[text]


_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 26


def _chunk(text: str) -> int:
    size = _count(text)
    if not _SMALLEST_CHUNK <= size <= _LARGEST_CHUNK or size & (size - 1):
        raise ValueError(text)
    return size


CHECK = Variable(
    "GRADMESH_CHECK",
    default="1",
    expected="0, 1 or full",
    meaning="what is compared before anything is sent: 1 the ranks' calls, full what they hand in too, 0 nothing; the "
    "same on every rank (see gradmesh.check)",
    parse=_level,
)
RECYCLE = Variable(
    "GRADMESH_RECYCLE",
    default="512",
    expected="a number of MiB, 0 or more",
    meaning="MiB of memory of large results that may be kept for later ones; 0 turns recycling off",
    parse=lambda text: _count(text) << 20,
)
SHM_CHUNK = Variable(
    "GRADMESH_SHM_CHUNK",
    default=str(1 << 20),
    expected=f"a power of two between {_SMALLEST_CHUNK} and {_LARGEST_CHUNK}",
    meaning="bytes of a message that a rank of the shm backend hands on at once; rank 0's counts",
    parse=_chunk,
)
TRACEBACK = Variable(
    "GRADMESH_TRACEBACK",
    default="short",
    expected="short or full",
    meaning="the traceback of an uncaught error of gradmesh: short shows the frames of the program alone, full those "
    "inside of gradmesh and torch too",
    parse=("short", "full").index,
)

VARIABLES: tuple[Variable[int], ...] = (CHECK, RECYCLE, SHM_CHUNK, TRACEBACK)


def table() -> str:
    """The variables as a Markdown table, for the docs."""
    lines = ["| variable | by default | may be | what it does |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.default} | {v.expected} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(lines)
