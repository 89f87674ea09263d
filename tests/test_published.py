"""Scripts with published silent bugs: each is in the table, and is named or has a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.scripts import MARK, WRONG
from tools import published

BUGS = [bug for bugs in published.collections().values() for bug in bugs]
BY_SCRIPT = {bug.script: bug for bug in BUGS if bug.script}


def test_every_script_is_in_the_table_and_differs_from_its_right_form() -> None:
    files = {path.stem: path.read_text() for path in published.HERE.glob("*.py")}
    assert files
    assert files.keys() <= BY_SCRIPT.keys()
    assert BY_SCRIPT.keys() - files.keys() <= WRONG.keys()
    for name, text in files.items():
        wrong, right = published.sources(text)
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(right)), name
        assert MARK not in right
        assert "# right" not in right


def test_a_bug_without_a_script_has_a_reason() -> None:
    assert all(bug.why for bug in BUGS if not bug.script)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["router_of_sequence_parallel", "expert_norm_of_one_stage", "eval_loss_times_cp"]
)
def test_a_bug_is_named_unless_the_table_says_why_not(name: str, tmp_path: Path) -> None:
    row = published.row_of(BY_SCRIPT[name], tmp_path)
    assert row.named == (not row.bug.why)
    assert not row.right


@pytest.mark.processes
@pytest.mark.slow
def test_all_bugs_are_named_unless_the_table_says_why_not() -> None:
    assert published.main([]) == 0
