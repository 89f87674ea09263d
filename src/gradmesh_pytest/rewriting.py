"""Assertion rewriting on process ranks.

A rank is a fresh interpreter. It starts a pytest config without plugins, conftests and configuration file, only to
rewrite the assertions of the modules that pytest has rewritten, and to format failures. This uses private names of
pytest; without them, assertions fail without showing values.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest


class _Pytest:
    """The pytest of a rank."""

    config: Any = None
    comparing: Any = None
    """The generator that installed pytest's comparison of values; keep a reference, since its cleanup removes it."""


def rewritten() -> list[str]:
    """The modules of this process whose assertions pytest has rewritten."""
    hooks = {type(finder) for finder in sys.meta_path if hasattr(finder, "mark_rewrite")}
    return [
        name
        for name, module in list(sys.modules.items())
        if type(getattr(module, "__loader__", None)) in hooks and not name.startswith("gradmesh")
    ]


def prepare(path: Sequence[str], names: Sequence[str], arguments: Sequence[str]) -> None:
    """Make pytest's modules importable on this rank, with rewritten assertions."""
    sys.path[:] = path
    with contextlib.suppress(ImportError, AttributeError):
        if _Pytest.config is None:
            _start(arguments)
        pytest.register_assert_rewrite(*[name for name in names if name not in sys.modules])


def _start(arguments: Sequence[str]) -> None:
    from _pytest import assertion
    from _pytest.config import _prepareconfig
    from _pytest.terminal import TerminalReporter

    plain = ["-c", os.devnull, "--noconftest", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            patch.delenv(name, raising=False)
        config = _prepareconfig([*plain, *arguments])
    if not config.pluginmanager.has_plugin("terminalreporter"):
        config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")
    _Pytest.config = config
    item: Any = types.SimpleNamespace(config=config, ihook=config.hook)
    _Pytest.comparing = assertion.pytest_runtest_protocol(item)
    next(_Pytest.comparing)


def show(error: BaseException, fn: Callable[..., Any], config: Any = None) -> Any:
    """Pytest's representation of an error, as an object that can be pickled; None if not available."""
    config = _Pytest.config if config is None else config
    if config is None:
        return None
    with contextlib.suppress(Exception):
        trace = error.__traceback__
        while (
            trace is not None
            and trace.tb_next is not None
            and "gradmesh_pytest" in trace.tb_frame.f_code.co_filename
        ):
            trace = trace.tb_next
        error.__traceback__ = trace
        return pytest.Function.repr_failure(_Shown(config, fn), pytest.ExceptionInfo.from_exception(error))  # type: ignore[arg-type]
    return None


class _Shown:
    """The attributes of a test item that `repr_failure` needs."""

    _traceback_filter = pytest.Function._traceback_filter
    _repr_failure_py = pytest.Function._repr_failure_py

    def __init__(self, config: Any, fn: Callable[..., Any]) -> None:
        self.config = config
        self.obj = self._obj = fn
