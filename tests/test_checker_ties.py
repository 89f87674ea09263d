"""Parameters of two names that begin alike on two ranks: tied on purpose, or equal by chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Module()
model.one, model.other = nn.Parameter({one}), nn.Parameter({other})
rows = torch.Generator().manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    x = torch.randn(3, 8, generator=rows)
    (x * model.one + x.square() * model.other).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    {after}
"""

DRAWN = "torch.linspace(-1.0, 1.0, 8)"


def rules(folder: Path, other: str, after: str = "") -> set[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(one=DRAWN, other=other, after=after))
    verdict = check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)
    assert verdict.status == "complete"
    return {each.rule.id for each in verdict.findings}


def test_what_is_alike_after_a_step_is_not_tied(tmp_path: Path) -> None:
    assert rules(tmp_path, f"{DRAWN} + 1", "model.other.data.copy_(model.one)") == set()


def test_copies_under_two_names_that_get_different_gradients_are_named(tmp_path: Path) -> None:
    assert rules(tmp_path, DRAWN) == {"GM204"}
