"""Look up private names of torch; what a torch lacks is told once, with what happens instead."""

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
"""Every private name that was looked up, and what happens without it."""

gone: list[str] = []
"""Those of them that this torch does not have."""


def find(path: str, *, without: str) -> Any:
    """The object of a dotted name, or None where this torch does not have it.

    Args:
        path: the name, from `torch` on.
        without: what happens where the name is gone, for the warning.

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
    """Whether this torch has a name whose value changes, so that it has to be read at every use."""
    find(path, without=without)
    return path not in gone


def calls(path: str, name: str, *, without: str) -> bool:
    """Whether a function of torch still asks its module for `name`, so that the name can be replaced there."""
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
    """Tell the user once, in one warning, which names are gone and what happens instead.

    Of several ranks on a machine, one process says it: that which launched the others, or torchrun's first.
    """
    one_of_many = multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0"
    if not gone or one_of_many:
        return
    warnings.warn(
        message(
            f"torch {torch.__version__} lacks private names that gradmesh relies on",
            expected=f"{SUPPORTED}, which have been tried",
            got="\n".join(f"no {path}: {RELIED_ON[path]}" for path in gone),
            remedy="what is not named here works as ever; install one of the versions above for all of it",
        ),
        TorchWarning,
        stacklevel=2,
    )


def refuse(what: str, *paths: str) -> NoReturn:
    """Raise the error of a feature that this torch cannot have.

    Args:
        what: the feature, as the beginning of a sentence.
        paths: the names it needs; those that are there are left out of the text.

    Raises:
        TorchVersionError: always.
    """
    missing = [path for path in paths if path in gone]
    raise TorchVersionError(
        message(
            f"{what}: torch {torch.__version__} lacks what it needs",
            expected=SUPPORTED,
            got="no " + ", no ".join(missing),
            remedy="install one of these versions",
        )
    )
