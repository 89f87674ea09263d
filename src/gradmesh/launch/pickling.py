"""Pickling for another Python process: by name if it can import that name, else by value.

Sends functions and classes by value with cloudpickle: their code, with the globals that the code names.
Two things are lost, and `Origin` compensates for them: source lines that are not in a file, such as those of a notebook
cell, are missing in tracebacks of the other process; and globals that the code accesses by `globals()`, `exec` or
`eval` are missing, which needs an explanation in the error.

Functions of the main script by name: a rank imports the script as `multiprocessing` does, under another name.
This needs a script that launches ranks under `if __name__ == "__main__":` alone, so that importing it has no effect.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import io
import linecache
import os
import pickle
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, NamedTuple

from gradmesh.errors import ArgumentError, MissingExtraError

_BY_KEY = {"globals", "vars", "__globals__", "f_globals"}
"""Names in code that may access a global by key."""
_ANNOTATIONS = ("annotationlib", "typing")
"""The modules that evaluate annotations."""


@dataclasses.dataclass
class Origin:
    """The origin of functions that were sent by value."""

    # source lines by file name, for files that are not on disk
    lines: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    # the global names of their modules in the sending process, by module name
    names: dict[str | None, Set[str]] = dataclasses.field(default_factory=dict)

    def add(self, fn: types.FunctionType) -> None:
        """Add a function's origin."""
        file = fn.__code__.co_filename
        if file not in self.lines and not os.path.exists(file) and (lines := linecache.getlines(file)):
            self.lines[file] = lines
        module = fn.__globals__.get("__name__")
        self.names[module] = self.names.get(module, set()) | fn.__globals__.keys()

    def adopt_lines(self) -> None:
        """Make the source lines available to tracebacks and `inspect` in this process."""
        for file, lines in self.lines.items():
            # Without a modification time the entry is not compared with a file on disk.
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)

    def missing_global(self, error: BaseException) -> tuple[str, str] | None:
        """The name and module of a global whose absence caused the error because it was not sent, or None."""
        walked = traceback.walk_tb(error.__traceback__)
        frames = [frame for frame, _ in walked if frame.f_globals.get("__name__") not in _ANNOTATIONS]
        if not frames:
            return None
        code, found = frames[-1].f_code, frames[-1].f_globals
        if isinstance(error, UnboundLocalError):
            return None
        if isinstance(error, NameError):
            name = error.name
        elif isinstance(error, KeyError) and error.args and _BY_KEY.intersection(code.co_names):
            name = error.args[0]
        else:
            return None
        module = found.get("__name__")
        is_module = getattr(sys.modules.get(module or ""), "__dict__", None) is found
        if not isinstance(name, str) or name in found or is_module:
            return None
        return (name, module or "its namespace") if name in self.names.get(module, ()) else None


def dumps_by_value(
    obj: object, importable: Callable[[str | None], bool], reason: str
) -> tuple[bytes, Origin]:
    """Pickle with cloudpickle; objects from modules that the other process cannot import are pickled by value."""
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError.of(
            "the function or its arguments cannot be imported by name in another process",
            op="launch",
            got=reason,
            remedy="run pip install 'gradmesh[notebook]'; or define the function at the top level of the script\n"
            'and call launch under if __name__ == "__main__":, or move it to a module that ranks can import',
        ) from None
    registered = []
    origin = Origin()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, part: object) -> object:
            if isinstance(part, types.ModuleType) and type(part) is not types.ModuleType:
                # Such as torch.ops, which cloudpickle finds for any function that names both "torch" and "ops".
                return importlib.import_module, (part.__name__,)
            # Loaded modules that cannot be imported again, such as pytest's test modules.
            name = part.__name__ if type(part) is types.ModuleType else getattr(part, "__module__", None)
            if isinstance(part, type | types.FunctionType | types.ModuleType) and name != "__main__":
                module = sys.modules.get(name or "")
                if module is not None and module not in registered and not importable(name):
                    cloudpickle.register_pickle_by_value(module)
                    registered.append(module)
            reduced = super().reducer_override(part)
            if isinstance(part, types.FunctionType) and reduced is not NotImplemented:
                origin.add(part)
            return reduced

    buffer = io.BytesIO()
    try:
        Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:
        raise ArgumentError.of(
            "the function or its arguments cannot be pickled for another process",
            op="launch",
            got=str(error),
            remedy="create such objects inside the function, or use backend='threads'",
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue(), origin


_NAME = "__mp_main__"
"""The name that `multiprocessing` gives to the main module in a child, and adds in the parent."""


def importable_main() -> str | None:
    """The path of the main script, if it has the guard that makes importing it harmless; else None."""
    file: str | None = getattr(sys.modules["__main__"], "__file__", None)
    try:
        if file is None:
            return None
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    tests = {ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)}
    if tests.isdisjoint(("__name__ == '__main__'", "'__main__' == __name__")):
        return None
    return str(Path(file).resolve())


def find_in_main(module: types.ModuleType, name: str) -> object:
    """What a qualified name is in a module; None where there is nothing of that name."""
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        return None


def load_main(script: str, name: str) -> object:
    """What a qualified name is in a script, which is run once in this process."""
    module = sys.modules.get(_NAME)
    if module is None or getattr(module, "__file__", None) != script:
        module = types.ModuleType(_NAME)
        sys.modules[_NAME] = sys.modules["__main__"] = module
        module.__dict__.update(runpy.run_path(script, run_name=_NAME))
    return find_in_main(module, name)


class Pickled(NamedTuple):
    """A pickle, and the origin of functions that it contains by value."""

    data: bytes
    origin: Origin | None = None


class _ByValue(Exception):  # noqa: N818 - a signal, caught here
    """The other process cannot import the definition of an object."""


class _ByName(pickle.Pickler):
    """A pickler that raises `_ByValue` for functions and classes that a fresh interpreter cannot import."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type | types.FunctionType) and not importable(obj.__module__):
            raise _ByValue(obj.__module__)
        return NotImplemented


class _OfScript(_ByName):
    """A pickler that takes functions and classes of the main script by name, for a process that imports the script."""

    def __init__(self, buffer: io.BytesIO, script: str) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._script = script

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            if find_in_main(sys.modules["__main__"], obj.__qualname__) is obj:
                return load_main, (self._script, obj.__qualname__)
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
    """
    buffer = io.BytesIO()
    try:
        _ByName(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except _ByValue as error:
        try:
            return Pickled(*dumps_by_value(obj, importable, reason=f"something from the module {error}"))
        except MissingExtraError:
            script = importable_main()
            if script is None:
                raise
        buffer = io.BytesIO()
        try:
            _OfScript(buffer, script).dump(obj)
        except (_ByValue, pickle.PicklingError, AttributeError, TypeError):
            return Pickled(*dumps_by_value(obj, importable, reason=f"something from the module {error}"))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return Pickled(*dumps_by_value(obj, importable, reason=str(error)))
    return Pickled(buffer.getvalue())


def dumps_result(obj: object) -> bytes:
    """Pickle a rank's result or failure for the launching process.

    Objects of a class that was sent by value cannot be pickled by name and are returned by value with cloudpickle.
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
