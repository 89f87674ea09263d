"""Functions of the main script by name: a rank imports the script as `multiprocessing` does, under another name.

This needs a script that launches ranks under `if __name__ == "__main__":` alone, so that importing it has no effect.
"""

from __future__ import annotations

import ast
import functools
import runpy
import sys
import types
from pathlib import Path

__all__ = ["find", "importable", "load"]

_NAME = "__mp_main__"
"""The name that `multiprocessing` gives to the main module in a child, and adds in the parent."""


def importable() -> str | None:
    """The path of the main script, if it has the guard that makes importing it harmless; else None."""
    file: str | None = getattr(sys.modules["__main__"], "__file__", None)
    try:
        if file is None:
            return None
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    if not any(isinstance(node, ast.If) and _guards(node.test) for node in tree.body):
        return None
    return str(Path(file).resolve())


def _guards(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def find(module: types.ModuleType, name: str) -> object:
    """What a qualified name is in a module; None where there is nothing of that name."""
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        return None


def load(script: str, name: str) -> object:
    """What a qualified name is in a script, which is run once in this process."""
    module = sys.modules.get(_NAME)
    if module is None or getattr(module, "__file__", None) != script:
        module = types.ModuleType(_NAME)
        sys.modules[_NAME] = sys.modules["__main__"] = module
        module.__dict__.update(runpy.run_path(script, run_name=_NAME))
    return find(module, name)
