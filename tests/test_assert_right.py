"""`gradmesh_pytest.assert_right`: a test that checks the gradients of a training function or script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

import gradmesh as gm
from gradmesh.checker import findings, run
from gradmesh.checker.findings import Verdict
from gradmesh_pytest import assert_right

ROOT = Path(__file__).parent.parent


def train(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(3, 4, generator=data)).square().mean().backward()
        if how != "not summed":
            for p in model.parameters():
                dist.all_reduce(p.grad)
        if how != "no step":
            optimizer.step()
        optimizer.zero_grad()


def test_a_right_function_passes_and_prints_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert_right(train, "summed")
    assert "no finding; 2 ranks, 2 of 2 steps checked" in capsys.readouterr().out


def test_a_wrong_function_fails_with_rule_and_line_unless_it_is_in_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Verdict] = []

    def checked(*args: Any, **options: Any) -> Verdict:
        seen.append(seen[0] if seen else check_script(*args, **options))
        return seen[0]

    check_script = run.check_script
    monkeypatch.setattr(run, "check_script", checked)
    with pytest.raises(pytest.fail.Exception) as caught:
        assert_right(train, "not summed")
    text = str(caught.value)
    assert "GM101" in text
    assert "test_assert_right.py" in text
    assert "optimizer.step()" in text
    findings.write(tmp_path / "known.json", seen[0].findings)
    assert_right(train, "not summed", baseline=tmp_path / "known.json")


def test_a_function_of_which_nothing_was_checked_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="nothing was checked"):
        assert_right(train, "no step")


def test_a_function_that_the_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(gm.ArgumentError, match="define it at the top level"):
        assert_right(lambda: None)


def test_the_hook_and_the_action_run_a_command_that_exists() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "gradmesh check"
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = "\n".join(step.get("run", "") for step in action["runs"]["steps"])
    for option in ("--sarif", "--baseline", "-n "):
        assert option in steps
    assert set(action["inputs"]) == {"arguments", "baseline", "ranks", "sarif", "script"}
