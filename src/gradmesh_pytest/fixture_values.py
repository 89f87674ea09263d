"""Checks whether fixture values can be sent to process ranks."""

from __future__ import annotations

from collections.abc import Mapping

from gradmesh.errors import ArgumentError, GradmeshError, message
from gradmesh.launch import pickling

__all__ = ["check_no_pytest_objects", "check_picklable"]

_OF_PYTEST = ("_pytest", "pytest")


def check_no_pytest_objects(values: Mapping[str, object], backend: str) -> None:
    """Raise for values that would act on the rank's process instead of pytest's, such as `monkeypatch`.

    Args:
        values: the values by fixture name.
        backend: the backend of the ranks.

    Raises:
        ArgumentError: there are such values; the message names their fixtures.
    """
    _refuse({name: _pytest_object(value) for name, value in values.items()}, backend)


def check_picklable(values: Mapping[str, object], backend: str) -> None:
    """Raise for values that cannot be pickled.

    Args:
        values: the values by fixture name.
        backend: the backend of the ranks.

    Raises:
        ArgumentError: there are such values; the message names their fixtures.
    """
    _refuse({name: _cannot_be_pickled(value) for name, value in values.items()}, backend)


def _refuse(reasons: Mapping[str, str | None], backend: str) -> None:
    lost = {name: reason for name, reason in sorted(reasons.items()) if reason is not None}
    if lost:
        raise ArgumentError(
            message(
                f"the fixture{'s' * (len(lost) > 1)} {', '.join(lost)} cannot be sent to process ranks",
                op="pytest",
                expected="values that can be pickled: tensors, modules, numbers, paths, and containers of them",
                got="\n".join(f"{name}: {reason}" for name, reason in lost.items()),
                remedy=f"create the value inside the test, or use backend='threads' instead of {backend!r}",
            )
        )


def _pytest_object(value: object) -> str | None:
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
