"""What `same_as_single` would compare with nothing: values that one side alone has, and patterns that fit no name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from gradmesh.errors import ArgumentError, message
from gradmesh.verify.gradients.placements import Placement
from gradmesh.verify.gradients.training import Trained

__all__ = ["refuse_names_apart"]


def refuse_names_apart(
    single: Trained,
    ranks: Sequence[Trained],
    parameters: Mapping[str, Placement],
    outputs: Mapping[str, Placement],
) -> None:
    """Refuse what would be compared with nothing.

    Args:
        single: what the single process did.
        ranks: what each rank did.
        parameters: how parameters lie on the ranks.
        outputs: how values do.

    Raises:
        ArgumentError: a value is not on every side, or a pattern fits no name.
    """
    for number, step in enumerate(single.steps):
        for rank, each in enumerate(ranks):
            found = each.steps[number].values
            if set(found) != set(step.values):
                raise _error(
                    "the ranks and the single process return different values",
                    _listed(step.values) + " as on the single process",
                    f"{_listed(found)} on rank {rank} in step {number}",
                    "return the same names from both functions, on every rank",
                )
    values = {name for step in single.steps for name in step.values}
    names = {name for step in single.steps for name in step.parameters}
    for argument, patterns, there in (("parameters", parameters, names), ("outputs", outputs, values)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in there):
                raise _error(
                    f"a pattern of {argument} fits no name",
                    f"one of {_listed(there)}",
                    repr(pattern),
                    "write the name that it has on the single process, or take the pattern away",
                )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _error(problem: str, expected: str, got: str, remedy: str) -> ArgumentError:
    return ArgumentError(
        message(problem, op="verify.same_as_single", expected=expected, got=got, remedy=remedy)
    )
