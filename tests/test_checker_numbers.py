"""Gradients that no ratio can be taken of: zeros, infinities, NaN."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.Generator().manual_seed(dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(3, 2, generator=rows)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        {change}
    optimizer.step()
dist.destroy_process_group()
"""


def checked(folder: Path, change: str) -> Verdict:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(change=change))
    return check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)


def test_gradients_that_are_lost_on_the_way_to_the_step_are_named(tmp_path: Path) -> None:
    verdict = checked(tmp_path, "p.grad.div_(0.0).nan_to_num_(0.0, 0.0, 0.0)")
    [finding] = verdict.findings
    assert finding.rule.id == "GM103"
    assert "every gradient is zero" in finding.message
    assert finding.at is not None
    assert finding.at.text == "optimizer.step()"


def test_non_finite_values_are_a_note_not_a_finding(tmp_path: Path) -> None:
    verdict = checked(tmp_path, "p.grad.fill_(float('nan'))")
    assert verdict.status == "complete"
    assert verdict.findings == ()
    assert any("weight is not finite" in note for note in verdict.notes)


NOT_FINITE = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randn(3, 4)
    x[rank:1] = 0
    y = model(x)
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            "loss = (y.square().sum(1) * (x.abs().sum(1) > 0)).sqrt().sum()",
            ("the backward of sqrt", "on rank 0"),
        ),
        (
            "loss = (y * torch.where(y > 9, 1.0, float('nan') if rank else 1.0)).sum()",
            ("takes a NaN", "on rank 1"),
        ),
        ("loss = y.abs().neg().sqrt().sum()", ("sqrt makes a NaN", "on rank 0")),
        ("loss = y.sum() / float('nan')", ("div makes a NaN", "on rank 0")),
    ],
)
def test_the_first_value_that_is_not_finite_is_placed(
    loss: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(NOT_FINITE.format(loss=loss))
    verdict = check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)
    line = NOT_FINITE.splitlines().index("    {loss}") + 1
    first, *_ = [note for note in verdict.notes if "weight is not finite" in note]
    assert not any("not analysed" in note for note in verdict.notes)
    assert all(text in first for text in (*expected, f"train.py:{line}"))
    assert not any(" at " in note for note in verdict.notes if note.startswith("step 2"))
