"""The matrix of parallel plans: what a row says, what the page shows, and that a wrong gradient is confirmed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seldom import seldom
from tools.models import __main__ as command
from tools.models.cells import RELEASES, Cell, cells, checked, row_of
from tools.models.environments import Environment
from tools.models.page import page
from tools.models.parity import Parity, difference, parity

CELL = Cell("5.23.0", "olmoe", "ep")
FOUND = {
    "rule": "GM101",
    "severity": "error",
    "message": "each rank has its own part",
    "at": {"file": "/env/lib/site-packages/transformers/moe.py", "line": 7, "function": "f", "text": "y = x"},
    "began": None,
    "received": None,
}
RAISED = FOUND | {"rule": "GM501", "message": "rank 0 raised ValueError: no\nplan"}
STAND_IN = """
import os, sys, torch
command, folder, plan, file = sys.argv[1:]
alone = "RANK" not in os.environ
torch.save({"w": torch.tensor([1.0, 2.0 if alone or "right" in folder else 2.5])}, file)
"""


def said(**changes: Any) -> str:
    given = {"findings": [], "notes": [], "followed": 2, "steps": 2}
    return "a line of the program\n" + json.dumps({**given, **changes})


@pytest.mark.parametrize(
    ("out", "verdict", "error"),
    [
        (said(), "right", ""),
        (said(findings=[FOUND]), "wrong", ""),
        (said(findings=[FOUND | {"severity": "warning"}]), "right", ""),
        (said(followed=1), "unchecked", ""),
        (said(followed=0, steps=0), "unchecked", ""),
        (said(findings=[RAISED]), "refused", "ValueError: no"),
        ("", "unchecked", "out of memory"),
    ],
)
def test_a_row_tells_right_wrong_unchecked_and_refused_apart(out: str, verdict: str, error: str) -> None:
    row = row_of(CELL, out, "Traceback\nout of memory\n", 1.0)
    assert (row.verdict, row.error) == (verdict, error)


def test_files_of_packages_are_named_without_the_environment() -> None:
    assert row_of(CELL, said(findings=[FOUND]), "", 1.0).findings[0]["at"]["file"] == "transformers/moe.py"


def test_only_models_with_experts_are_split_by_experts() -> None:
    found = {(cell.family, cell.plan) for cell in cells(RELEASES, ())}
    assert ("llama", "tp") in found
    assert ("olmoe", "ep") in found
    assert ("llama", "ep") not in found
    assert [str(cell) for cell in cells(RELEASES[:1], ("olmoe", "ep"))] == ["5.16.0 olmoe ep"]


def test_a_gradient_is_as_far_as_its_farthest_entry_and_rounding_of_a_zero_is_not() -> None:
    true = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(2)}
    far = difference(true, {"a": torch.tensor([1.0, -4.4]), "b": torch.full((2,), 1e-9)})
    assert (far.name, far.wrong) == ("a", True)
    assert far.far == pytest.approx(0.1)
    assert not difference(true, {"a": true["a"], "b": torch.full((2,), 1e-9)}).wrong
    assert difference(true, {"a": true["a"]}).error


class _Local(Environment):
    """This Python in the place of a release's."""

    def __init__(self) -> None:
        self.python = Path(sys.executable)


@pytest.mark.parametrize("kind", seldom(["right", "wrong"], ["wrong"]))
def test_ranks_are_held_beside_one_process(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(STAND_IN)
    found = parity(_Local(), (str(script), "gradients", kind, "tp"), 2, tmp_path)
    assert found.error == ""
    assert found.wrong == (kind == "wrong")


def test_the_page_says_of_each_cell_what_came_of_it() -> None:
    rows: list[dict[str, Any]] = []
    wrong = row_of(CELL, said(findings=[FOUND]), "", 12.0)
    wrong.parity = Parity(0.2, "gate", (1.0, 1.2))
    refused = row_of(Cell("5.23.0", "olmoe", "tp"), "", "no plan", 1.0)
    refused.verdict = "refused"
    for row in (
        row_of(CELL, said(), "", 1.0),
        wrong,
        refused,
        row_of(Cell("5.9.0", "llama", "tp"), said(), "", 3.0),
    ):
        rows = command.with_row(rows, row)
    assert len(rows) == 3
    text = page({"torch": "2.13.0", "rows": rows})
    assert "| olmoe | refused | **wrong** GM101, confirmed, 12 |" in text
    assert "the norm of gate is 1.2 for 1" in text
    assert text.index("## transformers 5.23.0") < text.index("## transformers 5.9.0")


def test_the_page_is_that_of_the_measurements() -> None:
    assert command.PAGE.read_text() == page(json.loads(command.DATA.read_text()))


@pytest.mark.processes
def test_a_tiny_model_of_transformers_is_checked(tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="needs transformers, which is not one of the project's requirements"
    )
    row = checked(Cell("5.23.0", "llama", "fsdp2"), _Local(), tmp_path)
    assert row.verdict in ("right", "refused"), row
