"""`assert_right`: a test that runs `gradmesh check` on a training script or function."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

__all__ = ["assert_right"]

_STARTER = """
import base64, importlib.util, pickle, sys
sys.path[:] = {path!r}
spec = importlib.util.spec_from_file_location({module!r}, {file!r})
module = importlib.util.module_from_spec(spec)
sys.modules[{module!r}] = module
spec.loader.exec_module(module)
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
function = module
for name in {name!r}.split("."):
    function = getattr(function, name)
function(*pickle.loads(base64.b64decode({arguments!r})))
"""


def assert_right(
    target: Callable[..., object] | str | os.PathLike[str],
    *arguments: Any,
    ranks: int = 2,
    steps: int = 2,
    timeout: float = 60.0,
    baseline: str | os.PathLike[str] | None = None,
    warnings: bool = False,
) -> None:
    """Fail the test if `gradmesh check` finds a wrong gradient in a training script or function.

    The target runs on local ranks, as processes on the CPU. The gradient that each parameter gets is compared with that
    of the sum of all ranks' losses. It needs no change, and may not know of gradmesh.

    Args:
        target: a script, or a function of a module that each rank calls; its process group, of Gloo, is there already.
        arguments: of the function, or of the script's command line.
        ranks: how many.
        steps: of an optimizer, after which the ranks are stopped.
        timeout: seconds without progress after which the ranks are ended.
        baseline: a file of `gradmesh check --write-baseline`, whose findings are ignored.
        warnings: whether a warning fails the test too.

    Raises:
        ArgumentError: the function cannot be imported by its ranks, or the script does not exist.

    Example:
        >>> def test_two_ranks() -> None:
        ...     assert_right("train.py", "--tiny", ranks=2)
    """
    __tracebackhide__ = True
    from gradmesh._util.environment import require
    from gradmesh.checker import findings
    from gradmesh.checker.run import Target, check_script

    require("cli", "assert_right")
    with tempfile.TemporaryDirectory() as folder:
        if callable(target):
            script = Path(folder) / "on_each_rank.py"
            script.write_text(_starter(target, arguments))
            run = Target(str(script))
        else:
            run = Target(os.fspath(target), args=tuple(map(str, arguments)))
        verdict = check_script(run, ranks=ranks, steps=steps, timeout=timeout)
    known = findings.read(Path(baseline)) if baseline else ()
    verdict = replace(verdict, findings=findings.beside(verdict.findings, known).new)
    if verdict.errors or (warnings and verdict.warnings):
        pytest.fail(_report(verdict), pytrace=False)
    if verdict.status != "complete" or not verdict.followed:
        pytest.fail(
            f"nothing was checked: no gradient of an optimizer step could be followed\n{_report(verdict)}",
            pytrace=False,
        )
    print(_report(verdict))


def _starter(function: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    """A script that imports a function by its file, and calls it."""
    from gradmesh.errors import ArgumentError

    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    name = getattr(function, "__qualname__", "")
    if file is None or "<" in name:
        raise ArgumentError.of(
            "the ranks cannot import this function",
            op="assert_right",
            expected="a function at the top level of a module, or the path of a script",
            got=repr(function),
            remedy="define it at the top level, and pass what differs as arguments: assert_right(train, 'tp')",
        )
    return _STARTER.format(
        path=[os.path.dirname(os.path.abspath(file)), *sys.path],
        module=function.__module__,
        file=os.path.abspath(file),
        name=name,
        arguments=base64.b64encode(pickle.dumps(arguments)).decode(),
    )


def _report(verdict: Any) -> str:
    from rich.console import Console

    from gradmesh.checker.report import show

    text = StringIO()
    show(verdict, Console(file=text, width=110, highlight=False, markup=False, emoji=False))
    return text.getvalue()
