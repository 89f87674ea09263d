"""Calls that are refused, and what each one's error says: the wrong calls that the tests make, as they stand there."""

from __future__ import annotations

import ast
import inspect
import warnings
from types import ModuleType

import gradmesh as gm
from tests import test_errors, wrong_calls

RANKS = 2


def cases() -> dict[str, tuple[str, str]]:
    """Of each wrong call its error's class and first line, by how it is written."""
    written = {**_written(test_errors), **_written(wrong_calls)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested and quantized tensors
        said = gm.launch(_said, RANKS, backend="threads")[0]
    return {written[name]: text for name, text in sorted(said.items()) if name in written}


def _said() -> dict[str, tuple[str, str]]:
    calls = {name: call for name, (_, _, call) in test_errors.BAD.items()}
    calls |= {name: case.wrong for name, case in wrong_calls.CASES.items()}
    found = {}
    for name, call in calls.items():
        try:
            call()
        except gm.GradmeshError as error:
            first = str(error).splitlines()[0]
            found[name] = type(error).__name__, first.split(": ", 1)[-1]
    return found


def _written(module: ModuleType) -> dict[str, str]:
    """The calls of a file's tables by their names, each on one line."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_rows":
            verb, _, rows = node.args
            if isinstance(verb, ast.Constant) and isinstance(rows, ast.Dict):
                found |= {f"{verb.value!s}: {name}": call for name, call in _calls(rows).items()}
        elif isinstance(node, ast.Dict):
            found |= {name: call for name, call in _calls(node).items() if name not in found}
    return found


def _calls(table: ast.Dict) -> dict[str, str]:
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        held = value.args if isinstance(value, ast.Call) else getattr(value, "elts", [])
        calls = [each for each in held if isinstance(each, ast.Lambda)]
        if calls and isinstance(key, ast.Constant) and isinstance(key.value, str):
            found[key.value] = ast.unparse(calls[0].body)
    return found
