"""`gradmesh audit`: resolves its targets, runs the audits, returns the exit status."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gradmesh.errors import ArgumentError, GradmeshError, message
from gradmesh.verify.auditing.audit import audit
from gradmesh.verify.auditing.report import shown

__all__ = ["FOUND", "NOT_RUN", "audit_command", "named"]

FOUND, NOT_RUN = 1, 2
"""Exit status: an audit is not `Audit.ok`; a target could not be audited."""


@contextlib.contextmanager
def _restored_sys_path() -> Iterator[None]:
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


@_restored_sys_path()
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
        targets: "module:function" or "file.py:function"; the `build` functions of `gradmesh.verify.audit`.
        arrow: the intended reading; None: any usual one.
        world_size: the number of ranks.
        backend: their backend.
        timeout: seconds for each call.
        kinds: the kinds to report; empty: all.
        isolate: whether thread ranks run in a separate process.
        gloo: whether to also test functions that call torch.distributed on processes with Gloo.
        as_json: whether to print one line of JSON per target instead of text.

    Returns:
        0 if every audit is `Audit.ok`, else `FOUND` or `NOT_RUN`.
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
        width = shutil.get_terminal_size((112, 24)).columns
        text = json.dumps({"target": target, **found.as_json()}) if as_json else shown(found, width)
        print(text, flush=True)
        status = max(status, 0 if found.ok else FOUND)
    return status


def named(target: str) -> Callable[..., Any]:
    """Import the function that "module:function" or "file.py:function" names.

    Raises:
        ArgumentError: it cannot be imported, or is not callable.
    """
    where, _, name = target.rpartition(":")
    try:
        found: Any = _from_file(Path(where).resolve()) if where.endswith(".py") else _import(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise _no_such(target, f"{type(error).__name__}: {error}") from error
    if not callable(found):
        raise _no_such(target, f"{name} is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _import(module: str) -> ModuleType:
    _look_in(os.getcwd())
    return importlib.import_module(module)


def _from_file(path: Path) -> ModuleType:
    """Import a file under its own name (numbered if taken), so that process ranks can import it by that name."""
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
        raise ImportError(f"{path} is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: str) -> None:
    """Append the folder to sys.path: last, so that its files cannot shadow modules that torch imports."""
    if folder not in sys.path:
        sys.path.append(folder)


def _no_such(target: str, got: str) -> ArgumentError:
    return ArgumentError(
        message(
            f"cannot import {target!r}",
            op="verify.audit",
            expected="module:function or file.py:function, e.g. mypackage.collectives:build; it returns (fn, inputs)",
            got=got,
            remedy="run the command in the folder that contains the module, or pass the file's path",
        )
    )
