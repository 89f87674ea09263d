"""Random programs under random schedules, and that the attack finds a simulator that is wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gradmesh.verify.simulator.simulate import Schedule
from gradmesh.verify.simulator.trace import Notes
from tools.simulator import attack as attacking
from tools.simulator.attack import attack


def test_random_programs_equal_unscheduled_runs_and_seeds_reproduce() -> None:
    report = attack(6, seed=31)
    assert not report.findings, str(report)
    assert sum(report.counts.values()) == 18
    assert report.orders > 20


@pytest.mark.slow
def test_many_random_programs() -> None:
    report = attack(300, seed=32, schedules=3)
    assert not report.findings, str(report)


def test_an_order_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    initialise = Schedule.__init__

    def unseeded(self: Schedule, world: Any, seed: int) -> None:
        initialise(self, world, random.randrange(10**9))

    monkeypatch.setattr(Schedule, "__init__", unseeded)
    assert any("another order" in finding for finding in attack(1, seed=31).findings)


def test_a_result_that_watching_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Notes.note

    def spoil(self: Notes, group: Any, place: int, part: Any, now: float) -> Any:
        if part.inputs and part.inputs[0].is_floating_point():
            with torch.no_grad():
                part.inputs[0].data.add_(1)
        return note(self, group, place, part, now)

    monkeypatch.setattr(Notes, "note", spoil)
    findings = attack(2, seed=31).findings
    assert any("another result than without" in finding for finding in findings)


def test_outcomes_are_compared_name_by_name() -> None:
    x = torch.tensor([1.0, 2.0])
    assert attacking._same({"x": x, "y": None}, {"x": x.clone(), "y": None})
    assert not attacking._same({"x": x}, {"x": x + 1e-7})
    assert not attacking._same({"x": x}, {"y": x})
    assert not attacking._same({"x": x}, {"x": None})
