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

STAGES = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
name = "last" if rank else "first"


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_parameter(name, nn.Parameter(torch.randn(8)))
        self.register_parameter(f"{{name}}_bias", nn.Parameter(torch.randn(8)))

    def forward(self, x):
        return x * self.get_parameter(name) + self.get_parameter(f"{{name}}_bias")


stage = Stage()
{sent}
rows = torch.Generator().manual_seed(rank)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    loss = stage(torch.randn(3, 8, generator=rows)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
"""

DRAWN = "torch.linspace(-1.0, 1.0, 8)"


def rules(folder: Path, other: str, after: str = "") -> set[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(one=DRAWN, other=other, after=after))
    verdict = check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)
    assert verdict.status == "complete"
    return {each.rule.id for each in verdict.findings}


def test_values_equal_after_a_step_are_not_tied(tmp_path: Path) -> None:
    assert rules(tmp_path, f"{DRAWN} + 1", "model.other.data.copy_(model.one)") == set()


def test_values_equal_only_at_first_are_not_tied(tmp_path: Path) -> None:
    assert rules(tmp_path, DRAWN) == set()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("", set()),
        ("dist.broadcast(stage.get_parameter(name).data, src=0)", {"GM204"}),
        ("dist.all_reduce(stage.get_parameter(name).detach().mul_(0.5))", {"GM204"}),
        ("[dist.broadcast(p.data, src=0) for p in stage.parameters()]", set()),
    ],
    ids=["of one seed", "broadcast", "averaged", "whole stages that begin alike"],
)
def test_copies_under_two_names_are_tied_where_one_was_made_of_the_other(
    tmp_path: Path, sent: str, expected: set[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STAGES.format(sent=sent))
    verdict = check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)
    assert (verdict.status, verdict.steps, verdict.notes) == ("complete", 2, ())
    assert {each.rule.id for each in verdict.findings} == expected
    assert {each.subject for each in verdict.findings} <= {"last"}
