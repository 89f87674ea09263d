"""Sends functions and classes by value with cloudpickle: their code, with the globals that the code names.

Two things are lost, and `Origin` compensates for them: source lines that are not in a file, such as those of a notebook
cell, are missing in tracebacks of the other process; and globals that the code accesses by `globals()`, `exec` or
`eval` are missing, which needs an explanation in the error.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Set

from gradmesh.errors import ArgumentError, MissingExtraError, message

__all__ = ["Origin", "dumps"]

_BY_KEY = {"globals", "vars", "__globals__", "f_globals"}
"""Names in code that may access a global by key."""


@dataclasses.dataclass
class Origin:
    """The origin of functions that were sent by value.

    Attributes:
        lines: source lines by file name, for files that are not on disk.
        names: the global names of their modules in the sending process, by module name.
    """

    lines: dict[str, list[str]] = dataclasses.field(default_factory=dict)
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
        trace = error.__traceback__
        if trace is None:
            return None
        while trace.tb_next is not None:
            trace = trace.tb_next
        code, found = trace.tb_frame.f_code, trace.tb_frame.f_globals
        if isinstance(error, UnboundLocalError):
            return None
        if isinstance(error, NameError):
            name = error.name
        elif isinstance(error, KeyError) and error.args and _BY_KEY.intersection(code.co_names):
            name = error.args[0]
        else:
            return None
        module = found.get("__name__")
        if not isinstance(name, str) or name in found or _is_module(module, found):
            return None
        return (name, module or "its namespace") if name in self.names.get(module, ()) else None


def _is_module(name: str | None, namespace: Mapping[str, object]) -> bool:
    return getattr(sys.modules.get(name or ""), "__dict__", None) is namespace


def dumps(obj: object, importable: Callable[[str | None], bool], reason: str) -> tuple[bytes, Origin]:
    """Pickle with cloudpickle; objects from modules that the other process cannot import are pickled by value.

    Args:
        obj: the object.
        importable: whether the other process can import a module of that name.
        reason: why it cannot be pickled by name, for the error.

    Raises:
        MissingExtraError: cloudpickle is not installed.
        ArgumentError: the object cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            message(
                "the function or its arguments cannot be imported by name in another process",
                op="launch",
                got=reason,
                remedy="run pip install 'gradmesh[notebook]'; or define the function at the top level of the script\n"
                'and call launch under if __name__ == "__main__":, or move it to a module that ranks can import',
            )
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
        raise ArgumentError(
            message(
                "the function or its arguments cannot be pickled for another process",
                op="launch",
                got=str(error),
                remedy="create such objects inside the function, or use backend='threads'",
            )
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue(), origin
