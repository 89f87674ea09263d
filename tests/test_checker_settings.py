"""Settings of optimizers that differ between ranks: a warning where they step copies of one parameter, else nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed({seed})
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, {options})
{scheduler}
torch.manual_seed(7 + rank)
for step in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    for p in model.parameters():
        {sync}
    {before}
    optimizer.step()
    {after}
"""
SUM = "dist.all_reduce(p.grad)"
BY_OWN_ROWS = (
    "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - 1e-3 * at * (1 + rank))"
)
PLATEAU = "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"


def checked(
    folder: Path,
    *,
    options: str = "",
    scheduler: str = "",
    sync: str = SUM,
    before: str = "",
    after: str = "",
    seed: str = "0",
) -> Verdict:
    script = folder / "train.py"
    text = SCRIPT.format(
        options=options, scheduler=scheduler, sync=sync, before=before, after=after, seed=seed
    )
    script.write_text(text)
    return check_script(Target(str(script)), ranks=2, steps=2, timeout=60.0)


@pytest.mark.parametrize(
    ("given", "line", "shown"),
    [
        (
            {"options": "weight_decay=1e-4 * (1 + rank)"},
            "optimizer = ",
            "weight_decay is 0.0001 on rank 0, 0.0002 on rank 1",
        ),
        (
            {"options": "betas=(0.9, 0.999 - 0.001 * rank)"},
            "optimizer = ",
            "betas is (0.9, 0.999) on rank 0, (0.9, 0.998) on rank 1",
        ),
        ({"options": "eps=1e-8 + rank * 1e-9"}, "optimizer = ", "eps is 1e-08 on rank 0, 1.1e-08 on rank 1"),
        (
            {"scheduler": BY_OWN_ROWS, "after": "scheduler.step()"},
            "scheduler.step()",
            "lr is 9.99e-05 on rank 0, 9.98e-05 on rank 1",
        ),
        (
            {"before": "optimizer.param_groups[0]['lr'] *= 1 + 1e-3 * rank * step"},
            "optimizer = ",
            "lr is 0.0001 on rank 0, 0.0001001 on rank 1",
        ),
    ],
)
def test_a_setting_that_differs_is_named_with_its_values_and_lines(
    tmp_path: Path, given: dict[str, str], line: str, shown: str
) -> None:
    found = [each for each in checked(tmp_path, **given).findings if each.rule.id == "GM206"]
    assert len(found) == 1
    assert found[0].severity == "warning"
    assert shown in found[0].message
    assert found[0].at is not None
    assert found[0].at.text == "optimizer.step()"
    assert found[0].began is not None
    assert found[0].began.text.startswith(line)
    assert found[0].ranks == (0, 1)


def test_a_scheduler_that_is_given_another_loss_on_each_rank_is_named(tmp_path: Path) -> None:
    verdict = checked(tmp_path, scheduler=PLATEAU, after="scheduler.step(loss.detach())")
    assert [each.rule.id for each in verdict.findings] == ["GM206"]
    assert verdict.findings[0].at is not None
    assert verdict.findings[0].at.text == "scheduler.step(loss.detach())"
    assert verdict.ok


@pytest.mark.parametrize("after", ["dist.all_reduce(loss.detach_())\n    scheduler.step(loss)", "pass"])
def test_a_scheduler_that_every_rank_gives_one_value_is_right(tmp_path: Path, after: str) -> None:
    verdict = checked(tmp_path, scheduler=PLATEAU, after=after)
    assert not verdict.findings
    noted = [note for note in verdict.notes if "ReduceLROnPlateau" in note]
    assert len(noted) == (after == "pass")
    assert all("train.py:10" in note and "--steps" in note for note in noted)


@pytest.mark.parametrize(
    ("sync", "seed"),
    [("pass", "rank"), ("pass", "0")],
    ids=["a model of its own on each rank", "one model, which nothing is summed for"],
)
def test_ranks_without_copies_may_have_different_settings(tmp_path: Path, sync: str, seed: str) -> None:
    verdict = checked(
        tmp_path,
        options="weight_decay=0.1 * (1 + rank)",
        scheduler=PLATEAU,
        sync=sync,
        seed=seed,
        after="scheduler.step(loss.item())",
    )
    assert "GM206" not in {each.rule.id for each in verdict.findings}


def test_shards_of_a_flat_copy_may_have_different_settings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (Path(__file__).parent / "scripts" / "right" / "flat_master_shards.py").read_text()
    assert text.count("lr=0.01") == 1
    script.write_text(text.replace("lr=0.01", "lr=0.01 * (1 + rank)"))
    assert not check_script(Target(str(script)), ranks=2).findings
