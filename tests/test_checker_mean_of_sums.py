"""Two axes: parts of a sum along one, a mean along the other; and what ranks hold of what begins as one number."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, torch.distributed as dist, torch.distributed.nn.functional as distnn
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
TP, DP = pairs[rank // 2], pairs[2 + rank % 2]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=TP)
        return grad


torch.manual_seed(0)
first, last = nn.Linear(4, 4), nn.Linear(4, 4)
bias = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([*first.parameters(), *last.parameters(), bias], lr=0.1)
ddp = nn.parallel.DistributedDataParallel(last, process_group=DP)
rows = torch.Generator().manual_seed(rank // 2)
for _ in range(2):
    optimizer.zero_grad()
    x, y = torch.randn(6, 4, generator=rows), torch.randn(6, 2, generator=rows)
    own = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
    {loss}
    loss.backward()
    for p in (*first.parameters(), *last.parameters(), bias):
        if p.grad is not None:
            {sync}
            dist.all_reduce(p.grad, group=DP)
            p.grad /= 2
    optimizer.step()
"""
PARTS = "loss = last(first(x[3 * (rank % 2) :][:3])).square().mean() / 2 + 0 * bias.sum()"
OVER_TP = "dist.all_reduce(p.grad, group=TP)"
IN_TWO = """(last(first(x[:3])).square().sum() / 48 * 2).backward()
    loss = last(first(x[3:])).square().sum() / 48 * 2 + 0 * bias.sum()"""
CUT = """out = torch.tanh(Copy.apply(first(x))[:, own] + bias)
    loss = (out - y.tanh()).square().mean() + 0 * sum(p.sum() for p in last.parameters())"""
NORMED = """h = first(x)
    total = distnn.all_reduce(torch.cat([h.sum(0), h.square().sum(0)])) / 24
    h = (h - total[:4]) * torch.rsqrt(total[4:] - total[:4].square() + 1e-3)
    loss = last(h).square().mean() / 2 + 0 * bias.sum()"""


CUT_BESIDE_DDP = CUT.replace("sum(p.sum() for p in last.parameters())", "ddp(x).sum()")


def checked(folder: Path, loss: str, sync: str) -> Verdict:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(loss=loss, sync=sync))
    return check_script(Target(str(script)), ranks=4, steps=2, timeout=60.0)


def test_a_mean_over_one_axis_of_sums_over_the_other_is_right(tmp_path: Path) -> None:
    verdict = checked(tmp_path, PARTS, OVER_TP)
    assert not verdict.findings, verdict.findings[0].message
    assert verdict.status == "complete"


def test_a_count_over_all_ranks_that_is_taken_back_is_right(tmp_path: Path) -> None:
    verdict = checked(tmp_path, IN_TWO, "pass")
    assert not verdict.findings, verdict.findings[0].message
    assert verdict.status == "complete"


def test_a_fraction_that_no_group_has_is_named(tmp_path: Path) -> None:
    verdict = checked(tmp_path, PARTS, OVER_TP + "\n            p.grad /= 4")
    assert {each.rule.id for each in verdict.errors} == {"GM109"}


@pytest.mark.parametrize("loss", [CUT, CUT_BESIDE_DDP])
def test_parts_initialized_to_zero_may_have_copies(tmp_path: Path, loss: str) -> None:
    verdict = checked(tmp_path, loss, "pass")
    assert not [each for each in verdict.errors if each.subject == "parameter 4 of shape (2,)"]
    assert any("begins as one number" in note for note in verdict.notes)


def test_factor_removed_by_a_global_norm_is_not_compared(tmp_path: Path) -> None:
    verdict = checked(tmp_path, NORMED, OVER_TP)
    assert not verdict.findings, verdict.findings[0].message
    assert verdict.status == "complete"
