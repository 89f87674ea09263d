"""`gradmesh audit`: what its arguments name, and what its exit status says."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gradmesh.errors import ArgumentError, GradmeshError, message
from gradmesh.verify.auditing.audit import audit

__all__ = ["FOUND", "NOT_RUN", "audit_command", "named"]

FOUND, NOT_RUN = 1, 2
"""Exit status: something was found; something could not be audited."""


@contextlib.contextmanager
def _searched_as_before() -> Iterator[None]:
    """Search for modules afterwards where they were searched for before."""
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


@_searched_as_before()
def audit_command(
    targets: Sequence[str],
    arrow: str | None,
    world_size: int,
    backend: str,
    timeout: float,
    kinds: Sequence[str],
    isolate: bool,
    gloo: bool,
    as_json: bool,
) -> int:
    """Audit each function, print what was found, and return the exit status.

    Args:
        targets: "module:function", or "file.py:function", of functions as `gradmesh.verify.audit` takes them.
        arrow: the reading that is meant; None: any usual one.
        world_size: the number of ranks.
        backend: what they run on.
        timeout: seconds for each question.
        kinds: the kinds to look for; all if there are none.
        isolate: whether ranks that are threads get a process of their own.
        gloo: whether what calls torch.distributed is also tried on processes with Gloo.
        as_json: whether to print a line of JSON for each instead of text.

    Returns:
        0 where nothing was found, `FOUND`, or `NOT_RUN`.
    """
    status = 0
    for target in targets:
        try:
            found = audit(
                named(target),
                arrow=arrow,
                world_size=world_size,
                backend=backend,
                kinds=kinds or None,
                timeout=timeout,
                isolate=isolate,
                gloo=gloo,
            )
        except GradmeshError as error:
            print(
                json.dumps({"target": target, "error": str(error)}) if as_json else f"{target}: {error}",
                file=None if as_json else sys.stderr,
            )
            status = NOT_RUN
            continue
        print(json.dumps({"target": target, **found.as_json()}) if as_json else found, flush=True)
        status = max(status, 0 if found.ok else FOUND)
    return status


def named(target: str) -> Callable[..., Any]:
    """The function that a "module:function" or "file.py:function" names.

    Raises:
        ArgumentError: there is none.
    """
    where, _, name = target.rpartition(":")
    try:
        found: Any = _from_file(Path(where).resolve()) if where.endswith(".py") else _by_name(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise _no_such(target, f"{type(error).__name__}: {error}") from error
    if not callable(found):
        raise _no_such(target, f"{name} is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _by_name(module: str) -> ModuleType:
    _look_in(os.getcwd())
    return importlib.import_module(module)


def _from_file(path: Path) -> ModuleType:
    """The module in a file, under the file's name where no other module has that, as ranks that are processes ask."""
    _look_in(str(path.parent))
    name = path.stem
    for number in itertools.count(1):
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"{path.stem}_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no file of Python code")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: str) -> None:
    """Find a file's neighbours, last: ranks that are processes look in the same folders, for torch's modules too."""
    if folder not in sys.path:
        sys.path.append(folder)


def _no_such(target: str, got: str) -> ArgumentError:
    return ArgumentError(
        message(
            f"{target!r} names no function",
            op="verify.audit",
            expected="module:function or file.py:function; the function returns (fn, inputs)",
            got=got,
            remedy="run the command where Python finds the module",
        )
    )
