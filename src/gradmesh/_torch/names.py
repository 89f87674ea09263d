"""Looks up private names of torch; missing ones are reported in one warning with their fallbacks."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import warnings
from typing import Any, NoReturn

import torch

from gradmesh.errors import TorchVersionError, TorchWarning, message

__all__ = ["RELIED_ON", "SUPPORTED", "calls", "find", "gone", "refuse", "there", "warn_of_what_is_gone"]

SUPPORTED = "torch 2.11 to 2.15"

RELIED_ON: dict[str, str] = {}
"""Every private name that was looked up, and the fallback without it."""

gone: list[str] = []
"""The names that this torch lacks."""


def find(path: str, *, without: str) -> Any:
    """The object with a dotted name, or None if this torch lacks it.

    Args:
        path: the name, starting with `torch`.
        without: the fallback if the name is missing, for the warning.

    >>> find("torch._C._len_torch_dispatch_stack", without="more work")()
    0
    """
    RELIED_ON.setdefault(path, without)
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        gone.append(path)
        return None


def there(path: str, *, without: str) -> bool:
    """Whether this torch has a name whose value changes, so that it must be read at every use."""
    find(path, without=without)
    return path not in gone


def calls(path: str, name: str, *, without: str) -> bool:
    """Whether a function of torch still reads `name` from its module, so that the name can be replaced there."""
    relation = f"{path} asking for {name}"
    RELIED_ON[relation] = without
    try:
        asks = name in pkgutil.resolve_name(path).__code__.co_names
    except (ImportError, AttributeError):
        asks = False
    if not asks:
        gone.append(relation)
    return asks


def warn_of_what_is_gone() -> None:
    """Issue one warning with the missing names and their fallbacks.

    Of several ranks on a host only one process warns: the launcher, or local rank 0.
    """
    one_of_many = multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0"
    if not gone or one_of_many:
        return
    warnings.warn(
        message(
            f"torch {torch.__version__} lacks private names that gradmesh uses",
            expected=f"{SUPPORTED}, which are tested",
            got="\n".join(f"missing {path}: {RELIED_ON[path]}" for path in gone),
            remedy="install one of these versions, e.g. pip install torch==2.13.*; everything else works",
        ),
        TorchWarning,
        stacklevel=2,
    )


def refuse(what: str, *paths: str) -> NoReturn:
    """Raise the error for a feature that this torch does not support.

    Args:
        what: the feature.
        paths: the names it needs; only missing ones are listed.

    Raises:
        TorchVersionError: always.
    """
    missing = [path for path in paths if path in gone]
    raise TorchVersionError(
        message(
            f"{what} is not supported by torch {torch.__version__}",
            expected=SUPPORTED,
            got="missing private names: " + ", ".join(missing),
            remedy="install one of these versions, e.g. pip install torch==2.13.*",
        )
    )
