"""Functions and classes that travel by value: their code, with the globals that the code names, by cloudpickle.

Two things are lost on the way, and `Origin` makes up for them. Source lines that are in no file, such as those of a
notebook cell, are missing in the tracebacks of the other process. And globals that the code does not name, which
it looks up by `globals()`, `exec` or `eval`, are not there.
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
"""Names in code that may look up a global by a key."""


@dataclasses.dataclass
class Origin:
    """Where functions that went by value come from.

    Attributes:
        lines: the source lines of their files, by file name, of those that are not on disk.
        names: the globals of their modules in the process that sent them, by module name.
    """

    lines: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    names: dict[str | None, Set[str]] = dataclasses.field(default_factory=dict)

    def add(self, fn: types.FunctionType) -> None:
        """Note where that function comes from."""
        file = fn.__code__.co_filename
        if file not in self.lines and not os.path.exists(file) and (lines := linecache.getlines(file)):
            self.lines[file] = lines
        module = fn.__globals__.get("__name__")
        self.names[module] = self.names.get(module, set()) | fn.__globals__.keys()

    def adopt_lines(self) -> None:
        """Let this process's tracebacks, and `inspect`, find the source lines."""
        for file, lines in self.lines.items():
            # No modification time: the entry is not compared with a file on disk.
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)

    def lost_global(self, error: BaseException) -> tuple[str, str] | None:
        """The name and the module of a global that the error missed because it did not travel, or None."""
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
    """Pickle with cloudpickle, by value what comes from a module that is not importable in the other process.

    Args:
        obj: what to pickle.
        importable: whether the other process can import the module of that name.
        reason: why it cannot be pickled by name, for the error text.

    Raises:
        MissingExtraError: cloudpickle is not installed.
        ArgumentError: it cannot be pickled at all.
    """
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            message(
                "the function or its arguments cannot be imported by name in another process",
                op="launch",
                got=reason,
                remedy="pip install 'gradmesh[notebook]'; or define it at the top level of the script and call\n"
                'launch under if __name__ == "__main__":, or move it to a module of its own',
            )
        ) from None
    registered = []
    origin = Origin()

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
                remedy="make such objects inside the function, or use backend='threads'",
            )
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue(), origin
