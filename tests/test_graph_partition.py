"""Partitions of nodes are balanced, compact and deterministic; invalid arguments raise."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import by_count, by_graph, by_metis, by_space

RANKS = (1, 2, 3, 4, 5, 7, 12)


def points(seed: int, nodes: int = 300, dims: int = 3) -> Tensor:
    return torch.rand(nodes, dims, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sizes(owner: Tensor, ranks: int) -> list[int]:
    return torch.bincount(owner, minlength=ranks).tolist()


def crossing(at: Tensor, owner: Tensor, reach: float) -> int:
    """The pairs of near points of which the ends have different owners."""
    near = (torch.cdist(at, at) < reach).nonzero()
    return int((owner[near[:, 0]] != owner[near[:, 1]]).sum())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("nodes", [0, 1, 5, 301])
def test_every_partition_is_balanced_to_one_node(nodes: int, ranks: int) -> None:
    at = points(nodes, nodes)
    for owner in (
        by_count(nodes, ranks),
        by_space(at, ranks),
        by_space(at, ranks, method="curve"),
        by_space(at - 3, ranks, cell=0.5 * torch.eye(3)),
    ):
        assert owner.shape == (nodes,)
        assert owner.dtype is torch.int64
        assert len(sizes(owner, ranks)) == ranks
        assert max(sizes(owner, ranks)) - min(sizes(owner, ranks)) <= 1


def test_by_count_cuts_in_the_order_of_the_numbers() -> None:
    assert by_count(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_parts_in_space_cut_fewer_edges_than_parts_by_number(ranks: int) -> None:
    at = points(3, 600)
    by_number = crossing(at, by_count(600, ranks), 0.15)
    assert crossing(at, by_space(at, ranks), 0.15) < 0.5 * by_number
    assert crossing(at, by_space(at, ranks, method="curve"), 0.15) < 0.6 * by_number


def test_bisection_cuts_across_the_longest_extent() -> None:
    at = points(1) * torch.tensor([1.0, 10.0, 1.0])
    owner = by_space(at, 4)
    borders = [at[owner == rank, 1] for rank in range(4)]
    assert all(left.max() < right.min() for left, right in itertools.pairwise(borders))


@pytest.mark.parametrize("method", ["bisection", "curve"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_node_that_is_moved_by_vectors_of_the_cell_keeps_its_owner(method: Any, ranks: int) -> None:
    cell = torch.tensor([[2.0, 0.0, 0.0], [0.5, 1.5, 0.0], [0.0, 0.3, 1.0]], dtype=torch.float64)
    inside = 0.05 + 0.9 * points(2)
    at = inside @ cell
    moves = torch.randint(-2, 3, (300, 3), generator=torch.Generator().manual_seed(0)).double()
    owner = by_space(at, ranks, cell=cell, method=method)
    assert torch.equal(owner, by_space(at + moves @ cell, ranks, cell=cell, method=method))
    assert not torch.equal(owner, by_space(at + moves @ cell, ranks, method=method))


def test_the_curve_visits_each_place_of_a_grid_after_a_neighbour() -> None:
    for dims, side in ((2, 16), (3, 8)):
        grid = torch.cartesian_prod(*[torch.arange(side)] * dims).double()
        owner = by_space(grid, len(grid), method="curve")
        steps = grid[owner.argsort()].diff(dim=0).abs().sum(1)
        assert steps.tolist() == [1.0] * (len(grid) - 1)


def test_equal_positions_are_ordered_by_index() -> None:
    same = torch.zeros(6, 3)
    for method in ("bisection", "curve"):
        assert by_space(same, 3, method=method).tolist() == [0, 0, 1, 1, 2, 2]


def test_positions_are_only_read_and_no_gradient_flows() -> None:
    at = points(0).requires_grad_()
    before = at.detach().clone()
    assert not by_space(at, 3).requires_grad
    assert torch.equal(at, before)


def test_whole_graphs_go_to_the_rank_with_fewest_nodes() -> None:
    batch = torch.tensor([3, 0, 0, 0, 1, 1, 3, 3, 4, 3])
    owner = by_graph(batch, 2)
    for graph in range(5):
        assert len(owner[batch == graph].unique()) == (graph in batch)
    assert sizes(owner, 2) == [5, 5]
    draw = torch.Generator().manual_seed(1)
    batch = torch.randint(0, 40, (500,), generator=draw)
    loads = sizes(by_graph(batch, 4), 4)
    assert max(loads) - min(loads) <= max(torch.bincount(batch).tolist())
    assert by_graph(batch[:0], 4).tolist() == []


def ring(nodes: int) -> Tensor:
    at = torch.arange(nodes)
    return torch.stack((at, (at + 1) % nodes))


def test_metis_gets_the_neighbours_of_each_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def part_graph(parts: int, adjacency: list[list[int]]) -> tuple[int, list[int]]:
        asked.append((parts, [sorted(each) for each in adjacency]))
        return 0, [0, 1, 1, 0]

    fake = types.ModuleType("pymetis")
    fake.part_graph = part_graph  # type: ignore[attr-defined]
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]  # what tells that it is there
    monkeypatch.setitem(sys.modules, "pymetis", fake)
    edges = torch.tensor(
        [[0, 1, 1, 2, 2, 0], [1, 0, 2, 2, 1, 1]]
    )  # both ways, a loop, one twice; node 3 alone
    assert by_metis(edges, 4, 2).tolist() == [0, 1, 1, 0]
    assert asked == [(2, [[1], [0, 2], [1], []])]


def test_metis_cuts_a_ring_in_two_places() -> None:
    pytest.importorskip("pymetis")
    edges = ring(40)
    owner = by_metis(edges, 40, 2)
    assert int((owner[edges[0]] != owner[edges[1]]).sum()) == 2
    assert abs(sizes(owner, 2)[0] - 20) <= 1
    assert by_metis(edges, 40, 1).tolist() == [0] * 40


def test_missing_pymetis_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmesh._util.environment.find_spec", lambda module: None)
    with pytest.raises(gm.MissingExtraError, match=r"pip install 'gradmesh\[metis\]'"):
        by_metis(ring(4), 4, 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: by_count(-1, 2), r"nn.graph.by_count: nodes must be an int >= 0(.|\n)*nodes=-1"),
        (lambda: by_count(3.5, 2), "nodes=3.5"),  # type: ignore[arg-type]
        (lambda: by_count(3, 0), "ranks must be a positive int"),
        (lambda: by_count(3, True), "ranks=True"),
        (lambda: by_graph(torch.tensor([0, -1]), 2), "with minimum -1"),
        (lambda: by_graph(torch.zeros(2), 2), r"batch=torch.float32\[2\]"),
        (lambda: by_graph([0, 1], 2), "batch is not a 1-d tensor of integers"),  # type: ignore[arg-type]
        (lambda: by_space(torch.zeros(3), 2), r"torch.float32\[3\]"),
        (lambda: by_space(torch.zeros(3, 0), 2), "positions is not a real tensor of shape"),
        (lambda: by_space(torch.tensor([[math.nan, 0.0]]), 2), "1 nodes with NaN or infinity"),
        (lambda: by_space(points(0), 2, cell=torch.eye(2)), "3 independent vectors"),
        (lambda: by_space(points(0), 2, cell=torch.ones(3, 3)), "3 independent vectors"),
        (lambda: by_space(points(0), 2, method="metis"), "method='metis'"),  # type: ignore[arg-type]
        (lambda: by_space(points(0, 2, 63), 2, method="curve"), "too many dimensions"),
        (lambda: by_metis(torch.tensor([[0], [4]]), 4, 2), "0 <= target < 4"),
        (lambda: by_metis(torch.zeros(2, 3), 4, 2), r"torch.float32\[2, 3\]"),
    ],
)
def test_invalid_partition_raises(wrong: Any, text: str) -> None:
    with pytest.raises(gm.ArgumentError, match=text):
        wrong()
