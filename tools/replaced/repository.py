"""A repository whose functions are compared, and how its files are imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tools.replaced.cases import Case, World
from tools.replaced.own_tests import Tests
from tools.replaced.sources import Replaced, Source


@dataclass(frozen=True)
class Repository:
    """A repository.

    Attributes:
        name: what the command takes.
        source: where it comes from.
        files: what is replaced.
        load: imports what is called, from a folder.
        cases: the functions that are compared.
        tests: its own tests on CPUs, if there are any.
        prepare: sets up groups on a rank, before the call; of a rank outside of the group, without ranks.
        left: what is left to do by hand, or differs.
        packages: what the files need besides the environment.
    """

    name: str
    source: Source
    files: tuple[Replaced, ...]
    load: Callable[[Path], Any]
    cases: tuple[Case, ...]
    tests: Tests | None = None
    prepare: Callable[[Any, World | None], None] | None = None
    left: str = ""
    packages: tuple[str, ...] = ()


def imported(name: str) -> Callable[[Path], Any]:
    """Import a module by its name, from the folder."""

    def load(root: Path) -> Any:
        module = importlib.import_module(name)
        assert Path(str(module.__file__)).is_relative_to(root), f"{module.__file__} is not below {root}"
        return module

    return load


def alone(root: Path, path: str, name: str, **given: Any) -> Any:
    """A file as the module `name`, without its package; modules that it imports are given, by names with dots."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:n]), _package(".".join(parts[:n])))
    for key, value in given.items():
        module = sys.modules.setdefault(key, _package(key))
        vars(module).update(vars(value) if isinstance(value, ModuleType | SimpleNamespace) else value)
    spec = importlib.util.spec_from_file_location(name, root / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _package(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    return module
