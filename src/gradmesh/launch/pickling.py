"""Pickling for another Python process: by name if it can import that name, else by value."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import pickle
import sys
import types
from typing import Any, NamedTuple

from gradmesh.errors import MissingExtraError
from gradmesh.launch import main_script, pickle_by_value

__all__ = ["Pickled", "dumps", "dumps_result", "importable"]


class Pickled(NamedTuple):
    """A pickle, and the origin of functions that it contains by value."""

    data: bytes
    origin: pickle_by_value.Origin | None = None


class _ByValue(Exception):  # noqa: N818 - a signal, caught here
    """The other process cannot import the definition of an object."""


class _ByName(pickle.Pickler):
    """A pickler that raises `_ByValue` for functions and classes that a fresh interpreter cannot import."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type | types.FunctionType) and not importable(obj.__module__):
            raise _ByValue(obj.__module__)
        return NotImplemented


class _OfScript(_ByName):
    """A pickler that takes functions and classes of the main script by name, for a process that imports the script.

    Args:
        buffer: what to write to.
        script: the path of the script.
    """

    def __init__(self, buffer: io.BytesIO, script: str) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._script = script

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            if main_script.find(sys.modules["__main__"], obj.__qualname__) is obj:
                return main_script.load, (self._script, obj.__qualname__)
            raise _ByValue("__main__")
        return super().reducer_override(obj)


def importable(name: str | None) -> bool:
    """Whether a fresh interpreter with this process's `sys.path` would import the loaded module.

    >>> importable("torch.nn.functional"), importable("__main__")
    (True, False)
    """
    module = sys.modules.get(name or "")
    if module is None or name is None or name == "__main__":
        return False
    if name.partition(".")[0] in sys.stdlib_module_names:  # os.path has a different name, os is frozen
        return True
    parent = name.rpartition(".")[0]
    if parent and not importable(parent):
        return False
    file = getattr(module, "__file__", None)
    if parent and file in (None, getattr(sys.modules[parent], "__file__", None)):
        return True  # created by an extension module when that is imported
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    for finder in sys.meta_path:
        spec: importlib.machinery.ModuleSpec | None = finder.find_spec(name, path)
        if spec is not None:
            return file == spec.origin
    return False


def dumps(obj: object) -> Pickled:
    """Pickle a call for a fresh interpreter with this process's `sys.path`.

    Functions and classes are pickled by name if possible; those of modules that the other process cannot import are
    pickled by value with cloudpickle.

    Raises:
        MissingExtraError: it must be pickled by value, and cloudpickle is not installed.
        ArgumentError: it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _ByName(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except _ByValue as error:
        try:
            return Pickled(
                *pickle_by_value.dumps(obj, importable, reason=f"something from the module {error}")
            )
        except MissingExtraError:
            script = main_script.importable()
            if script is None:
                raise
        buffer = io.BytesIO()
        try:
            _OfScript(buffer, script).dump(obj)
        except (_ByValue, pickle.PicklingError, AttributeError, TypeError):
            return Pickled(
                *pickle_by_value.dumps(obj, importable, reason=f"something from the module {error}")
            )
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return Pickled(*pickle_by_value.dumps(obj, importable, reason=str(error)))
    return Pickled(buffer.getvalue())


def dumps_result(obj: object) -> bytes:
    """Pickle a rank's result or failure for the launching process.

    Objects of a class that was sent by value cannot be pickled by name and are returned by value with cloudpickle.

    Raises:
        Exception: the error of plain pickling, if neither way works.
    """
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            import cloudpickle
        except ImportError:
            pass
        else:
            with contextlib.suppress(Exception):
                data: bytes = cloudpickle.dumps(obj)
                return data
        raise
