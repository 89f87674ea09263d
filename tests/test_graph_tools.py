"""The command that measures a large graph: its graph is one of nearest neighbours, its figures are seen to fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tools.graphs import __main__ as command
from tools.graphs.geometry import nearest, slab
from tools.graphs.measure import Job, measured

JOB = Job(600, 6, 4, 3, empty=True, partition="bisection", compared=True)


def test_the_neighbours_are_the_nearest_in_the_periodic_cell() -> None:
    points, cell = slab(900)
    edges, images = nearest(points, cell, 8)
    apart = points[:, None] - points[None]
    apart = apart - (apart / cell.diagonal()).round() * cell.diagonal()
    far = (apart**2).sum(2).sqrt().fill_diagonal_(torch.inf)
    found = (points[edges[0]] + images - points[edges[1]]).norm(dim=1).view(-1, 8)
    assert torch.allclose(found, far.topk(8, largest=False).values)
    assert edges[1].tolist() == torch.arange(900).repeat_interleave(8).tolist()


def test_a_small_run_shows_what_is_sent_and_how_far_it_is_from_one_process() -> None:
    parts = measured(JOB, "threads")
    assert [part.own for part in parts] == [300, 300, 0]
    assert sum(part.sent for part in parts) == sum(part.remote for part in parts) > 0
    assert max(value for part in parts for value in part.deviations.values()) < 1e-12
    said = command.text(JOB, parts)
    assert f"bytes of an exchange {sum(part.sent for part in parts) * 4 * 8}" in said
    assert "second derivatives" in said


def test_the_command_fails_where_results_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = measured(dataclasses.replace(JOB, ranks=2, empty=False, nodes=400), "threads")
    off = [dataclasses.replace(part, deviations={**part.deviations, "forces": 1e-6}) for part in parts]
    monkeypatch.setattr("sys.argv", ["graphs", "--nodes", "400"])
    for given, status in ((parts, 0), (off, 1)):
        monkeypatch.setattr(command, "measured", lambda job, backend, given=given: given)
        assert command.main() == status
