"""The register of torch's private names that gradmesh uses.

A name that a feature cannot do without is `required`: if torch lacks it, calls of that feature raise TorchVersionError.
For any other name the register states what is different without it. One warning at import lists all missing names.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import warnings
from typing import Any, NoReturn

import torch

from gradmesh.errors import TorchVersionError, TorchWarning, message

SUPPORTED = "torch 2.9 to 2.15"

RELIED_ON: dict[str, str] = {}
"""Every private name that was looked up, and the consequence if it is missing."""

RELIED_ON_LATER: dict[str, str] = {}
"""The same for attributes of objects, and for modules that importing gradmesh does not load: looked up when used."""

gone: list[str] = []
"""The names that this torch lacks."""


def find(path: str, *, without: str) -> Any:
    """The object with a dotted name, or None if this torch lacks it; `without` says what follows, for the warning.

    >>> find("torch._C._len_torch_dispatch_stack", without="more work")()
    0
    """
    RELIED_ON.setdefault(path, without)
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        gone.append(path)
        return None


class Missing:
    """Stands for a required function or class that torch lacks: using it raises TorchVersionError."""

    def __init__(self, what: str, path: str) -> None:
        self._what, self._path = what, path

    def __call__(self, *_: object, **__: object) -> NoReturn:
        refuse(self._what, self._path)

    def __instancecheck__(self, _: object) -> NoReturn:
        refuse(self._what, self._path)


def required(path: str, what: str) -> Any:
    """The object with a dotted name; if this torch lacks it, an object that raises TorchVersionError when used.

    `what` is the feature that needs it, here and below.
    """
    found = find(path, without=f"{what} raises an error")
    return Missing(what, path) if found is None else found


def getter(path: str, what: str) -> Any:
    """A function that reads a private property of a class; `required` says what happens without it."""
    found = required(path, what)
    return getattr(found, "__get__", found)


class Attribute:
    """A private attribute of objects of torch; an object that lacks it raises TorchVersionError.

    Its path begins with the class, or with what the object is.
    """

    def __init__(self, path: str, what: str) -> None:
        RELIED_ON_LATER[path] = f"{what} raises an error"
        self._path, self._what, self._name = path, what, path.rpartition(".")[2]

    def of(self, owner: object, *default: object) -> Any:
        """Its value, or the default if one is passed."""
        if default:
            return getattr(owner, self._name, *default)
        try:
            return getattr(owner, self._name)
        except AttributeError:
            gone.append(self._path)
            refuse(self._what, self._path)


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
    """Issue one warning with the missing names and the consequences.

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
    """Raise the error for a feature that this torch does not support; of the names it needs, missing ones are listed.

    Raises:
        TorchVersionError: always.
    """
    missing = [path for path in paths if path in gone]
    raise TorchVersionError.of(
        f"{what} is not supported by torch {torch.__version__}",
        expected=SUPPORTED,
        got="missing private names: " + ", ".join(missing),
        remedy="install one of these versions, e.g. pip install torch==2.13.*",
    )
