"""Random training scripts against gradmesh check, and that the attack sees where the check is wrong."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from gradmesh.checker.findings import RULES, Finding, Verdict
from tools.check_attack import command
from tools.check_attack.attack import attacked, check, reduced
from tools.check_attack.mutants import KINDS, mutants
from tools.check_attack.oracle import reference_of
from tools.check_attack.programs import SHARDED, Placed, Program, draw, is_sound, simpler
from tools.check_attack.ranks import warm
from tools.check_attack.texts import text_of

SMALL = Program(5, pieces=(Placed("Norm", "whole"),), sync="flat")


def blind(path: Path, ranks: int) -> Verdict:
    return Verdict((), (), ranks, 2, {}, "complete")


def suspicious(path: Path, ranks: int) -> Verdict:
    found = Finding(RULES["GM101"], "everything is wrong", None, None, (0,), "")
    return Verdict((found,), (), ranks, 2, {}, "complete")


def broken(path: Path, ranks: int) -> Verdict:
    raise ZeroDivisionError(f"{path} on {ranks}")


def test_programs_are_scripts_and_depend_on_their_seed_alone() -> None:
    texts = [text_of(draw(seed)) for seed in range(200)]
    for text in texts:
        ast.parse(text)
        assert "gradmesh" not in text
    assert texts == [text_of(draw(seed)) for seed in range(200)]
    assert len(set(texts)) == 200


def test_every_kind_of_change_is_made_and_is_a_script() -> None:
    made = [mutant for seed in range(200) for mutant in mutants(text_of(draw(seed)))]
    assert {mutant.kind for mutant in made} == set(KINDS)
    for mutant in made[::7]:
        ast.parse(mutant.text)


def test_simplification_is_sound_and_terminates() -> None:
    for seed in range(50):
        program, steps = draw(seed), 0
        while less := simpler(program):
            assert all(is_sound(each) for each in less)
            program, steps = less[-1], steps + 1
            assert steps < 100


def test_sharded_optimizers_are_drawn() -> None:
    drawn = [draw(seed).sync for seed in range(200)]
    assert all(drawn.count(sync) >= 3 for sync in SHARDED)


@pytest.mark.processes
@pytest.mark.parametrize("sync", sorted(SHARDED))
def test_a_sharded_optimizer_is_proven_right_and_not_accused_and_its_fault_is_found(
    tmp_path: Path, sync: str
) -> None:
    warm()
    fault = {"zero1": "not sent back", "zero2": "not sent back", "master": "own part of the gradient"}[sync]
    found = attacked(replace(SMALL, sync=sync), tmp_path, 1, kinds=[fault])
    assert [(each.kind, each.wrong) for each in found] == [("", ""), (fault, "")]
    assert found[0].truth == "right"
    assert found[1].truth.startswith("wrong")


@pytest.mark.processes
def test_a_program_that_is_not_right_is_not_proven(tmp_path: Path) -> None:
    warm()
    path = tmp_path / "program.py"
    path.write_text(text_of(SMALL).replace("flat /= DP_SIZE", "flat[:8] /= DP_SIZE"))
    assert "from one process" in str(reference_of(SMALL, path))


@pytest.mark.processes
def test_the_attack_sees_a_check_that_is_blind_suspicious_or_broken(tmp_path: Path) -> None:
    warm()

    def ways(checked: object) -> list[tuple[str, str]]:
        found = attacked(SMALL, tmp_path, 1, checked=checked, kinds=["left out of the sum"])  # type: ignore[arg-type]
        return [(each.kind, each.wrong) for each in found]

    assert ways(blind) == [("", ""), ("left out of the sum", "missed")]
    assert ways(suspicious) == [("", "accused"), ("left out of the sum", "")]
    assert ways(broken) == [("", "crashed"), ("left out of the sum", "crashed")]
    assert ways(check) == [("", ""), ("left out of the sum", "")]


@pytest.mark.processes
def test_disagreement_is_reduced(tmp_path: Path) -> None:
    warm()
    program = replace(SMALL, extras=frozenset({"log"}))
    accused = attacked(program, tmp_path, 0, checked=suspicious)[0]
    less, still = reduced(program, accused, tmp_path, seconds=30.0, checked=suspicious)
    assert still.wrong == "accused"
    assert not less.extras
    assert not less.pieces
    assert less.sync == "each"


@pytest.mark.processes
def test_a_few_programs_and_their_mutants_are_judged_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--programs", "2", "--seed", "201", "--mutants", "1"]) == 0
    assert "2 programs, 2 mutants" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_many_programs_and_their_mutants_are_judged_right() -> None:
    assert command.main(["--programs", "100", "--seed", "3000", "--mutants", "3"]) == 0
