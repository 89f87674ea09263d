"""The command that runs torch's own tests for backends on ours: what it counts, and a few of the tests themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.seldom import seldom
from tools import torch_suite
from tools.torch_suite import SKIPPED, Outcome, asked, failures, run, show

ROOT = Path(__file__).parent.parent
PASS, FAIL, SKIP, EXCUSED = (Outcome(word) for word in ("pass", "fail", "skip", "excused"))


def test_only_tests_that_pass_on_gloo_are_run() -> None:
    gloo = {"a": PASS, "b": FAIL, "c": SKIP, "d": PASS, "e": PASS}
    ours = {"a": PASS, "b": FAIL, "c": FAIL, "d": EXCUSED, "e": PASS}
    assert asked(ours, gloo) == ["a", "e"]
    assert failures(ours, gloo) == []
    assert "shm passes 2 of 2 that Gloo passes, 1 not run; 5 tests" in show("shm", ours, gloo)


@pytest.mark.parametrize("outcome", [FAIL, SKIP])
def test_failed_or_skipped_test_that_passes_on_gloo_is_a_failure(outcome: Outcome) -> None:
    gloo, ours = {"a": PASS, "b": PASS}, {"a": PASS, "b": outcome}
    assert failures(ours, gloo) == ["b"]
    assert f"| b | pass | {outcome.word} |" in show("shm", ours, gloo)
    assert "shm passes 1 of 2 that Gloo passes; 2 tests" in show("shm", ours, gloo)


def test_without_gloo_all_that_torch_does_not_skip_is_asked() -> None:
    ours = {"a": PASS, "b": FAIL, "c": SKIP, "d": EXCUSED}
    assert asked(ours, None) == ["a", "b"]
    assert failures(ours, None) == ["b"]


def test_docs_list_excluded_tests_with_reasons() -> None:
    page = (ROOT / "docs" / "reports" / "torch-suite.md").read_text()
    for backend, tests in SKIPPED.items():
        for pattern, why in tests.items():
            assert f"| `{backend}` | `{pattern}` | {why} |" in page


@pytest.mark.parametrize("backend", seldom(["shm", "threads"], ["shm"]))
def test_a_few_of_torchs_tests_pass(backend: str) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it")
    chosen = "test_(monitored_barrier_gloo_subgroup|all_gather_coalesced_simple|get_backend|reduce_sum)$"
    ours = run(backend, "gloo", chosen)
    assert [outcome for outcome in ours.values() if outcome != PASS] == []
    assert len(ours) == 4


@pytest.mark.parametrize(("outcome", "code"), [(PASS, 0), (EXCUSED, 0), (FAIL, 1), (SKIP, 1)])
def test_the_command_exits_with_1_when_a_test_that_gloo_passes_fails(
    outcome: Outcome, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {"gloo": {"test_a": PASS}, "shm": {"test_a": dataclasses.replace(outcome, why="this is why")}}
    monkeypatch.setattr(torch_suite, "run", lambda backend, *_: sides[backend])
    result = CliRunner().invoke(torch_suite.main, ["--backend", "shm", "--as", "gloo"])
    assert result.exit_code == code
    assert f"shm passes {int(outcome == PASS)} of {int(outcome != EXCUSED)}" in result.output
    assert ("\ntest_a\nthis is why" in result.output) == (code == 1)
