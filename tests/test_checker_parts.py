"""A part of a gradient that the program changes by hand: a note says that the gradient was not judged."""

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
kept, other = (nn.Parameter(torch.randn(4, 4, dtype=torch.{dtype})) for _ in range(2))
optimizer = torch.optim.SGD([kept, other], lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    x = torch.randn(6, 4, dtype=torch.{dtype})
    (x @ kept @ other).abs().square().mean().backward()
    for p in (kept, other):
        dist.all_reduce(p.grad)
    p = kept
    {change}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        ("float32", "p.grad[0].zero_()"),
        ("float32", "p.grad[1].mul_(3)"),
        ("float32", "p.grad.view(-1)[:3] *= 2"),
        ("float32", "p.grad[2, 1:].add_(1)"),
        ("complex64", "p.grad.imag.mul_(2)"),
        ("complex64", "p.grad.real.zero_()"),
    ],
)
def test_a_change_of_a_part_of_a_gradient_is_a_note_that_names_it_and_its_line(
    tmp_path: Path, dtype: str, change: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(dtype=dtype, change=change))
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings, verdict.findings[0].message
    assert verdict.status == "complete"
    line = SCRIPT.splitlines().index("    {change}") + 1
    noted = [note for note in verdict.notes if "of a part of it" in note]
    assert noted
    assert all(f"train.py:{line})" in note and "not compared" in note for note in noted), noted


@pytest.mark.parametrize(
    "change", ["p.grad.view(-1).mul_(0.5); other.grad.mul_(0.5)", "p.grad[0].clone().zero_()"]
)
def test_full_gradient_through_a_view_and_copied_shard_are_not_shards(tmp_path: Path, change: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(dtype="float32", change=change))
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings
    assert not [note for note in verdict.notes if "of a part of it" in note]


CLIPPED = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
weight = nn.Parameter(torch.randn(4, 6).chunk(2, 1)[rank].contiguous())
bias = nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight, bias], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    x, y = torch.randn(8, 4), torch.randn(8, 6).chunk(2, 1)[rank]
    (x @ weight + bias - y).square().sum().backward()
    torch.nn.utils.clip_grad_value_([weight, bias], 2.0)
    optimizer.step()
"""


def test_shards_that_begin_as_zeros_may_be_clipped_by_value(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CLIPPED)
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings, verdict.findings[0].message


OWNED = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 4))
parameters = list(model.parameters())
for p in parameters:
    dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(parameters[rank::2], lr=0.1)
data = torch.Generator().manual_seed(5 + rank)
for _ in range(2):
    model.zero_grad()
    x, y = torch.randn(6, 3, generator=data), torch.randint(4, (6,), generator=data)
    (nn.functional.cross_entropy(model(x), y) / 2).backward()
    for at, p in enumerate(parameters):
        dist.reduce(p.grad, at % 2)
        if at % 2 != rank:
            p.grad = None
    optimizer.step()
    for at, p in enumerate(parameters):
        dist.broadcast(p.data, at % 2)
"""


def test_a_rank_may_step_ones_and_zeros_that_other_ranks_only_use(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWNED)
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert not verdict.findings, verdict.findings[0].message
    assert verdict.followed


ROUNDED = """
import torch
import torch.distributed as dist

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        part = (8 * x).{rounded}
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts).float() / 8

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for step in range(2):
    optimizer.zero_grad()
    ((1 + dist.get_rank()) * Gather.apply(model(torch.randn(2, 3))).square()).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
"""


@pytest.mark.parametrize("rounded", ["round()", "trunc()"])
def test_a_straight_through_gradient_of_what_is_rounded_and_sent_is_not_compared(
    rounded: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ROUNDED.format(rounded=rounded))
    verdict = check_script(Target(str(script)), ranks=2)
    assert (verdict.status, verdict.findings) == ("complete", ())
    assert "Gather sends what it has rounded" in verdict.notes[0]


@pytest.mark.parametrize(
    "inside",
    ["x = x * x.abs().sum(-1, keepdim=True).bool()", "x = torch.fft.ifft(x.to(torch.complex64)).real"],
)
def test_a_function_that_sends_what_is_not_rounded_is_judged(inside: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    wrong = ROUNDED.replace("        part = (8 * x).{rounded}\n", f"        {inside}\n        part = 8 * x\n")
    script.write_text(wrong.replace("        dist.all_reduce(grad)\n", "", 1))
    verdict = check_script(Target(str(script)), ranks=2)
    assert {each.rule.id for each in verdict.findings} <= {"GM104", "GM105"}
    assert verdict.findings
