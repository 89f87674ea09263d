"""All environment variables that gradmesh reads, and the optional dependencies with the extras that install them.

A variable is read and cached when it is first needed; an invalid value raises then. Importing gradmesh reads none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from gradmesh.errors import ArgumentError, MissingExtraError

T = TypeVar("T")


@dataclass
class Variable(Generic[T]):
    """An environment variable."""

    name: str
    default: str  # the text that is used if it is not set
    expected: str  # the valid values, for the error and the docs
    meaning: str  # what it does, for the docs
    parse: Callable[[str], T]  # converts the text to a value; raises ValueError for an invalid one
    kept: list[T] = field(default_factory=list, init=False, repr=False)  # the value, once it was read

    def value(self) -> T:
        """The value, read from the environment at the first call.

        Raises:
            ArgumentError: the value is invalid.
        """
        if not self.kept:
            self.kept.append(self.read())
        return self.kept[0]

    def read(self) -> T:
        """The value, read from the environment now.

        Raises:
            ArgumentError: the value is invalid.
        """
        text = os.environ.get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError:
            raise ArgumentError.of(
                f"invalid value of the environment variable {self.name}",
                expected=self.expected,
                got=f"{self.name}={text!r}",
                remedy=f"unset it, or set it to its default: export {self.name}={self.default}",
            ) from None

    def forget(self) -> None:
        """Clear the cached value."""
        self.kept.clear()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


CHECK_LEVELS = {"0": 0, "1": 1, "deferred": 3, "full": 2}
"""The check levels, by value of GRADMESH_CHECK."""


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


def _word(text: str) -> str:
    if len(text.split()) > 1:
        raise ValueError(text)
    return text.strip()


CHECK = Variable(
    "GRADMESH_CHECK",
    default="1",
    expected="0, 1, deferred or full",
    meaning="what the ranks compare before anything is sent: 1 their calls, full their values too, 0 nothing; with "
    "deferred their calls, afterwards; has to be the same on every rank (see gradmesh.check)",
    parse=_level,
)
HANG = Variable(
    "GRADMESH_HANG",
    default="0",
    expected="a number of seconds, 0 or more",
    meaning="for the deferred check: seconds after which ranks that wait for a rank which makes no call raise, even if "
    "that rank may still run; 0: only if it cannot continue, which is found in about a second",
    parse=_count,
)
HOST = Variable(
    "GRADMESH_HOST",
    default="",
    expected="a name without spaces",
    meaning="for the hosts backend: the host that this rank is on, the same for ranks that share memory; by default "
    "the name of the machine with its PID and network namespaces",
    parse=_word,
)
RECYCLE = Variable(
    "GRADMESH_RECYCLE",
    default="512",
    expected="a number of MiB, 0 or more",
    meaning="limit in MiB for idle memory of large results that is kept for reuse; 0 turns recycling off",
    parse=lambda text: _count(text) << 20,
)
SHM_CHUNK = Variable(
    "GRADMESH_SHM_CHUNK",
    default=str(1 << 20),
    expected=f"a power of two between {_SMALLEST_CHUNK} and {_LARGEST_CHUNK}",
    meaning="chunk size in bytes of messages of the shm backend; the value on rank 0 is used",
    parse=_chunk,
)
SHM_NATIVE = Variable(
    "GRADMESH_SHM_NATIVE",
    default="1",
    expected="0 or 1",
    meaning="whether the shm backend uses its data path in C, if the installation has it; ranks may differ",
    parse=("0", "1").index,
)
TRACEBACK = Variable(
    "GRADMESH_TRACEBACK",
    default="short",
    expected="short or full",
    meaning="the traceback of an uncaught error of gradmesh: short shows the frames of the program alone, full those "
    "inside of gradmesh and torch too",
    parse=("short", "full").index,
)

VARIABLES: tuple[Variable[Any], ...] = (CHECK, HANG, HOST, RECYCLE, SHM_CHUNK, SHM_NATIVE, TRACEBACK)


def table() -> str:
    """The variables as a Markdown table, for the docs."""
    lines = ["| variable | default | values | meaning |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.default} | {v.expected} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(lines)


EXTRAS = {
    "cli": ("click", "rich"),
    "demo": ("click", "rich", "matplotlib", "numpy", "sklearn"),
    "forces": ("click", "rich", "matplotlib", "numpy", "ase", "e3nn", "matscipy"),
    "metis": ("pymetis",),
    "mpi": ("mpi4py",),
    "notebook": ("cloudpickle",),
}
"""The modules that each extra installs, by import name."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed; none is imported."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def require(extra: str, who: str) -> None:
    """Raise if an extra that `who` needs is not installed.

    Raises:
        MissingExtraError: it is not installed.
    """
    if absent := missing(extra):
        raise MissingExtraError.of(
            "an optional dependency is not installed",
            op=who,
            expected=", ".join(EXTRAS[extra]),
            got="not installed: " + ", ".join(absent),
            remedy=f"pip install 'gradmesh[{extra}]'",
        )
