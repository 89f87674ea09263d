"""The exceptions of gradmesh, and the one place where their texts are built.

The tree::

    GradmeshError
    |-- NotInitializedError   RuntimeError   no process group yet; says to call gm.init()
    |-- AxisError             ValueError     no such axis, an ambiguous one, a group this rank is not in
    |-- ArgumentError         ValueError     dim, root, sizes, pairs, a pair of types: not what the op takes
    |   `-- ShapeError                       a tensor whose shape the op cannot split or join
    |-- DTypeError            TypeError      a dtype the op or the autodiff mode is not defined for
    |-- MismatchError         RuntimeError   the ranks called different collectives
    |-- DeadlockError         RuntimeError   ranks wait for something that cannot come
    |-- OrderError            RuntimeError   a chain of ordered collectives is not joined, or used after it was
    |-- TypeMismatchError     TypeError      types over the ranks do not fit: what gradmesh.typed(strict=True) finds
    |-- GradcheckError        AssertionError gradients of a program are not those of its objective; carries the report
    |-- RankError             RuntimeError   a launched rank failed; carries its rank and traceback
    |   `-- AbortedError                     this rank could not go on because another one failed
    |-- MissingExtraError     ImportError    an optional dependency is not installed
    `-- TorchVersionError     RuntimeError   this torch lacks a private name that the feature cannot do without

and two warnings: CheckWarning, of what may be right and mostly is not, and TorchWarning, where this torch lacks private
names; it says what happens instead.

Every class also derives from the builtin that PyTorch users would catch. A message always has the same
lines, so that it can be read at a glance and searched for::

    gradmesh.all_gather: dim is out of range
      axis      'gp', rank 2 of 4
      expected  -3 <= dim < 3 for a 3-d tensor
      got       dim=5
      remedy    count dimensions of the local tensor from 0, or from -1 at the end

Below it a traceback says how to read the page of the class, `gradmesh explain ArgumentError`, which is
docs/errors/ArgumentError.md: what raises it, in programs that run, what to do, and every text that it has.
"""

from __future__ import annotations

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
    """Build an error text: the op and the problem, then axis, expected, got and remedy, one a line.

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


def _note(kind: str) -> str:
    """Where the page of a class is: the command is there with the package, the file in a clone."""
    return f"  {'see':<9} gradmesh explain {kind}, or docs/errors/{kind}.md"


class GradmeshError(Exception):
    """Base of every error that gradmesh raises on purpose; its traceback ends with the page that explains it."""

    # A note, and no line of the text: what catches an error and shows it need not repeat it. It is the class's, since
    # compilers do not follow an `__init__` of an error.
    __notes__ = [_note("GradmeshError")]  # noqa: RUF012  changed on a copy alone

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if cls.__module__ == __name__:
            cls.__notes__ = [_note(cls.__name__)]

    def add_note(self, note: str, /) -> None:
        """Note something on this error alone."""
        if "__notes__" not in vars(self):
            self.__notes__ = list(type(self).__notes__)
        super().add_note(note)


class NotInitializedError(GradmeshError, RuntimeError):
    """There is no process group yet."""


class AxisError(GradmeshError, ValueError):
    """The axis argument names no axis, more than one, or one that this rank is not on."""


class ArgumentError(GradmeshError, ValueError):
    """An argument is not one that the op takes."""


class ShapeError(ArgumentError):
    """A tensor's shape cannot be split or joined as the op has to."""


class DTypeError(GradmeshError, TypeError):
    """The op, or the autodiff mode it is used in, is not defined for this dtype."""


class MismatchError(GradmeshError, RuntimeError):
    """The ranks of a group called different collectives, or the same one with shapes that do not fit."""


class DeadlockError(GradmeshError, RuntimeError):
    """Every rank waits, or has returned, so that nothing can come any more."""


class OrderError(GradmeshError, RuntimeError):
    """Collectives that have to run backward on every rank are not tied to a loss, or cannot be."""

    refused_wait = False
    """True if only the place of a wait is wrong: the call can still be waited for elsewhere."""


def refused_wait(text: str) -> OrderError:
    """The error of a wait in the wrong place."""
    error = OrderError(text)
    error.refused_wait = True
    return error


class TypeMismatchError(GradmeshError, TypeError):
    """What tensors are over the ranks of an axis does not fit what is done with them, or what was declared."""


class GradcheckError(GradmeshError, AssertionError):
    """The gradients of a program are not those of its objective, or of the same program on one process.

    Attributes:
        report: what was compared, and what was found; see `gradmesh.verify`.
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
    """This rank could not go on because another one failed. Never the first failure of a launch."""


class MissingExtraError(GradmeshError, ImportError):
    """An optional dependency is missing; the text says which extra brings it."""


class TorchVersionError(GradmeshError, RuntimeError):
    """The torch that is installed lacks a private name without which this feature cannot be had."""


class CheckWarning(UserWarning):
    """What `gradmesh.check("full")` found in values that ranks handed in, and that may be right."""


class TorchWarning(UserWarning):
    """The torch that is installed lacks private names that gradmesh relies on; given once, at import."""
