"""Parameters of tests that are tried in the sweep only, where others of their kind are tried each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def seldom(values: Iterable[Any], each_time: Collection[Any]) -> list[Any]:
    """The values as parameters; `slow` marks those that are not in `each_time`."""
    values = list(values)
    missing = [value for value in each_time if value not in values]
    assert not missing, f"no parameters: {missing}"
    return [pytest.param(value, marks=() if value in each_time else pytest.mark.slow) for value in values]
