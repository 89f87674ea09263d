"""Which values of fixtures can be sent to ranks that are processes."""

from __future__ import annotations

from collections.abc import Mapping

from gradmesh.errors import ArgumentError, GradmeshError, message
from gradmesh.launch import pickling

__all__ = ["explain", "refuse_pytests_own"]

_OF_PYTEST = ("_pytest", "pytest")


def refuse_pytests_own(values: Mapping[str, object], backend: str) -> None:
    """Refuse values that would act on the rank's process in the place of pytest's.

    Args:
        values: by the names of the fixtures.
        backend: of the ranks.

    Raises:
        ArgumentError: there are such values; it names their fixtures.
    """
    _refuse({name: _acts_on_pytest(value) for name, value in values.items()}, backend)


def explain(values: Mapping[str, object], backend: str) -> None:
    """Say which values cannot be pickled.

    Args:
        values: by the names of the fixtures.
        backend: of the ranks.

    Raises:
        ArgumentError: there are such values; it names their fixtures.
    """
    _refuse({name: _cannot_be_pickled(value) for name, value in values.items()}, backend)


def _refuse(reasons: Mapping[str, str | None], backend: str) -> None:
    lost = {name: reason for name, reason in sorted(reasons.items()) if reason is not None}
    if lost:
        raise ArgumentError(
            message(
                f"the fixture{'s' * (len(lost) > 1)} {', '.join(lost)} cannot be sent to ranks that are processes",
                op="pytest",
                expected="values that can be pickled: tensors, modules, numbers, paths, and containers of them",
                got="\n".join(f"{name}: {reason}" for name, reason in lost.items()),
                remedy=f"make it in the test, or use threads: the ranks of this test are processes of {backend!r}",
            )
        )


def _acts_on_pytest(value: object) -> str | None:
    module = str(getattr(value, "__module__", ""))
    top = module.partition(".")[0]
    if top in _OF_PYTEST or (top.startswith("pytest_") and not isinstance(value, type)):
        return f"a {type(value).__name__} of {top}, which acts on the process of pytest"
    return None


def _cannot_be_pickled(value: object) -> str | None:
    try:
        pickling.dumps(value)
    except GradmeshError as error:
        first = error.__cause__ or error
        return str(first).partition("\n")[0]
    return None
