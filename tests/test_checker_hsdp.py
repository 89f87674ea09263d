"""Shards with replicas: a missing sum over the replicas is named, and not a Function."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script
from tests.scripts import WRONG

pytestmark = pytest.mark.processes

WRAPPED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
fully_shard(model, mesh={mesh})
{more}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(2):
    loss = (model(torch.randn(4, 6)) - torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WITHOUT = "model.set_requires_all_reduce(False)"


def checked(folder: Path, text: str) -> Verdict:
    script = folder / "train.py"
    script.write_text(text)
    return check_script(Target(str(script)), ranks=4, steps=2, timeout=60.0)


def test_replicas_of_dtensors_that_are_not_reduced_lack_a_sum(tmp_path: Path) -> None:
    verdict = checked(tmp_path, WRAPPED.format(mesh='mesh["shard"]', more="pass"))
    assert {each.rule.id for each in verdict.errors} == {"GM101"}
    assert verdict.errors[0].at is not None
    assert verdict.errors[0].at.text == "optimizer.step()"
    assert verdict.errors[0].ranks == (0, 1, 2, 3)


def test_dtensors_that_never_get_a_gradient_are_named(tmp_path: Path) -> None:
    verdict = checked(
        tmp_path, WRAPPED.format(mesh="mesh", more="model.set_requires_all_reduce(False)  # never turned on")
    )
    assert {each.rule.id for each in verdict.errors} == {"GM103"}
    assert "every gradient is zero" in verdict.errors[0].message


def test_replicas_of_dtensors_that_are_reduced_are_right(tmp_path: Path) -> None:
    verdict = checked(tmp_path, WRAPPED.format(mesh="mesh", more="pass"))
    assert not verdict.findings
    assert verdict.ok


@pytest.mark.parametrize("divided", ["out / 2", "out", "out / dist.get_world_size()"])
def test_a_mean_in_the_backward_of_the_gather_is_not_at_fault(tmp_path: Path, divided: str) -> None:
    text = WRONG["hsdp_replicas_not_reduced"].path.read_text()
    assert text.count("return out / 2, None") == 1
    verdict = checked(tmp_path, text.replace("return out / 2, None", f"return {divided}, None"))
    assert {each.rule.id for each in verdict.errors} == {"GM101"}
