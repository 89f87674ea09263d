"""`gradmesh check`: what it hands to the checker, what it prints and writes, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gradmesh import GradmeshError, cli
from gradmesh.checker import command
from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target
from tests.checker_samples import finding

CLEAN = Verdict((), (), 2, 2, {"checked": 2.0})
WRONG = replace(CLEAN, findings=(finding(), finding("GM203")))
WARNED = replace(CLEAN, findings=(finding("GM203"),))


class Checked:
    """What the command asked for, and the answer."""

    def __init__(self) -> None:
        self.answer: Verdict | Exception = CLEAN
        self.target: Target | None = None
        self.options: dict[str, Any] = {}

    def __call__(self, target: Target, **options: Any) -> Verdict:
        options.pop("progress")("2 ranks run [bold]train.py[/bold]")
        self.target, self.options = target, options
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checked:
    made = Checked()
    monkeypatch.setattr(command, "check_script", made)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    return made


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), ["check", *arguments])


@pytest.mark.parametrize(
    ("arguments", "target", "ranks"),
    [
        (["train.py"], Target("train.py"), 2),
        (["train.py", "-n", "4", "--", "--lr", "3"], Target("train.py", args=("--lr", "3")), 4),
        (["-n", "4", "train.py", "--", "-n", "8"], Target("train.py", args=("-n", "8")), 4),
        (["-m", "pack.train", "-n", "3"], Target("pack.train", True), 3),
        (["-m", "pytest", "--", "tests", "-k", "x"], Target("pytest", True, ("tests", "-k", "x")), 2),
    ],
)
def test_script_module_and_their_arguments(
    checked: Checked, arguments: list[str], target: Target, ranks: int
) -> None:
    result = check(*arguments)
    assert result.exit_code == 0, result.output
    assert checked.target == target
    assert checked.options == {"ranks": ranks, "steps": 2, "timeout": 60.0}


def test_steps_and_timeout_are_handed_on(checked: Checked) -> None:
    check("train.py", "--steps", "5", "--timeout", "1.5")
    assert checked.options == {"ranks": 2, "steps": 5, "timeout": 1.5}


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        (CLEAN, 0),
        (WARNED, 0),
        (WRONG, 1),
        (replace(WRONG, status="stopped"), 1),
        (replace(CLEAN, status="stopped"), 2),
        (replace(CLEAN, followed=2), 0),
        (replace(CLEAN, followed=0), 2),
        (replace(WRONG, followed=0), 1),
        (replace(CLEAN, status="not-run"), 2),
        (replace(WRONG, status="not-run"), 2),
    ],
)
def test_exit_status_reports_whether_errors_were_found(
    checked: Checked, verdict: Verdict, status: int
) -> None:
    checked.answer = verdict
    assert check("train.py").exit_code == status
    assert check("train.py", "--json").exit_code == status


@pytest.mark.parametrize(
    "arguments",
    [(), ("none.py",), ("train.py", "-n", "1"), ("train.py", "--steps", "0"), ("train.py", "--lr", "3")],
)
def test_unrunnable_target_is_reported_without_a_traceback(
    checked: Checked, arguments: tuple[str, ...]
) -> None:
    result = check(*arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert result.stderr
    assert checked.target is None


def test_checker_error_is_reported_and_is_not_a_finding(checked: Checked) -> None:
    checked.answer = GradmeshError("no ports are free")
    result = check("train.py")
    assert (result.exit_code, result.stderr, result.stdout) == (2, "no ports are free\n", "")


def test_the_text_has_findings_and_counts(checked: Checked) -> None:
    checked.answer = WRONG
    result = check("train.py")
    assert "GM101 missing-sum" in result.stdout
    assert "at train.py:7 in step" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 error, 1 warning; 2 ranks, 2 steps")
    assert "\x1b" not in result.stdout


def test_json_is_one_line_and_nothing_else(checked: Checked, tmp_path: Path) -> None:
    checked.answer = WRONG
    result = check("train.py", "--json", "--write-baseline", "known.json")
    assert len(result.stdout.splitlines()) == 1
    found = json.loads(result.stdout)
    assert [each["rule"] for each in found["findings"]] == ["GM101", "GM203"]
    assert (found["ok"], found["hidden"], found["gone"]) == (False, 0, [])


def test_sarif_is_written_beside_the_text(checked: Checked, tmp_path: Path) -> None:
    checked.answer = WRONG
    assert check("train.py", "--sarif", "found.sarif").exit_code == 1
    [run] = json.loads((tmp_path / "found.sarif").read_text())["runs"]
    assert [each["ruleId"] for each in run["results"]] == ["GM101", "GM203"]


def test_baseline_hides_known_findings_and_lists_gone_ones(checked: Checked, tmp_path: Path) -> None:
    checked.answer = WRONG
    written = check("train.py", "--write-baseline", "known.json")
    assert written.exit_code == 0
    assert "2 findings written to known.json" in written.stdout
    again = check("train.py", "--baseline", "known.json", "--sarif", "found.sarif")
    assert again.exit_code == 0
    assert "2 findings of the baseline hidden" in again.stdout
    assert "GM101" not in again.stdout
    assert json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"] == []
    checked.answer = replace(CLEAN, findings=(finding("GM203"), finding("GM103")))
    other = check("train.py", "--baseline", "known.json")
    assert other.exit_code == 1
    assert "GM103" in other.stdout
    assert "1 finding of the baseline hidden" in other.stdout
    assert "no longer found: GM101 train.py:step" in other.stdout
    result = json.loads(check("train.py", "--baseline", "known.json", "--json").stdout)
    assert (result["hidden"], result["gone"]) == (1, ["GM101 train.py:step"])


def test_a_baseline_is_renewed_by_one_run(checked: Checked) -> None:
    checked.answer = WRONG
    check("train.py", "--write-baseline", "known.json")
    checked.answer = WARNED
    check("train.py", "--baseline", "known.json", "--write-baseline", "known.json")
    result = check("train.py", "--baseline", "known.json").stdout
    assert "1 finding of the baseline hidden" in result
    assert "no longer" not in result


def test_run_that_ended_early_reports_no_gone_findings(checked: Checked) -> None:
    checked.answer = WRONG
    check("train.py", "--write-baseline", "known.json")
    checked.answer = replace(CLEAN, findings=(finding("GM501"),), status="stopped")
    assert "no longer" not in check("train.py", "--baseline", "known.json").stdout


def test_a_run_that_failed_writes_no_baseline(checked: Checked, tmp_path: Path) -> None:
    checked.answer = replace(WRONG, status="not-run")
    assert check("train.py", "--write-baseline", "known.json").exit_code == 2
    assert not (tmp_path / "known.json").exists()


def test_broken_baseline_and_unwritable_path_are_reported(checked: Checked, tmp_path: Path) -> None:
    (tmp_path / "known.json").write_text("no")
    result = check("train.py", "--baseline", "known.json")
    assert (result.exit_code, checked.target) == (2, None)
    assert "is not a readable baseline" in result.stderr
    result = check("train.py", "--sarif", "nowhere/found.sarif")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
