"""The checks of `gradmesh.verify` name the fault of wrong programs, and report nothing about right ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import gradmesh as gm
from gradmesh.verbs import collectives
from gradmesh.verify.auditing.findings import KINDS
from tests.gloo_lines import without_gloo_lines
from tests.zoo import PROGRAMS
from tests.zoo.missed import MISSED
from tests.zoo.program import Program
from tests.zoo.running import Outcome, run
from tools import zoo

DOCS = Path(__file__).parent.parent / "docs"

WRONG = [program for program in PROGRAMS.values() if program.expected is not None]
RIGHT = [program for program in PROGRAMS.values() if program.expected is None]


def quick() -> set[str]:
    """One program for each kind that each check can report, and every fourth right one; the others are slow.

    So are those that need processes.
    """
    threads = [program for program in WRONG if "backend" not in program.options]
    first = {(program.check, program.expected): program.name for program in reversed(threads)}
    return {*first.values(), *(program.name for program in RIGHT[::4])}


def marked(program: Program) -> object:
    marks = [] if program.name in QUICK else [pytest.mark.slow]
    if program.name in MISSED:
        marks.append(pytest.mark.xfail(reason=MISSED[program.name], strict=True))
    return pytest.param(program, marks=marks, id=program.name)


QUICK = quick()


@pytest.mark.parametrize("program", [marked(program) for program in PROGRAMS.values()])
def test_program_is_reported_as_listed(program: Program) -> None:
    outcome = run(program)
    assert outcome.right(program), f"expected {program.expected}, reported {outcome.reported}\n{outcome.text}"


def test_every_kind_of_finding_has_a_wrong_program() -> None:
    assert {program.expected for program in WRONG if program.check == "audit"} == set(KINDS)


def test_every_hypothesis_has_a_wrong_program() -> None:
    hypotheses = {
        "W times too large",
        "1/W",
        "sum over ranks missing",
        "summed twice",
        "another rank's slice",
        "mean of local means",
        "dropped on ranks that did not use the output",
        "conjugate missing",
        "one term of several scaled",
        "none fits",
    }
    assert hypotheses <= {program.expected for program in WRONG}


def test_the_zoo_has_every_verb_and_every_drop_in_right() -> None:
    verbs = set(collectives.__all__) - {"recv", "send", "sizes"} | {"send_and_recv"}
    named = {program.name.removeprefix("verb_") for program in RIGHT}
    assert verbs <= named
    modules = {"fairchem", "gp_utils", "ksuit", "megatron", "torch_nn", "towhee"}
    assert modules == set(gm.compat.__all__)
    assert all(any(program.name.startswith(module) for program in RIGHT) for module in modules)


def test_at_least_95_percent_of_the_reports_on_wrong_programs_are_right_and_all_on_right_ones() -> None:
    missed = [PROGRAMS[name] for name in MISSED]
    assert len(missed) <= 0.05 * len(WRONG)
    assert all(program.expected is not None for program in missed)
    assert len(RIGHT) >= 30


@pytest.mark.parametrize(
    ("expected", "also", "reported", "right"),
    [
        ("not-adjoint", (), ("not-adjoint",), True),
        ("not-adjoint", (), (), False),
        ("not-adjoint", (), ("not-adjoint", "vmap-wrong"), False),
        ("not-adjoint", ("vmap-wrong",), ("not-adjoint", "vmap-wrong"), True),
        ("not-adjoint", ("vmap-wrong",), ("vmap-wrong",), False),
        (None, (), (), True),
        (None, (), ("forward-mode-missing",), False),
    ],
)
def test_a_report_is_right_if_it_has_the_kind_and_no_false_alarm(
    expected: str | None, also: tuple[str, ...], reported: tuple[str, ...], right: bool
) -> None:
    program = Program("any", "audit", lambda: None, expected, frozenset(also), "", {})
    assert Outcome("any", reported, "", 0.0).right(program) is right


def test_a_check_that_fails_by_itself_is_a_wrong_report() -> None:
    def build() -> None:
        raise ValueError("no such thing")

    for expected in ("not-adjoint", None):
        program = Program("any", "audit", build, expected, frozenset(), "", {})
        assert not run(program).right(program)


def test_page_lists_every_program_with_its_expected_finding() -> None:
    text = (DOCS / "reports" / "known-bad-programs.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([^|]*) \|", text, re.MULTILINE))
    assert rows == {program.name: program.expected or "none" for program in PROGRAMS.values()}
    missed = set(re.findall(r"^\| `(\w+)` \|.*\| wrong \|", text, re.MULTILINE))
    assert missed == set(MISSED)


def test_page_about_all_gather_shows_the_output_of_the_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "is-my-collective-right.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:1]
    (shown,) = re.findall(r"```text\n(AllGather: .*?)```", text, re.DOTALL)
    (tmp_path / "gathering.py").write_text(code)
    runpy.run_path(str(tmp_path / "gathering.py"), run_name="__main__")
    printed = without_gloo_lines(capsys.readouterr().out)
    assert without_seconds(printed.replace(f"{tmp_path}/", "")) == without_seconds(shown)


def without_seconds(report: str) -> str:
    return re.sub(r"\d+\.\d s\)", "S s)", report)


def test_the_tool_prints_a_row_and_ends_with_the_status_of_the_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zoo.main(["--only", "sum_with_a_local_jvp"]) == 0
    assert "forward-mode-wrong" in capsys.readouterr().out
    monkeypatch.setattr(zoo, "run", lambda program: Outcome(program.name, (), "", 0.0))
    assert zoo.main(["--only", "sum_with_a_local_jvp"]) == 1


ARROWS = {
    "verb_all_gather": "V -> R",
    "verb_all_gather_invariant": "V -> I",
    "verb_all_gather_of_uneven_parts": "V -> R",
    "verb_reduce_scatter": "P -> V",
    "verb_all_reduce": "P -> R",
    "verb_all_reduce_invariant": "P -> I",
    "verb_all_reduce_mean": "P -> R",
    "verb_all_to_all": "V -> V",
    "verb_broadcast": "V -> R",
    "verb_reduce": "P -> V",
    "verb_gather": "V -> V",
    "verb_scatter": "V -> V",
    "verb_shift": "V -> V",
    "verb_halo_exchange": "V -> V",
    "verb_exscan": "V -> V",
    "verb_replicate": "I -> R",
    "verb_shard": "I -> V",
    "verb_shard_replicated": "R -> V",
    "verb_convert": "R -> P",
    "verb_convert_to_invariant": "R -> I",
    "megatron_copy_to_tensor_model_parallel_region": "I -> R",
    "megatron_gather_from_tensor_model_parallel_region": "V -> I",
    "gp_utils_reduce_from_model_parallel_region": "P -> I",
    "ksuit_AllGatherGradAutograd": "V -> R",
    "towhee_AllGather": "V -> I",
}
OTHERS = {"V -> R": "V -> I", "V -> I": "V -> R", "P -> R": "P -> I", "P -> I": "P -> R", "I -> R": "I -> I"}


@pytest.mark.parametrize("name", ARROWS)
def test_the_audit_reads_a_verb_as_its_table_does_and_not_by_the_other_convention(name: str) -> None:
    found = gm.verify.audit(PROGRAMS[name].build, kinds=["not-adjoint"], world_size=2)
    assert found.holds(ARROWS[name]), found.arrows
    other = OTHERS.get(ARROWS[name])
    assert other is None or not found.holds(other), found.arrows
