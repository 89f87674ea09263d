"""Training loops with gm.objective: the table is that of the measurements, and the loops of torch alone run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools import loops
from tools.pages import mark, with_part

TORCH = [loop for loop in loops.LOOPS if loop.library == "torch"]


def test_each_loop_is_a_short_program_of_a_pinned_release() -> None:
    for loop in loops.LOOPS:
        assert loop.lines <= loops.MOST_LINES
        assert loops.RELEASES[loop.library]
    named = {f"{loop.program}.py" for loop in loops.LOOPS} | {"tiny.py"}
    assert {path.name for path in loops.HERE.glob("*.py")} == named


def test_the_table_of_loops_is_that_of_the_measurements() -> None:
    text, rows = loops.PAGE.read_text(), json.loads(loops.DATA.read_text())
    assert text == with_part(text, mark("docs/loops.md"), loops.part(rows))
    assert [row["loop"] for row in rows] == [loop.name for loop in loops.LOOPS]
    assert {row["loop"]: row["release"] for row in rows} == {
        loop.name: loops.RELEASES[loop.library] for loop in loops.LOOPS
    }


def test_weights_are_those_of_one_process() -> None:
    by_name = {loop.name: loop for loop in loops.LOOPS}
    for row in json.loads(loops.DATA.read_text()):
        loop = by_name[row["loop"]]
        rounding = 1e-7 if loop.library == "deepspeed" else 1e-15  # it keeps weights in single precision
        assert max(row["ranks"], row["one"]) < rounding
        assert (row["without"] < 1e-6) == loop.counts


def test_each_library_has_a_section_that_names_its_program() -> None:
    named = re.findall(r"^\[\w+\.py\]\(.*$", loops.PAGE.read_text(), re.MULTILINE)
    assert all(any(f"/{loop.program}.py)" in line for line in named) for loop in loops.LOOPS)


@pytest.mark.processes
@pytest.mark.parametrize("loop", TORCH, ids=lambda loop: loop.program)
def test_loops_of_torch_have_the_weights_of_one_process(loop: loops.Loop, tmp_path: Path) -> None:
    reference = loops.dense(loop.model)
    for ranks in (2, 1):
        assert loops.furthest(loops.weights(sys.executable, loop, ranks, tmp_path), reference) < 1e-15
    assert loops.furthest(loops.weights(sys.executable, loop, 2, tmp_path, "--without"), reference) > 1e-2
