"""Random programs whose tensors are annotated with spmd_types: as they are, or one of them wrongly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gradmesh.checker.run import Target, check_script
from tests.seldom import seldom

pytestmark = pytest.mark.processes

HEAD = """
import spmd_types as spmd
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world, rank = dist.group.WORLD, dist.get_rank()
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(4, 4))
optimizer = torch.optim.SGD([weight], lr=0.01)
own, terms = 1.0 + rank, []
for step in range(2):
    x = torch.randn(3, 4) @ weight
"""
TAIL = """
    optimizer.zero_grad()
    sum(terms).backward()
    terms.clear()
    dist.all_reduce(weight.grad)
    optimizer.step()
"""
USES = {
    "R": ("(x * {n}).sin()", "y * own"),  # the same on all ranks, and used differently
    "I": ("(x * {n}).sin()", "y * {n}"),
    "V": ("(x * {n} * own).sin()", "y * own"),
    "P": ("(x * {n} * own).sin()", "spmd.all_reduce(y, world, src=spmd.P, dst=spmd.I)"),
}
WRONG = {"V": "RI", "P": "RI", "R": "IP"}
"""Of each type, those that its values or gradients contradict."""


def program(seed: int, wrong: bool) -> tuple[str, int]:
    """A program, and the number of its line whose annotation is wrong; 0: none is."""
    draw = random.Random(seed)
    kinds = draw.choices(list(USES), k=5)
    at = draw.choice([at for at, kind in enumerate(kinds) if kind in WRONG] or [-1]) if wrong else -1
    lines, wrong_line = HEAD.splitlines(), 0
    for number, kind in enumerate(kinds):
        made, used = (text.format(n=draw.randint(2, 5)) for text in USES[kind])
        said = draw.choice(WRONG[kind]) if number == at else kind
        lines.append(f"    y = spmd.assert_type({made}, {{world: spmd.{said}}})")
        wrong_line = len(lines) if number == at else wrong_line
        lines.append(f"    terms.append(({used}).square().sum())")
    return "\n".join(lines) + TAIL, wrong_line


def judged(seed: int, wrong: bool, folder: Path) -> None:
    text, line = program(seed, wrong)
    path = folder / "program.py"
    path.write_text(text)
    verdict = check_script(Target(str(path)), ranks=2 + seed % 2, steps=2)
    found = [each.at and each.at.line for each in verdict.findings if each.rule.id == "GM305"]
    assert found == ([line] if line else []), text


@pytest.mark.torch_at_least("2.10", "spmd_types cannot be imported")
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("seed", seldom(range(3), [1]))
def test_a_wrong_annotation_is_found_at_its_line_and_no_right_one(
    seed: int, wrong: bool, tmp_path: Path
) -> None:
    judged(seed, wrong, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("seed", range(3, 30))
def test_more_wrong_annotations_are_found(seed: int, wrong: bool, tmp_path: Path) -> None:
    judged(seed, wrong, tmp_path)
