"""What is known of an error that was raised on a rank, beside the error itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradmesh_pytest.per_rank import Subtest

__all__ = ["Attached", "attach", "place"]

_NAME = "_gradmesh_pytest"


@dataclasses.dataclass
class Attached:
    """What goes with an error, as an attribute of it, to the process of pytest.

    Attributes:
        kind: the name of its class.
        place: the file and the line where it was raised.
        shown: how pytest shows it, made on the rank, whose frames do not travel; None: the frames are here.
        subtests: the subtests of the function that it ended.
    """

    kind: str = ""
    place: tuple[str, int] = ("", 0)
    shown: Any = None
    subtests: list[Subtest] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException | None) -> Attached:
        """What is attached to an error, or what its frames tell."""
        found = getattr(error, _NAME, None)
        if isinstance(found, cls) and found.kind:
            return found
        if error is None:
            return cls()
        subtests = found.subtests if isinstance(found, cls) else []
        return cls(type(error).__name__, place(error), None, subtests)


def attach(error: BaseException, what: Attached) -> None:
    """Let something go with an error."""
    setattr(error, _NAME, what)


def place(error: BaseException) -> tuple[str, int]:
    """The file and the line where an error was raised."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
