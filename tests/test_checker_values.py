"""Values that part or stand still between steps are found, with the ranks that hold them and the line to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.report import summary
from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

BEGIN = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
params = list(model.parameters())
rows = torch.Generator().manual_seed(1 + rank)
def average():
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(world)
"""

ZERO1 = """
owners = [0, 0, 1, 1]
optimizer = torch.optim.Adam([p for p, owner in zip(params, owners) if owner == rank], lr=0.01)
for _ in range(3):
    model.zero_grad()
    model(torch.randn(5, 4, generator=rows)).square().mean().backward()
    average()
    optimizer.step()
    for i, p in enumerate(params):
        dist.broadcast(p.data, src={root})  # here
"""

CLOSURE = """
torch.set_default_dtype(torch.float64)
model = nn.Linear(5, 1)
params = list(model.parameters())
for p in params:
    nn.init.zeros_(p)
torch.manual_seed(3)
x = torch.randn(60, 5) * torch.linspace(0.2, 4, 60)[:, None]
y = (x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + torch.randn(60) > 0).double()[:, None]
x, y = x.chunk(world)[rank], y.chunk(world)[rank]
optimizer = torch.optim.LBFGS(params, lr=1.0, max_iter=6, line_search_fn="strong_wolfe")
def closure():
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    average()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {returned}
for _ in range(2):
    optimizer.step(closure)  # here
"""

FLAT = """
even, velocity = 36, [torch.zeros(36), torch.zeros(1)]
for _ in range(3):
    model.zero_grad()
    (model(torch.randn(5, 4, generator=rows)) - 1).square().mean().backward()
    flat = torch.cat([p.grad.flatten() for p in params])
    head, tail = flat[:even].clone(), flat[even:].clone()
    dist.all_reduce(head)
    {tail}
    for kept, new in zip(velocity, (head, tail)):
        kept.mul_(0.9).add_(new)
    step = torch.cat(velocity)
    at = 0
    for p in params:
        p.data.copy_(p.data - 0.05 * step[at:at + p.numel()].view_as(p))  # here
        at += p.numel()
"""

STATISTICS = """
class Normal(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
    def forward(self, x):
        return x - self.mean
model = nn.Sequential(Normal(), *model)
optimizer = torch.optim.SGD(params, lr=0.1)
for _ in range(2):
    x = torch.randn(5, 4, generator=rows)
    total = x.mean(0)
    {total}
    model[0].mean.mul_(0.9).add_(total)  # here
    optimizer.zero_grad()
    model(x).square().mean().backward()
    average()
    optimizer.step()
"""

RECEIVED = """
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / world
    @staticmethod
    def backward(ctx, g):
        return {returned}  # here
class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g
torch.manual_seed(rank)
branch = nn.Linear(4, 4)
torch.manual_seed(0)
first = nn.Linear(4, 4)
optimizer = torch.optim.SGD([*first.parameters(), *branch.parameters()], lr=0.1)
data = torch.Generator().manual_seed(3)
for _ in range(2):
    x = first(torch.randn(5, 4, generator=data))
    y = x + Mean.apply(branch(Into.apply(x)).tanh())
    optimizer.zero_grad()
    y.square().mean().backward()
    optimizer.step()
"""

EXPERTS = """
torch.manual_seed(rank)
own = nn.Linear(4, 4)
optimizer = torch.optim.SGD([*params, *own.parameters()], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(own(torch.randn(5, 4, generator=rows))).square().mean().backward()
    for p in [*params{more}]:
        dist.all_reduce(p.grad)  # here
    for p in [*params, *own.parameters()]:
        p.grad.div_(world)
    optimizer.step()
"""

SCALED = """
optimizer = torch.optim.SGD(params, lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    scale = {scale}
    (scale * model(torch.randn(5, 4, generator=rows)).square().mean()).backward()
    average()
    for p in params:
        p.grad.div_(scale)  # here
    optimizer.step()
"""

HALVED = """
optimizer = torch.optim.SGD(params, lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(5, 4, generator=rows)).square().mean().backward()
    average()
    for p in params[{first}:]:
        p.grad.div_(world)  # here
    optimizer.step()
"""

CASES = {
    "broadcast from a rank that does not step": (
        ZERO1.replace("{root}", "i % world"),
        "GM201",
        "from rank 1",
    ),
    "line search by each rank's loss": (
        CLOSURE.replace("{returned}", "loss"),
        "GM201",
        "gets the same gradient",
    ),
    "tail of a flat buffer": (FLAT.replace("{tail}", ""), "GM201", "on rank 1"),
    "statistics of each rank": (STATISTICS.replace("{total}", ""), "GM203", "on rank 1"),
    "received gradient changed in place": (
        RECEIVED.replace("{returned}", "g.div_(world)"),
        "GM104",
        "in place",
    ),
    "experts' gradients joined": (EXPERTS.replace("{more}", ", *own.parameters()"), "GM202", "on rank 1"),
    "scale of each rank": (SCALED.replace("{scale}", "2.0 ** (1 + 3 * rank)"), "GM205", "on rank 1"),
    "divided once more": (HALVED.replace("{first}", "2"), "GM103", "multiplied by 0.5"),
}
RIGHT = {
    "broadcast from the rank that steps": ZERO1.replace("{root}", "owners[i]"),
    "line search by the mean loss": CLOSURE.replace("{returned}", "total / world"),
    "whole flat buffer": FLAT.replace("{tail}", "dist.all_reduce(tail)"),
    "statistics of all ranks": STATISTICS.replace("{total}", "dist.all_reduce(total); total /= world"),
    "a new tensor of the received gradient": RECEIVED.replace("{returned}", "g / world"),
    "experts' gradients apart": EXPERTS.replace("{more}", ""),
    "one scale": SCALED.replace("{scale}", "8.0"),
}


def checked(folder: Path, text: str) -> Verdict:
    (folder / "train.py").write_text(BEGIN + text)
    return check_script(Target(str(folder / "train.py")), ranks=2)


PARTS = pytest.mark.torch_at_least(
    "2.10", "its ranks make unequal numbers of calls, so that it fails by itself"
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[PARTS] * (name == "line search by each rank's loss")) for name in CASES],
)
def test_fault_is_found_at_its_line_with_the_values_of_the_ranks(tmp_path: Path, name: str) -> None:
    text, rule, said = CASES[name]
    verdict = checked(tmp_path, text)
    assert [each.rule.id for each in verdict.findings] == [rule], verdict.findings
    (found,) = verdict.findings
    assert said in found.message
    line = next(n for n, line in enumerate((BEGIN + text).splitlines(), 1) if line.endswith("# here"))
    assert found.at is not None
    assert found.at.line == line
    assert "cut" not in found.message + found.remedy


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_program_without_the_fault_has_no_finding(tmp_path: Path, name: str) -> None:
    verdict = checked(tmp_path, RIGHT[name])
    assert not verdict.findings, verdict.findings


def test_a_check_that_followed_no_step_does_not_read_as_a_pass(tmp_path: Path) -> None:
    sparse = """
table = nn.Embedding(9, 4, sparse=True)
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    table(torch.arange(5)).square().mean().backward()
    dist.all_reduce(table.weight.grad)
    optimizer.step()
"""
    verdict = checked(tmp_path, sparse)
    assert not verdict.findings
    assert summary(verdict).startswith(
        "nothing was checked, which is not a pass; 2 ranks, 0 of 2 steps checked"
    )
    assert "train.py:" in verdict.notes[0]
