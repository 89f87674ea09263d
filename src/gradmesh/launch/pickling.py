"""Pickling for another Python process: by name where the name can be imported there, else by value."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import pickle
import sys
import types
from typing import Any

from gradmesh.errors import ArgumentError, MissingExtraError, message

__all__ = ["dumps", "dumps_result"]


class _ByValue(Exception):  # noqa: N818 - a signal, caught here
    """Something is defined where the other process cannot import it from."""


class _ByName(pickle.Pickler):
    """A pickler that refuses functions and classes of modules that a fresh interpreter cannot import."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type | types.FunctionType) and not importable(obj.__module__):
            raise _ByValue(obj.__module__)
        return NotImplemented


def importable(name: str | None) -> bool:
    """Whether importing that module anew, with this process's `sys.path`, finds the one that is loaded."""
    module = sys.modules.get(name or "")
    if module is None or name is None or name == "__main__":
        return False
    if name.partition(".")[0] in sys.stdlib_module_names:  # os.path has another name, os is frozen
        return True
    parent = name.rpartition(".")[0]
    if parent and not importable(parent):
        return False
    file = getattr(module, "__file__", None)
    if parent and file in (None, getattr(sys.modules[parent], "__file__", None)):
        return True  # made by an extension while that was imported
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    for finder in sys.meta_path:
        spec: importlib.machinery.ModuleSpec | None = finder.find_spec(name, path)
        if spec is not None:
            return file == spec.origin
    return False


def dumps(obj: object) -> bytes:
    """Pickle a call for a fresh interpreter that has this one's `sys.path`.

    Raises:
        MissingExtraError: it has to go by value, and cloudpickle is not installed.
        ArgumentError: it cannot be pickled at all.
    """
    buffer = io.BytesIO()
    try:
        _ByName(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except (_ByValue, pickle.PicklingError, AttributeError, TypeError) as error:
        return _by_value(obj, error)
    return buffer.getvalue()


def _by_value(obj: object, reason: Exception) -> bytes:
    got = f"something from the module {reason}" if isinstance(reason, _ByValue) else str(reason)
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            message(
                "the function or its arguments cannot be imported by name in another process",
                op="launch",
                got=got,
                remedy="pip install 'gradmesh[notebook]', or move it to a module of its own",
            )
        ) from None
    registered = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, part: object) -> object:
            if isinstance(part, types.ModuleType) and type(part) is not types.ModuleType:
                # Such as torch.ops, which cloudpickle finds for any function that says both "torch" and "ops".
                return importlib.import_module, (part.__name__,)
            # Modules that are loaded but could not be found again, such as pytest's test modules.
            name = part.__name__ if type(part) is types.ModuleType else getattr(part, "__module__", None)
            if isinstance(part, type | types.FunctionType | types.ModuleType) and name != "__main__":
                module = sys.modules.get(name or "")
                if module is not None and module not in registered and not importable(name):
                    cloudpickle.register_pickle_by_value(module)
                    registered.append(module)
            return super().reducer_override(part)

    buffer = io.BytesIO()
    try:
        Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:
        raise ArgumentError(
            message(
                "the function or its arguments cannot be pickled for another process",
                op="launch",
                got=str(error),
                remedy="make such objects inside the function, or use backend='threads'",
            )
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def dumps_result(obj: object) -> bytes:
    """Pickle what goes back to the process that asked: plainly, or by value what came by value."""
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
