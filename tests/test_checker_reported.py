"""Sums over ranks that are printed: a warning where one process would print another number, and nothing elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script
from tests.seldom import seldom

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


torch.manual_seed(0)
if {parallel} == "data":
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    parameters = list(model.parameters())
    torch.manual_seed(1 + rank)
else:
    up = nn.Parameter(torch.randn(8, 6).chunk(world)[rank].clone())
    down = nn.Parameter(torch.randn(3, 8).chunk(world, 1)[rank].clone())
    parameters = [up, down]
    model = lambda x: Reduce.apply((x @ up.T).tanh() @ down.T)
optimizer = torch.optim.SGD(parameters, lr=0.1)
seen = 0
for step in range(3):
    x, labels = torch.randn({rows}, 6), torch.randint(3, ({rows},))
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {report}
"""
MEAN = "nn.functional.cross_entropy(model(x), labels)"
SUM = "nn.functional.cross_entropy(model(x), labels, reduction='sum') / 20"
LOSS = """shown = loss.detach().clone()
    dist.all_reduce(shown{options})
    if rank == 0:
        {print}"""
COUNT = """count = torch.tensor({counted})
    dist.all_reduce(count)
    seen += {taken}
    if rank == 0:
        {print}"""


def checked(folder: Path, *, parallel: str, report: str, loss: str = MEAN, rows: str = "10") -> Verdict:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(parallel=repr(parallel), report=report, loss=loss, rows=rows))
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert verdict.status == "complete"
    assert verdict.followed == 2
    return verdict


def of_loss(text: str = "print('loss', round(shown.item(), 5))", options: str = "") -> str:
    return LOSS.format(options=options, print=text)


def of_count(
    counted: str = "labels.numel()", taken: str = "count.item()", text: str = "print('rows', seen)"
) -> str:
    return COUNT.format(counted=counted, taken=taken, print=text)


@pytest.mark.parametrize(
    ("parallel", "report", "said"),
    [
        ("data", of_loss(), "2 times the mean over all data"),
        (
            "data",
            of_loss("print(f'{step}: {shown.item():.4f} with lr 0.1', file=sys.stderr)"),
            "2 times the mean",
        ),
        ("tensor", of_loss(), "these ranks have the same loss, so it is 2 times what one process gives"),
        ("tensor", of_count(), "these ranks have the same labels, so it is 2 times what one process gives"),
        ("tensor", of_count(taken="0", text="print(f'step {step}: {count.item()} rows')"), "the same labels"),
    ],
)
def test_printed_sums_are_warned_of_with_the_line_that_is_printed(
    parallel: str, report: str, said: str, tmp_path: Path
) -> None:
    verdict = checked(tmp_path, parallel=parallel, report=report)
    [found] = verdict.findings
    assert (found.rule.id, found.severity) == ("GM112", "warning")
    assert said in found.message
    assert "is printed, where " in found.message
    assert found.at is not None
    assert "dist.all_reduce(" in found.at.text


@pytest.mark.parametrize(
    ("parallel", "report", "loss"),
    [
        ("data", of_loss("print('loss', round(shown.item() / world, 5))"), MEAN),
        ("data", of_loss(options=", op=dist.ReduceOp.AVG"), MEAN),
        ("data", of_loss("print('loss', round(loss.item(), 5))"), MEAN),
        ("data", of_loss(), SUM),  # each rank's term of a mean over the data of both
        ("data", of_loss("print('step', step)"), MEAN),
        ("data", of_loss("print(f'{shown.item():.0f}')"), MEAN),  # too few digits to be sure
        ("data", of_count(), MEAN),  # the rows of both
        ("data", of_count(text="print('rows', seen, 'and', 20)"), MEAN),
        ("tensor", of_loss("print('loss', round(shown.item() / world, 5))"), MEAN),
        ("tensor", of_count(taken="count.item() // world"), MEAN),
        ("tensor", of_count(counted="labels.numel() * 2 * rank"), MEAN),
        ("tensor", of_count(counted="up.numel() + down.numel()"), MEAN),  # of this rank's part of the model
        ("tensor", of_count(taken="count.item() // world", text="print('rows', seen, 'of', 20)"), MEAN),
        ("data", of_loss("print(shown.item() / world, 'of the sum', shown.item())"), MEAN),
        ("data", of_loss("print('# 5 rows'), print('5 5 rows')"), MEAN),
    ],
)
def test_what_one_process_would_print_too_is_not_warned_of(
    parallel: str, report: str, loss: str, tmp_path: Path
) -> None:
    assert not checked(tmp_path, parallel=parallel, report=report, loss=loss).findings


def test_sparse_data_are_judged_as_before(tmp_path: Path) -> None:
    loss = "torch.sparse.mm(torch.eye(10).to_sparse(), x @ up.T).square().mean() + (0 * down).sum()"
    script = tmp_path / "train.py"
    text = SCRIPT.format(parallel="'tensor'", report=of_loss(), loss=loss, rows="10")
    script.write_text(
        text.replace(".chunk(world)[rank]", "").replace(".randn(10, 6)", ".randn(10, 6) * (1 + rank)")
    )
    assert [each.rule.id for each in check_script(Target(str(script)), ranks=2, steps=2).errors] == ["GM101"]


def test_a_sum_of_a_number_without_a_value_is_not_read(tmp_path: Path) -> None:
    loss = f"(functional.all_reduce(torch.empty(1, device='meta'), 'sum', dist.group.WORLD), {MEAN})[1]"
    script = tmp_path / "train.py"
    text = SCRIPT.format(parallel="'data'", report="pass", loss=loss, rows="10")
    script.write_text("import torch.distributed._functional_collectives as functional\n" + text)
    verdict = check_script(Target(str(script)), ranks=2, steps=2)
    assert (verdict.status, verdict.findings) == ("complete", ())


def drawn(seed: int) -> Iterator[tuple[str, str, bool]]:
    """Kinds of parallelism, what is printed, and whether that is twice what one process prints."""
    draws = random.Random(seed)
    while True:
        parallel, divided = draws.choice(["data", "tensor"]), draws.random() < 0.5
        by = draws.choice(["/ world", "* 0.5", "/ dist.get_world_size()"]) if divided else ""
        text = draws.choice(
            [
                "print(f'step {{step}}, loss {{{}:.5f}} ({{step + 1}} of 3)')",
                "print(dict(loss={}, step=step))",
            ]
        )
        if draws.random() < 0.5:
            yield parallel, of_loss(text.format(f"shown.item() {by}")), not divided
        else:
            taken = "count.item() // world" if divided else "count.item()"
            counted = draws.choice(["len(x)", "x.numel()", "labels.numel()"])
            report = of_count(counted=counted, taken=taken, text=text.format("seen"))
            yield parallel, report, parallel == "tensor" and not divided


@pytest.mark.parametrize("seed", seldom(range(2), [1]))
def test_random_reports_are_warned_of_where_they_are_twice_too_large(seed: int, tmp_path: Path) -> None:
    wrong = []
    for (parallel, report, twice), _ in zip(drawn(seed), range(6), strict=False):
        found = checked(tmp_path, parallel=parallel, report=report).findings
        if bool(found) is not twice:
            wrong.append((report, twice, found))
    assert not wrong
