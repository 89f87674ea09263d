"""What an audit takes, refuses, returns and prints; on threads and on processes, and as a command."""

from __future__ import annotations

import ast
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
from gradmesh.verify.auditing.findings import KINDS, table
from tests import audit_targets
from tests.gloo_lines import without_gloo_lines

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


@pytest.mark.parametrize("columns", [50, 90, 140])
def test_output_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = without_gloo_lines(_run("tests.audit_targets:wrong").stdout)
    lines = [line for line in text.splitlines() if len(line.split()) > 1]
    assert columns - 20 < max(map(len, lines)) <= columns


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


def test_only_the_requested_kinds_are_reported() -> None:
    assert audit(audit_targets.wrong, kinds=["gradient-overwritten"]).kinds == ("gradient-overwritten",)
    with pytest.raises(gm.ArgumentError, match="unknown kind of finding"):
        audit(audit_targets.right, kinds=["nothing"])


def test_each_operand_has_a_separate_type() -> None:
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
    wrong = audit(lambda: ((lambda x: Squares.apply(x)), torch.rand(2, 3) + 1), arrow="V -> V")
    assert wrong.kinds[0] == "not-adjoint"
    assert "3 times too large" in wrong.findings[0].text
    by_law = audit(lambda: ((lambda x: Squares.apply(x)), torch.rand(2, 3) + 1))  # on 3 ranks, as I -> P
    assert "unusual-reading" in by_law.kinds


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
        (audit_targets.broken, "must return"),
        (audit_targets.raising, "no data"),
        (audit_targets.refusing, "on rank 0"),
    ],
)
def test_functions_that_cannot_be_audited_raise_a_gradmesh_error(build: Any, text: str) -> None:
    with pytest.raises(gm.GradmeshError, match=text):
        audit(build)


def test_a_function_that_hangs_is_a_finding() -> None:
    began = time.monotonic()
    found = audit(audit_targets.sleeping, timeout=0.5)
    assert found.kinds == ("hangs",)
    assert time.monotonic() - began < 10


def test_a_function_that_crashes_its_process_is_a_finding_with_isolate() -> None:
    assert audit(audit_targets.ending, isolate=True).kinds == ("aborts",)


class KeepsGradient(torch.autograd.Function):
    """A ring shift that hands back gradients as they came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gm.shift(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class WrongRows(torch.autograd.Function):
    """The local rows; their gradient goes to the rows of the next rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(gm.world_size())[gm.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        size = gm.world_size()
        return torch.cat([grad if at == (gm.rank() + 1) % size else 0 * grad for at in range(size)])


class ShiftsOn(KeepsGradient):
    """A ring shift whose gradient is shifted in the same direction."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gm.shift(grad)


class CopyToRegion(torch.autograd.Function):
    """The identity, whose gradient has to be summed and is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class BroadcastsAndSumsEverywhere(torch.autograd.Function):
    """Right for an operand that all ranks share; otherwise only the first rank's operand has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gm.broadcast(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gm.all_reduce(grad, dst=gm.R)


LAW = ["not-adjoint", "unusual-reading"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("fn", "reading", "meant"),
    [
        (KeepsGradient, "P -> P", "V -> V"),
        (WrongRows, "R -> P", "R -> V"),
        (BroadcastsAndSumsEverywhere, "I -> R", "V -> R"),
    ],
)
def test_unlikely_interpretation_warns_and_the_intended_one_can_be_requested(
    fn: Any, reading: str, meant: str, size: int
) -> None:
    def asked(arrow: str | None = None) -> Any:
        return audit(lambda: (fn.apply, torch.randn(2 * size, 2)), arrow=arrow, world_size=size, kinds=LAW)

    found = asked()
    assert found.kinds == ("unusual-reading",)
    assert reading in found.findings[0].text
    assert __file__ in str(found.findings[0].line)
    assert asked(reading).ok
    wrong = asked(meant)
    assert wrong.kinds == ("not-adjoint",)
    assert meant in wrong.findings[0].text
    assert wrong.arrow == meant


@pytest.mark.parametrize("arrow", [None, "V -> R"])
def test_a_factor_of_scale_gradient_is_named_and_findings_stand_at_the_function(arrow: str | None) -> None:
    def halved(x: Tensor) -> Tensor:
        return gm.scale_gradient(gm.all_gather(x), 0.5)

    found = audit(lambda: (halved, torch.randn(2, 2)), arrow=arrow)
    assert found.kinds == ("not-adjoint", "forward-mode-wrong")
    for finding in found.findings:
        assert "the factor of gm.scale_gradient: if it is meant, audit without it" in finding.text
        assert __file__ in str(finding.line)
    assert "too small by 2 as V -> R" in found.findings[0].text
    plain = audit(lambda: (lambda x: x + 0.5 * gm.all_gather(x)[:2].detach(), torch.randn(2, 2)), kinds=LAW)
    assert "scale_gradient" not in plain.findings[0].text


class MeanWithSummedGradient(torch.autograd.Function):
    """W times too large, and right for equal operands alone, as which it could do without communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gm.all_reduce(x, dst=gm.R) / gm.world_size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gm.all_reduce(grad, dst=gm.R)


def test_a_mean_whose_backward_sums_is_wrong_though_right_for_equal_operands() -> None:
    found = audit(lambda: (MeanWithSummedGradient.apply, torch.randn(2)), kinds=LAW)
    assert found.kinds == ("not-adjoint",)
    assert "W = 3 times too large" in found.findings[0].text


def test_a_ring_that_turns_the_wrong_way_back_is_found_by_default() -> None:
    assert audit(lambda: (ShiftsOn.apply, torch.randn(2)), kinds=LAW).kinds == ("not-adjoint",)


def test_the_function_name_suggests_the_reading() -> None:
    found = audit(lambda: (CopyToRegion.apply, torch.randn(2)), kinds=LAW)
    assert found.kinds == ("unusual-reading",)
    assert "CopyToRegion suggests I -> R" in found.findings[0].text
    assert audit(lambda: (CopyToRegion.apply, torch.randn(2)), arrow="V -> V", kinds=LAW).ok


def test_a_function_without_a_jvp_is_ok_unless_forward_mode_is_required() -> None:
    found = audit(audit_targets.without_jvp)
    assert found.kinds == ("forward-mode-missing",)
    assert found.ok
    assert "no finding, 1 note" in str(found)
    assert not audit(audit_targets.without_jvp, kinds="forward-mode-missing").ok


def test_a_note_does_not_fail_an_isolated_audit() -> None:
    found = audit(audit_targets.without_jvp, isolate=True)
    assert found.kinds == ("forward-mode-missing",)
    assert found.ok


def test_a_backward_that_does_not_sum_states_its_assumption_about_the_losses() -> None:
    slices = audit(lambda: ((lambda x: gm.all_gather(x, dst=gm.I)), torch.randn(2)), kinds=LAW)
    assert slices.ok
    assert "right only if all ranks compute the same loss" in slices.assumes[0]
    assert "wrong for rank-local losses" in slices.assumes[0]
    assert "as gm.all_gather(x) does" in slices.assumes[0]
    assert "V -> R" in slices.assumes[0]
    assert slices.assumes[0][:20] in str(slices)
    assert json.loads(slices.json())["assumes"] == list(slices.assumes)
    assert audit(audit_targets.right, kinds=LAW).assumes == ()
    assert audit(audit_targets.right, arrow="V -> R", kinds=LAW).assumes == ()


@pytest.mark.parametrize("arrow", ["V", "V -> X", "V, V -> R", "V -> R -> V", ""])
def test_an_invalid_arrow_raises(arrow: str) -> None:
    with pytest.raises(gm.ArgumentError, match="invalid arrow"):
        audit(audit_targets.right, arrow=arrow)


def test_a_value_whose_shape_differs_between_ranks_is_v() -> None:
    def build() -> Any:
        return (lambda x: gm.all_gather(x, sizes="auto")), torch.randn(1 + gm.rank())

    assert audit(build, arrow="V -> R", kinds=LAW).ok
    found = audit(build, arrow="R -> R", kinds=LAW)
    assert "the shape of operand 0 differs between ranks" in found.findings[0].text


def test_strided_tensors_are_tried_on_gloo_where_torch_distributed_is_called() -> None:
    strided = ["strided-operand", "strided-gradient"]
    found = audit(audit_targets.memory_order, kinds=strided, timeout=120)
    assert found.kinds == ("strided-operand",)
    assert "Gloo" in found.findings[0].text
    assert audit(audit_targets.memory_order, kinds=strided, gloo=False).ok


def test_a_crash_on_gloo_is_a_finding_and_the_audit_continues() -> None:
    found = audit(audit_targets.ending_on_gloo, kinds=["strided-gradient", *LAW], timeout=120)
    assert found.kinds == ("strided-gradient",)
    assert "Gloo" in found.findings[0].text
    assert "process exits" in found.findings[0].text
    assert found.arrows == ("P -> R",)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_and_threads_have_equal_findings(backend: str) -> None:
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


def test_a_rank_that_dies_is_a_finding_and_the_audit_continues() -> None:
    found = audit(audit_targets.ending_on_strides, backend="gloo", kinds=["strided-gradient", "not-adjoint"])
    assert found.kinds == ("strided-gradient",)
    assert "process exits" in found.findings[0].text
    assert found.arrows


def test_exit_status_of_the_command_matches_its_findings() -> None:
    result = _run("tests.audit_targets:right")
    assert result.exit_code == 0, result.output
    assert "no finding" in result.output
    result = _run(
        "tests.audit_targets:right", f"{ROOT}/tests/audit_targets.py:wrong", "--kind", "not-adjoint"
    )
    assert result.exit_code == 1
    assert "not-adjoint" in result.output
    assert _run("tests.audit_targets:right", "--arrow", "V -> R", "--kind", "not-adjoint").exit_code == 0
    result = _run("tests.audit_targets:right", "--arrow", "V -> I", "--kind", "not-adjoint")
    assert result.exit_code == 1
    assert "V -> I" in result.output
    for target in ("tests.audit_targets:broken", "tests.audit_targets:none", "no_module:f", "words"):
        result = _run(target)
        assert result.exit_code == 2
        assert "gradmesh.verify.audit" in result.stderr


def test_the_command_prints_a_line_of_json_for_each() -> None:
    result = _run(
        "tests.audit_targets:right", "tests.audit_targets:broken", "--json", "--kind", "not-adjoint"
    )
    assert result.exit_code == 2
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["ok"]
    assert first["target"] == "tests.audit_targets:right"
    assert "must return" in second["error"]


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


class _Parsing:
    """`ast.parse`, slow enough for threads to meet in it; notes how many were inside at once."""

    def __init__(self) -> None:
        self.parse, self.inside, self.most, self.calls = ast.parse, 0, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.inside += 1
        self.calls += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.05)
        try:
            return self.parse(*args, **kwargs)
        finally:
            self.inside -= 1


class _Called:
    """Called as a class: its line is found by parsing the file."""

    def __new__(cls, x: Tensor) -> Any:
        return gm.all_gather(x)


def _raises_in_a_part_of_a_line() -> None:
    part = [1, 2]
    "".join(["a", *map(str, part)]) + part[0]  # type: ignore[operator]


def test_ranks_that_are_threads_parse_source_code_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 raises SystemError where two threads are in `ast.parse` at once."""
    monkeypatch.setattr(ast, "parse", parsing := _Parsing())
    with pytest.raises(gm.RankError, match="TypeError"):
        gm.launch(_raises_in_a_part_of_a_line, 3, backend="threads")
    failed = parsing.calls
    assert audit(lambda: (_Called, torch.randn(2)), world_size=3, kinds=["not-adjoint"]).arrows
    if sys.version_info < (3, 13):  # which knows the line of a class without parsing
        assert parsing.calls > failed
    assert failed >= 2
    assert parsing.most == 1
