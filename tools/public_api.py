"""Every public name with its arguments, which is what a release promises.

$ python -m tools.report tests/public_api.txt
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tools.pages import show

ROOTS = ("gradmesh", "gradmesh.nn", "gradmesh.verify", "gradmesh.testing", "gradmesh.compat")


def lines() -> list[str]:
    """A line for each name: where it is, and how it is called."""
    return sorted({line for root in ROOTS for line in _of(importlib.import_module(root))})


def _of(module: ModuleType) -> list[str]:
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            found += _of(value)
            continue
        found.append(f"{module.__name__}.{name}{_called(value)}")
        if inspect.isclass(value):
            found += [
                f"{module.__name__}.{name}.{method}{_called(function)}"
                for method, function in vars(value).items()
                if not method.startswith("_") and inspect.isfunction(function)
            ]
    return found


def _called(value: object) -> str:
    """Its arguments, without types, which differ from one Python to another; nothing for what is not called."""
    if not callable(value):
        return ""
    if isinstance(value, enum.EnumType):  # its signature depends on Python
        return "(value)"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    return str(inspect.Signature([_bare(one) for one in signature.parameters.values()]))


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    plain = default is inspect.Parameter.empty or type(default) in (bool, int, float, str, tuple, type(None))
    return parameter.replace(annotation=inspect.Parameter.empty, default=default if plain else ...)


def main(arguments: Sequence[str] = (), into: Path | None = None) -> int:
    """Write or print them."""
    show("\n".join(lines()) + "\n", into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
