"""Functions that ranks cannot import: how they travel, and what is said of what does not travel with them."""

from __future__ import annotations

import importlib.util
import linecache
import pickle
import subprocess
import sys
import textwrap
import threading
import traceback
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradmesh.errors import ArgumentError, MissingExtraError, RankError
from gradmesh.launch import launch, pickling

CELL = "/tmp/ipykernel_1/2718.py"


@pytest.fixture
def cell() -> Any:
    """Run code as a notebook does: its lines are in linecache alone, its globals in no module that can be imported."""
    main = types.ModuleType("a_notebook")

    def run(code: str) -> dict[str, Any]:
        code = textwrap.dedent(code)
        linecache.cache[CELL] = (len(code), None, code.splitlines(keepends=True), CELL)
        exec(compile(code, CELL, "exec"), main.__dict__)
        return main.__dict__

    sys.modules["a_notebook"] = main
    yield run
    del sys.modules["a_notebook"]
    linecache.cache.pop(CELL, None)


def sent(fn: Callable[..., Any]) -> tuple[Callable[..., Any], pickling.Origin]:
    """The function as it arrives, and what is known there of its origin."""
    data, origin = pickling.dumps(fn)
    assert origin is not None
    return pickle.loads(data), pickle.loads(pickle.dumps(origin))


def error_of(fn: Callable[..., Any], *args: Any) -> Exception:
    try:
        fn(*args)
    except Exception as error:
        return error
    raise AssertionError("no error")


# ---- by name or by value


def test_importable_function_is_pickled_by_name() -> None:
    call = (torch.nn.functional.softmax, textwrap.dedent, dist.ReduceOp.SUM, torch.nn.Linear)
    data, origin = pickling.dumps(call)
    assert len(data) < 400
    assert origin is None
    assert not pickling.importable("__main__")
    for name in (
        "os",
        "posixpath",
        "gradmesh.errors",
        "torch.nn.functional",
        "torch._C._distributed_c10d",
        "numpy",
    ):
        assert name not in sys.modules or pickling.importable(name), name


def test_a_module_that_only_the_caller_can_import_goes_by_value(
    tmp_path: Path, processes: Callable[[int], Callable[..., list[Any]]]
) -> None:
    path = tmp_path / "only_here.py"
    path.write_text(
        "factor = 4\ndef times(x):\n    return helper(x) * factor\ndef helper(x):\n    return x + 1\n"
    )
    spec = importlib.util.spec_from_file_location("only_here", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_here"] = module
    try:
        spec.loader.exec_module(module)
        assert not pickling.importable("only_here")
        assert processes(2)(module.times, 2) == [12, 12]
        assert processes(2)(lambda: module.times(3)) == [16, 16]
    finally:
        del sys.modules["only_here"]


def test_an_object_keeps_its_class_on_the_way_back(
    processes: Callable[[int], Callable[..., list[Any]]],
) -> None:
    class Local:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    found = processes(2)(lambda: Local(dist.get_rank()))
    assert [type(x) for x in found] == [Local, Local]
    assert [x.rank for x in found] == [0, 1]


def uses_modules_of_a_special_kind() -> tuple[bool, str]:
    from gradmesh import ops

    return torch.ops is not None, ops.__name__


def test_a_function_that_names_torch_and_ops_goes_by_value() -> None:
    """cloudpickle takes torch.ops along then, which is a module that it does not know how to pickle."""
    local = types.FunctionType(uses_modules_of_a_special_kind.__code__, {"torch": torch}, "local")
    assert sent(local)[0]() == (True, "gradmesh.ops")


def test_unpicklable_call_is_reported() -> None:
    with pytest.raises(ArgumentError, match="cannot be pickled for another process"):
        pickling.dumps((uses_modules_of_a_special_kind, (threading.Lock(),)))


def test_without_cloudpickle_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gradmesh\[notebook\]'"):
        pickling.dumps(lambda: 1)


MAIN = """
import sys
sys.modules["cloudpickle"] = None
import torch, gradmesh as gm

FACTOR = 10

class Term:
    def __init__(self, value):
        self.value = value

def scaled(x):
    return x * FACTOR

def on_each_rank(term):
    return Term(scaled(gm.all_gather(torch.tensor([term.value + gm.rank()])).sum().item()))

{guard}
    print([term.value for term in gm.launch(on_each_rank, 2, args=(Term(1.0),))])
    try:
        gm.launch(lambda: 1, 2)
    except gm.MissingExtraError as error:
        print(error)
"""


def run_script(folder: Path, guard: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(MAIN.format(guard=guard))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_a_function_of_a_guarded_script_needs_no_extra(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'if __name__ == "__main__":')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[30.0, 30.0]\n")
    assert 'if __name__ == "__main__":' in done.stdout  # of the lambda


def test_script_without_main_guard_raises(tmp_path: Path) -> None:
    done = run_script(tmp_path, "if True:")
    assert "MissingExtraError" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert "gradmesh[notebook]" in done.stderr


# ---- source lines


def test_source_lines_that_are_in_no_file_travel(cell: Any) -> None:
    fn, origin = sent(cell("def fails():\n    x = 0\n    return 1 / x\n")["fails"])
    del linecache.cache[CELL]
    assert "return 1 / x" not in "".join(traceback.format_exception(error_of(fn)))
    origin.adopt_lines()
    assert "    return 1 / x\n" in "".join(traceback.format_exception(error_of(fn)))


def test_source_lines_that_are_in_a_file_do_not_travel() -> None:
    assert sent(lambda: linecache.getline(__file__, 1))[1].lines == {}


def test_lines_of_a_method_and_of_a_function_that_is_only_called_travel(cell: Any) -> None:
    names = cell("class Work:\n    def run(self): return 1\ndef call(): return Work().run()\n")
    assert list(sent(names["call"])[1].lines) == [CELL]
    assert list(pickling.dumps(names["Work"]()).origin.lines) == [CELL]  # type: ignore[union-attr]


# ---- globals that the code does not name


@pytest.mark.parametrize(
    "code",
    [
        "globals()['sca' + 'le']",
        "work.__globals__['scale']",
        "eval('scale')",
        "exec('scale + 1')",
        "(lambda: eval('scale'))()",
        "get_type_hints(annotated)",
    ],
)
def test_a_global_that_was_looked_up_at_run_time_is_named(cell: Any, code: str) -> None:
    names = cell(
        f"""
        from typing import get_type_hints
        scale = 3
        def annotated(x: "scale"): pass
        def work():
            return {code}
        """
    )
    fn, origin = sent(names["work"])
    assert origin.missing_global(error_of(fn)) == ("scale", "a_notebook")


@pytest.mark.parametrize(
    "code",
    [
        "{}['scale']",  # a dictionary of its own
        "globals()['skale']",  # the launching process has no such global either
        "skale",
        "eval('skale')",
        "[scale for scale in ()] and scale or {}[scale]",  # named, so it travelled
        "local_only()",
        "globals()[3]",
        "int('scale')",
    ],
)
def test_other_errors_are_left_alone(cell: Any, code: str) -> None:
    names = cell(
        f"""
        scale = 3
        def local_only():
            if not scale:
                other = 1
            return other
        other = 2
        def work():
            return {code}
        """
    )
    fn, origin = sent(names["work"])
    assert origin.missing_global(error_of(fn)) is None


def test_a_module_that_could_be_imported_lost_nothing(cell: Any) -> None:
    fn = cell("scale = 3\ndef work():\n    return eval('scale')\n")["work"]
    _, origin = sent(fn)
    del fn.__globals__["scale"]
    assert (
        origin.missing_global(error_of(fn)) is None
    )  # its globals are those of a module, and one was deleted


def test_type_hints_in_text_are_found_where_the_code_names_them(cell: Any) -> None:
    names = cell("scale = 3\ndef work(x: 'scale') -> int:\n    return scale\n")
    fn, _ = sent(names["work"])
    assert typing.get_type_hints(fn)["x"] == 3


@pytest.mark.processes
def test_error_of_a_notebook_function_shows_its_line_and_the_unpicklable_object(cell: Any) -> None:
    code = """
        scale = 3
        def work(name):
            values = globals()
            return values[name]
    """
    work = cell(code)["work"]
    assert launch(work, 1, backend="threads", args=("scale",)) == [3]
    with pytest.raises(RankError, match="rank 0 of 1 failed with KeyError") as caught:
        launch(work, 1, args=("scale",))
    text = str(caught.value)
    assert "    return values[name]" in caught.value.rank_traceback
    assert "the function was sent by value, together with only the globals that its code names" in text
    assert "'scale' is a global of a_notebook in the launching process" in text
    assert "remedy    use the name scale directly in the function, pass it as an argument, or move" in text
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("scale",)
