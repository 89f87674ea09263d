"""Random programs, on ranks that do different things: no claim of `gm.typed` is wrong."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from tools.operators import attack
from tools.operators.attack import OPERATORS


def test_no_claim_about_random_programs_is_wrong() -> None:
    report = attack.attack(12, seed=0)
    assert not report.wrong, str(report)
    assert {"V", "R", "I", "P"} <= set(report.call_checks)
    assert len(report.findings) >= 5


@pytest.mark.slow
def test_no_claim_about_many_random_programs_is_wrong() -> None:
    report = attack.attack(400, seed=1000)
    assert not report.wrong, str(report)


def test_a_claim_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that writes the rank into its result unseen by the tracer."""

    def hidden(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        rank = gm.rank() if dist.is_initialized() else 0
        ctypes.c_float.from_address(y.data_ptr()).value += rank
        return y

    monkeypatch.setitem(OPERATORS, "neg", (1, hidden))
    monkeypatch.setattr(attack, "drawn", lambda seed: [("data", (), 1), ("neg", (0,), 2)])
    assert len(attack.attack(1).wrong) == 1
