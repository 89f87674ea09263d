"""A wrong gradient is placed at the operator that it first differs at, with the line that receives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

START = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

class Sum(torch.autograd.Function):  # over the ranks in forward
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g

class SumBack(torch.autograd.Function):  # over the ranks in backward
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g

def whole(*shape):
    return nn.Parameter(torch.randn(*shape, generator=alike) / 2)

def own(*shape):
    return nn.Parameter(torch.randn(*shape, generator=apart) / 2)

alike, apart = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
inputs = torch.Generator().manual_seed(5)
"""

EXPERTS = """
class Experts(nn.Module):  # {each} on each rank
    def __init__(self):
        super().__init__()
        self.enter, self.gate, self.experts = whole(6, 8), whole(8, 2 * ranks), own(2, 8, 8)

    def forward(self, x):
        x = torch.tanh(x @ self.enter)
        scores, chosen = (x @ self.gate).softmax(-1).topk(2)
        here = chosen // 2 == rank
        scores = {scores}  # entries of the other ranks' experts
        scores = SumBack.apply(scores)
        at = torch.where(here, chosen % 2, 1)
        made = torch.einsum("ti,tkij->tkj", SumBack.apply(x), self.experts[at])
        {made}
        y = made * scores.unsqueeze(-1)  # the weights
        return x + Sum.apply(y.sum(1))

model, width = Experts(), 6
"""

MASKED = "scores.masked_fill(~here, 0.0)"
PROGRAMS = {
    "router-scores-masked-without-a-sum": (
        EXPERTS,
        {"each": "two", "made": "made = made * here.unsqueeze(-1)"},
        {"scores": "SumBack.apply(scores).masked_fill(~here, 0.0)"},
        {"scores": MASKED},
        ("GM101", "scores = scores.masked_fill", "scores, chosen ="),
    ),
    "sentinel-slots": (
        EXPERTS,
        {"each": "two", "scores": "SumBack.apply(scores).masked_fill(~here, 0.0)"},
        {"made": "made = made * here.unsqueeze(-1)"},
        {"made": "pass"},
        ("GM104", "y = made * scores", "scores = SumBack"),
    ),
}
PROGRAMS["words-of-other-ranks"] = (
    """
class Words(nn.Module):  # four on each rank, each position with a weight of its own
    def __init__(self):
        super().__init__()
        self.weight, self.table, self.head = whole(5), own(4, 8), whole(8, 3)

    def forward(self, x):
        words = torch.arange(5) * 3 % (4 * ranks)
        here = words // 4 == rank
        weight = SumBack.apply(self.weight.exp()).where(here, 0.0)  # of the rank's own words
        weight = SumBack.apply(weight)
        rows = self.table[words % 4]
        {rows}
        rows = rows * weight.unsqueeze(-1)
        return Sum.apply(rows) @ self.head

model, width = Words(), 6
""",
    {},
    {"rows": "rows = rows.where(here.unsqueeze(-1), 0.0)"},
    {"rows": "pass"},
    ("GM104", "rows = rows * weight", "weight = SumBack.apply(weight)"),
)
PROGRAMS["columns-without-a-sum"] = (
    """
class Columns(nn.Module):  # Megatron's MLP beside a residual
    def __init__(self):
        super().__init__()
        self.enter, self.columns, self.rows = whole(6, 8), own(8, 4), own(4, 8)

    def forward(self, x):
        x = torch.tanh(x @ self.enter)
        taken = {taken}
        y = taken @ self.columns
        return x + Sum.apply(torch.tanh(y) @ self.rows)

model, width = Columns(), 6
""",
    {},
    {"taken": "SumBack.apply(x)"},
    {"taken": "x"},
    ("GM101", "y = taken @ self.columns", "x = torch.tanh(x @ self.enter)"),
)
PROGRAMS["bias-of-each-rank"] = (
    """
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.rows, self.bias = own(6, 4), own(4, 8), whole(8)

    def forward(self, x):
        y = torch.tanh(x @ self.enter) @ self.rows
        y = y + {before}
        y = Sum.apply(y)
        return y + {behind}

model, width = Rows(), 6
""",
    {},
    {"before": "0.0", "behind": "self.bias"},
    {"before": "self.bias", "behind": "0.0"},
    ("GM108", "y = y + self.bias", "dist.all_reduce(x)"),
)

END = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(5, width, generator=inputs)).square().mean().backward()
    optimizer.step()
"""


def _checked(folder: Path, name: str, *, right: bool) -> Verdict:
    program, both, twin, wrong, _ = PROGRAMS[name]
    script = folder / "train.py"
    script.write_text(START + program.format(**both, **(twin if right else wrong)) + END)
    return check_script(Target(str(script)), ranks=2, steps=2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrong_gradient_is_placed_where_it_first_differs_and_where_it_is_received(
    tmp_path: Path, name: str
) -> None:
    rule, first, received = PROGRAMS[name][-1]
    verdict = _checked(tmp_path, name, right=False)
    assert [each.rule.id for each in verdict.errors] == [rule], verdict
    (found,) = verdict.errors
    places = [place.text if place else "" for place in (found.at, found.received or found.began)]
    assert places[0].startswith(first), (places, found.message)
    assert places[1].startswith(received), (places, found.message)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_twin_is_not_accused(tmp_path: Path, name: str) -> None:
    verdict = _checked(tmp_path, name, right=True)
    assert not verdict.findings, verdict
    assert verdict.ok
    assert verdict.followed == 2
