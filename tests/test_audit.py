"""What an audit takes, refuses, returns and prints; on threads and on processes, and as a command."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

import gradmesh as gm
from gradmesh import cli
from gradmesh.verify import Finding, audit
from gradmesh.verify.auditing import KINDS
from gradmesh.verify.auditing.kinds import table
from tests import audit_targets

ROOT = Path(__file__).parent.parent


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), ["audit", *arguments])


def test_findings_come_from_the_worst_down_and_can_be_read() -> None:
    found = audit(audit_targets.wrong)
    severities = [finding.severity for finding in found.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    text = str(found)
    for finding in found.findings:
        assert finding.kind in text
        assert finding.remedy.split()[0] in text
    assert "tests/audit_targets.py" in text
    assert not found.ok
    assert json.loads(found.json())["findings"][0]["kind"] == found.kinds[0]
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_right_function_has_a_reading_and_no_finding() -> None:
    found = audit(audit_targets.right)
    assert found.ok
    assert found.linear
    assert found.arrows == ("V -> R",)
    assert found.holds("V -> V")
    assert not found.holds("V -> I")
    assert "no finding" in str(found)


@pytest.mark.parametrize("now", ["(\n", "'\n", "def build(:\n", ""])
def test_a_function_is_audited_whose_file_was_edited_since(tmp_path: Path, now: str) -> None:
    file = tmp_path / "edited.py"
    names: dict[str, Any] = {"gm": gm, "torch": torch}
    exec(compile("fn = lambda x: gm.all_gather(x)\nbuild = lambda: (fn, torch.ones(2))", file, "exec"), names)
    file.write_text(now)
    assert audit(names["build"]).arrows == ("V -> R",)


def test_the_same_function_twice_gives_the_same_answer() -> None:
    one, two = (audit(audit_targets.wrong) for _ in range(2))
    assert (one.findings, one.arrows, one.left_out) == (two.findings, two.arrows, two.left_out)


def test_only_the_kinds_that_are_asked_for_are_reported() -> None:
    assert audit(audit_targets.wrong, kinds=["gradient-overwritten"]).kinds == ("gradient-overwritten",)
    with pytest.raises(gm.ArgumentError, match="no such kind"):
        audit(audit_targets.right, kinds=["nothing"])


def test_each_operand_has_its_own_type() -> None:
    def build() -> Any:
        def fn(x: Tensor, bias: Tensor) -> Tensor:
            return gm.all_reduce(x, dst=gm.I) + bias

        return fn, (torch.randn(3), torch.randn(3))

    assert audit(build).arrows == ("P, I -> I",)


def test_operands_are_the_inputs_that_require_grad() -> None:
    def build() -> Any:
        return (lambda x, scale: gm.all_gather(x * scale)), (
            torch.randn(3, requires_grad=True),
            torch.ones(3),
        )

    found = audit(build)
    assert found.linear
    assert found.arrows == ("V -> R",)


def test_a_function_that_is_not_linear_is_audited_at_its_inputs() -> None:
    def build() -> Any:
        return (lambda x: gm.all_gather(x.exp()).square().sum(1)), torch.rand(2, 3) + 1

    found = audit(build)
    assert found.ok, found
    assert not found.linear
    assert "not linear" in str(found)
    assert found.arrows == ("V -> R",)
    wrong = audit(lambda: ((lambda x: Squares.apply(x)), torch.rand(2, 3) + 1))
    assert wrong.kinds[0] == "not-adjoint"
    assert "3 times too large" in wrong.findings[0].text


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 6 * ctx.saved_tensors[0] * grad


def test_an_affine_function_is_audited_by_its_linear_part() -> None:
    found = audit(lambda: ((lambda x: gm.all_gather(x) + 1), torch.randn(3)))
    assert found.ok, found
    assert found.linear


def test_two_results() -> None:
    found = audit(lambda: ((lambda x: (gm.all_gather(x), 2 * x)), torch.randn(3)))
    assert found.ok, found
    assert "V -> R, V" in found.arrows


@pytest.mark.parametrize("size", [1, 3, 4])
def test_worlds_of_other_sizes(size: int) -> None:
    assert audit(audit_targets.gathering, world_size=size).ok
    assert "not-adjoint" in audit(audit_targets.wrong, world_size=size, kinds=["not-adjoint"]).kinds


def test_float32_alone_is_audited_in_float32() -> None:
    weight = torch.randn(3, 3)
    found = audit(lambda: ((lambda x: gm.all_gather(x @ weight)), torch.randn(2, 3)))
    assert found.ok, found
    assert "float64" in found.left_out["precision-lost"]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (audit_targets.broken, "has to return"),
        (audit_targets.raising, "no data"),
        (audit_targets.refusing, "on rank 0"),
    ],
)
def test_what_cannot_be_audited_is_an_error_of_the_librarys_own(build: Any, text: str) -> None:
    with pytest.raises(gm.GradmeshError, match=text):
        audit(build)


def test_a_function_that_does_not_come_back_is_a_finding() -> None:
    began = time.monotonic()
    found = audit(audit_targets.sleeping, timeout=0.5)
    assert found.kinds == ("hangs",)
    assert time.monotonic() - began < 10


def test_a_function_that_ends_its_process_is_a_finding_in_isolation() -> None:
    assert audit(audit_targets.ending, isolate=True).kinds == ("aborts",)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_find_what_threads_find(backend: str) -> None:
    kinds = [
        "not-adjoint",
        "gradient-overwritten",
        "strided-gradient",
        "gradient-uninitialised",
        "second-order-wrong",
    ]
    there, here = (audit(audit_targets.wrong, backend=b, kinds=kinds) for b in (backend, "threads"))
    assert there.kinds == here.kinds
    assert [f.line for f in there.findings[:2]] == [f.line for f in here.findings[:2]]


def test_a_rank_that_dies_while_it_is_asked_is_a_finding_and_the_audit_goes_on() -> None:
    found = audit(audit_targets.ending_on_strides, backend="gloo", kinds=["strided-gradient", "not-adjoint"])
    assert found.kinds == ("strided-gradient",)
    assert "process ends" in found.findings[0].text
    assert found.arrows


def test_the_command_says_by_its_status_what_it_found() -> None:
    told = _run("tests.audit_targets:right")
    assert told.exit_code == 0, told.output
    assert "no finding" in told.output
    told = _run("tests.audit_targets:right", f"{ROOT}/tests/audit_targets.py:wrong", "--kind", "not-adjoint")
    assert told.exit_code == 1
    assert "not-adjoint" in told.output
    for target in ("tests.audit_targets:broken", "tests.audit_targets:none", "no_module:f", "words"):
        told = _run(target)
        assert told.exit_code == 2
        assert "gradmesh.verify.audit" in told.stderr


def test_the_command_prints_a_line_of_json_for_each() -> None:
    told = _run("tests.audit_targets:right", "tests.audit_targets:broken", "--json", "--kind", "not-adjoint")
    assert told.exit_code == 2
    first, second = map(json.loads, told.stdout.splitlines())
    assert first["ok"]
    assert first["target"] == "tests.audit_targets:right"
    assert "has to return" in second["error"]


def test_the_command_runs_as_a_process() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gradmesh",
            "audit",
            "tests.audit_targets:wrong",
            "--world-size",
            "3",
            "--kind",
            "not-adjoint",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "W = 3" in done.stdout or "times too large" in done.stdout


def test_a_kind_says_all_there_is_to_say_of_a_finding() -> None:
    finding = Finding("not-adjoint", "text", (0,), "file:1")
    assert finding.severity == KINDS["not-adjoint"].severity
    assert KINDS["not-adjoint"].means in table()
