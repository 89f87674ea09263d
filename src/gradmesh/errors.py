"""The exceptions of gradmesh, and `message`, which builds their texts.

The hierarchy::

    GradmeshError
    |-- NotInitializedError   RuntimeError   no process group; call gm.init() first
    |-- AxisError             ValueError     unknown or ambiguous axis, or a group that this rank is not in
    |-- ArgumentError         ValueError     invalid argument: dim, root, sizes, pairs, types
    |   `-- ShapeError                       a tensor whose shape the op cannot split or concatenate
    |-- DTypeError            TypeError      a dtype the op or the autodiff mode is not defined for
    |-- MismatchError         RuntimeError   the ranks called different collectives
    |-- DeadlockError         RuntimeError   every rank waits for a message that no rank will send
    |-- OrderError            RuntimeError   misuse of ordered(), async_op, no_sync() or forward mode
    |-- TypeMismatchError     TypeError      inconsistent types over the ranks, found by gradmesh.typed(strict=True)
    |-- GradcheckError        AssertionError wrong gradients of a program; carries the report
    |-- RankError             RuntimeError   a launched rank failed; carries its rank and traceback
    |   `-- AbortedError                     this rank stopped because another rank failed
    |-- MissingExtraError     ImportError    an optional dependency is not installed
    `-- TorchVersionError     RuntimeError   this torch lacks a private name that the feature requires

and two warnings: CheckWarning, for likely errors found by `gradmesh.check("full")`, and TorchWarning, where this torch
lacks private names; its text states the fallback.

Every class also derives from the builtin exception that PyTorch users would catch. Every message has the same lines::

    gradmesh.all_gather: dim is out of range
      axis      'gp', rank 2 of 4
      expected  -3 <= dim < 3 for a 3-d tensor
      got       dim=5
      remedy    pass dim=0 for the first or dim=-1 for the last dimension of the local tensor

A note in the traceback names the page of the class, docs/errors/ArgumentError.md, which `gradmesh explain
ArgumentError` prints: example programs that raise the error, what to do, and all its texts.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "AbortedError",
    "ArgumentError",
    "AxisError",
    "CheckWarning",
    "DTypeError",
    "DeadlockError",
    "GradcheckError",
    "GradmeshError",
    "MismatchError",
    "MissingExtraError",
    "NotInitializedError",
    "OrderError",
    "RankError",
    "ShapeError",
    "TorchVersionError",
    "TorchWarning",
    "TypeMismatchError",
    "message",
    "refused_wait",
]


def message(
    problem: str,
    *,
    op: str | None = None,
    axis: str | None = None,
    expected: str | None = None,
    got: str | None = None,
    remedy: str | None = None,
) -> str:
    """Build an error text: the op and the problem, then axis, expected, got and remedy, one per line.

    >>> print(message("root is out of range", op="broadcast", expected="0 <= root < 4", got="root=7"))
    gradmesh.broadcast: root is out of range
      expected  0 <= root < 4
      got       root=7
    """
    lines = [f"gradmesh.{op}: {problem}" if op else f"gradmesh: {problem}"]
    for label, text in (("axis", axis), ("expected", expected), ("got", got), ("remedy", remedy)):
        if text is not None:
            lines.append(f"  {label:<9} " + text.replace("\n", "\n" + " " * 12))
    return "\n".join(lines)


class _Notes:
    """An error's notes, a list of its own, to which Python too adds: first the page that explains the error's class."""

    def __get__(self, error: GradmeshError | None, kind: type[GradmeshError]) -> list[str]:
        name = next(each.__name__ for each in kind.__mro__ if each.__module__ == __name__)
        notes = [f"  {'see':<9} gradmesh explain {name}, or docs/errors/{name}.md"]
        return notes if error is None else vars(error).setdefault("__notes__", notes)


class GradmeshError(Exception):
    """Base class of all gradmesh errors; the traceback ends with the page that explains the error."""

    # A note, so that str(error) stays short; on the class, because compilers do not trace `__init__` of an error.
    __notes__ = _Notes()

    @classmethod
    def of(
        cls,
        problem: str,
        *,
        op: str | None = None,
        axis: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
    ) -> Self:
        """The error with the text that `message` builds of these parts."""
        return cls(message(problem, op=op, axis=axis, expected=expected, got=got, remedy=remedy))


class NotInitializedError(GradmeshError, RuntimeError):
    """The process group is not initialized."""


class AxisError(GradmeshError, ValueError):
    """The axis argument matches no axis, several axes, or one that this rank is not on."""


class ArgumentError(GradmeshError, ValueError):
    """An argument has an invalid value."""


class ShapeError(ArgumentError):
    """A tensor has a shape that the op cannot split or concatenate."""


class DTypeError(GradmeshError, TypeError):
    """The op, or the autodiff mode it is used in, does not support this dtype."""


class MismatchError(GradmeshError, RuntimeError):
    """The ranks of a group called different collectives, or the same one with shapes that do not match."""


class DeadlockError(GradmeshError, RuntimeError):
    """Every rank waits or has returned, so that no rank can continue."""


class OrderError(GradmeshError, RuntimeError):
    """Collectives cannot run, or cannot run backward, in the same order on every rank."""

    refused_wait = False
    """True if only the place of a wait is wrong: the call can still be waited for elsewhere."""


def refused_wait(text: str) -> OrderError:
    """The error of a wait in the wrong place."""
    error = OrderError(text)
    error.refused_wait = True
    return error


class TypeMismatchError(GradmeshError, TypeError):
    """A tensor's type over the ranks of an axis contradicts its use or its declaration."""


class GradcheckError(GradmeshError, AssertionError):
    """The gradients of a program differ from those of its objective, or of the same program on one process.

    Attributes:
        report: the comparison and its findings; see `gradmesh.verify`.
    """

    def __init__(self, text: str, report: object = None) -> None:
        super().__init__(text)
        self.report = report


class RankError(GradmeshError, RuntimeError):
    """A launched rank failed.

    Attributes:
        rank: the first rank that failed, or None when the launch as a whole timed out.
        rank_traceback: the traceback on that rank, as text.
    """

    def __init__(self, text: str, *, rank: int | None = None, rank_traceback: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.rank_traceback = rank_traceback


class AbortedError(RankError):
    """This rank stopped because another rank failed. Never the first failure of a launch."""


class MissingExtraError(GradmeshError, ImportError):
    """An optional dependency is missing; the text names the extra that installs it."""


class TorchVersionError(GradmeshError, RuntimeError):
    """The installed torch lacks a private name that this feature requires."""


class CheckWarning(UserWarning):
    """A likely error that `gradmesh.check("full")` found in the values that ranks passed."""


class TorchWarning(UserWarning):
    """The installed torch lacks private names that gradmesh uses; issued once, at import."""
