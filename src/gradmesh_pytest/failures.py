"""Information that is attached to an error raised on a rank."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradmesh_pytest.per_rank import Subtest

__all__ = ["Attached", "attach", "place"]

_NAME = "_gradmesh_pytest"


@dataclasses.dataclass
class Attached:
    """Information that is sent with an error, as an attribute, to the pytest process.

    Attributes:
        kind: the name of its class.
        place: the file and line where it was raised.
        shown: pytest's representation, created on the rank because frames cannot be pickled; None: frames are present.
        subtests: the subtests of the function that raised it.
    """

    kind: str = ""
    place: tuple[str, int] = ("", 0)
    shown: Any = None
    subtests: list[Subtest] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException | None) -> Attached:
        """The information attached to an error, or derived from its frames."""
        found = getattr(error, _NAME, None)
        if isinstance(found, cls) and found.kind:
            return found
        if error is None:
            return cls()
        subtests = found.subtests if isinstance(found, cls) else []
        return cls(type(error).__name__, place(error), None, subtests)


def attach(error: BaseException, what: Attached) -> None:
    """Attach information to an error."""
    setattr(error, _NAME, what)


def place(error: BaseException) -> tuple[str, int]:
    """The file and line where an error was raised."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
