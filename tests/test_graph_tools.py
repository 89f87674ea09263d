"""The commands that measure large graphs: the graphs are as documented, and errors are seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_space
from tools import pages
from tools.graphs import __main__ as command
from tools.graphs import figures
from tools.graphs.contest import HALVES, OURS, THEIRS, contest
from tools.graphs.geometry import crystal, nearest, slab
from tools.graphs.measure import Job, measured
from tools.graphs.network import Crystal, whole_energy
from tools.graphs.prediction import NETWORK, LonePart, at_scale, beside_measured, region, worked
from tools.graphs.steps import KINDS, costs, part_step, step_of
from tools.graphs.traffic import counted, draw, exponent, grown, rows_needed

JOB = Job(600, 6, 4, 3, empty=True, partition="bisection", compared=True)


def test_the_neighbours_are_the_nearest_in_the_periodic_cell() -> None:
    points, cell = slab(900)
    edges, shifts = nearest(points, cell, 8)
    apart = points[:, None] - points[None]
    apart = apart - (apart / cell.diagonal()).round() * cell.diagonal()
    far = (apart**2).sum(2).sqrt().fill_diagonal_(torch.inf)
    found = (points[edges[0]] + shifts @ cell - points[edges[1]]).norm(dim=1).view(-1, 8)
    assert torch.allclose(found, far.topk(8, largest=False).values)
    assert edges[1].tolist() == torch.arange(900).repeat_interleave(8).tolist()


def test_small_run_shows_bytes_sent_and_deviation_from_one_process() -> None:
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


def small(nodes: int = 900) -> tuple[Crystal, torch.Tensor]:
    points, cell = slab(nodes)
    return crystal(points, cell, 8), by_space(points, 3, cell=cell)


def test_edges_around_some_points_are_those_of_the_whole_graph() -> None:
    points, cell = slab(2000)
    whole, shifts = nearest(points, cell, 6)
    some = torch.arange(40)
    edges, moved = nearest(points, cell, 6, around=some)
    assert 240 < edges.shape[1] < whole.shape[1]
    rows = (edges[1, ::6, None] * 6 + torch.arange(6)).reshape(-1)
    assert torch.equal(edges, whole[:, rows])
    assert torch.equal(moved, shifts[rows])
    # Every edge that begins at one of them is there too.
    assert int(torch.isin(edges[0], some).sum()) == int(torch.isin(whole[0], some).sum())


@pytest.mark.parametrize("forgotten", ["strain", "weights"])
def test_a_program_that_does_not_replicate_is_seen_to_be_off(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replicate(shared: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        *weights, strain = shared
        if forgotten == "strain":
            return (*real(tuple(weights)), strain.clone())
        return (*(weight.clone() for weight in weights), real(strain))

    real = gm.replicate
    monkeypatch.setattr(gm, "replicate", replicate)
    parts = measured(JOB, "threads")
    name = "stress" if forgotten == "strain" else "second derivatives position-weight"
    assert parts[0].deviations[name] > 1e-3
    assert parts[0].deviations["value"] < 1e-12


def test_every_rank_gets_stress_and_every_block_of_second_derivatives() -> None:
    names = set(measured(JOB, "threads")[0].deviations)
    blocks = {f"{a}-{b}" for a in ("position", "strain") for b in ("position", "strain", "weight")}
    assert names == {"value", "forces", "stress"} | {f"second derivatives {block}" for block in blocks}


def test_the_bytes_that_are_counted_are_the_rows() -> None:
    graph, owner = small()
    found = counted(graph, owner, 4, 5, "threads")
    assert all(each.plan == each.expected for each in found)
    assert sum(each.rows for each in found) == rows_needed(graph.edges, owner)
    assert (found[3].rows, found[3].plan) == (0, (0, 0, 0))  # it owns nothing
    assert sum(each.plan[0] for each in found) < sum(each.gather[0] for each in found)


def test_region_matches_its_plan() -> None:
    graph, owner = small()

    def on_each_rank() -> None:
        plan, rank = GraphPlan(graph.edges, owner), gm.rank()
        part = region(graph.points, graph.cell, owner, 8, 3, rank)
        assert torch.equal(part.own, plan.own)
        assert torch.equal(part.remote, plan.remote)
        sent = [len(plan.send_rows.get(other, ())) for other in range(3)]
        assert part.sent == sent
        assert part.received == [plan.receive_counts.get(other, 0) for other in range(3)]
        for mine, theirs in zip(
            part.send.split(sent), [plan.send_rows.get(r, plan.own[:0]) for r in range(3)], strict=True
        ):
            assert torch.equal(mine, theirs)
        assert torch.equal(part.edge_index, plan.edge_index)
        alone = part_step("training", LonePart(part), part.local, 4)()
        for one, other in zip(alone, part_step("training", plan, graph, 4)(), strict=True):
            assert torch.allclose(one, other, rtol=1e-12)

    gm.launch(on_each_rank, 3, backend="threads")


def test_a_training_step_in_parts_is_that_of_one_process() -> None:
    graph, owner = small()
    right = step_of("training", lambda at, leaves: whole_energy(graph, at, None, leaves), graph.points, 4)()

    def on_each_rank(overlap: bool) -> None:
        found = part_step("training", GraphPlan(graph.edges, owner), graph, 4, overlap=overlap)()
        for got, wanted in zip(found, right, strict=True):
            assert torch.allclose(gm.all_reduce(got, dst=gm.I) / 3, wanted, rtol=1e-10)

    for overlap in (False, True):
        gm.launch(on_each_rank, 3, backend="threads", args=(overlap,))


def test_growth_is_that_of_the_boundary(tmp_path: Path) -> None:
    found = grown((1000, 4000), 6, 8, (4,))
    assert [each.shape for each in found] == ["slab", "bulk"]
    for each, power in zip(found, (0.5, 2 / 3), strict=True):
        assert exponent(each.gather) == pytest.approx(1)
        assert abs(exponent(each.plan) - power) < 0.12
    draw(found, tmp_path / "growth.png", 0)
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_contest_times_every_way_on_the_same_rows() -> None:
    graph, owner = small(600)
    found = contest(graph.edges, owner.clamp(max=1), 2, (2,), rounds=2, calls=1)
    assert [(each.whole, each.half) for each in found] == [(w, h) for w in (True, False) for h in HALVES]
    for each in found:
        assert set(each.seconds) == {*OURS, THEIRS}
        assert all(len(taken) == 2 and min(taken) > 0 for taken in each.seconds.values())
        low, middle, high = each.ratios("shm")
        assert low <= middle <= high


@pytest.mark.slow
def test_costs_has_times_and_the_memory_of_each_rank() -> None:
    (cost,) = costs(2000, 8, 4, [("shm", 2)], rounds=2)
    for kind in KINDS:
        assert cost.median(kind) > 0
        assert len(cost.seconds[kind]) == len(cost.memory[kind]) == 2
        assert min(cost.memory[kind]) > 0


@pytest.mark.slow
def test_a_rank_of_several_needs_less_memory_than_one_process() -> None:
    one, two = costs(8000, 12, 16, [("", 1), ("shm", 2)], rounds=1)
    assert max(two.memory["training"]) < 0.7 * one.memory["training"][0]


def test_a_step_is_predicted_by_its_work_and_its_calls() -> None:
    one, many = (at_scale(nodes, 8, 4, ranks, "training", 1) for nodes, ranks in ((500, 1), (8000, 16)))
    assert one.direct == one.in_rounds == one.remote == 0
    assert many.remote > 0 < many.direct < many.in_rounds
    assert at_scale(8000, 8, 4, 16, "training", 1) == many
    work = worked("forces", 8, 4, (400, 4000), repeats=1)
    assert 0 < work.of(400) < work.of(2000) < work.of(4000)
    alone, apart = (beside_measured(600, 8, 4, ranks, "forces", NETWORK, work) for ranks in (1, 2))
    assert alone == pytest.approx(work.of(600))
    assert apart > work.of(300)


def test_figures_go_where_the_page_has_their_command() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reports" / "graphs-scale.md").read_text()
    for part in figures.PARTS:
        changed = pages.with_part(page, pages.mark("docs/reports/graphs-scale.md", part), "other figures")
        assert changed.count("other figures") == 1
        assert changed.count(pages.END) == len(figures.PARTS)


def test_text_of_small_figures_has_the_counts() -> None:
    assert "the bytes of an exchange are its rows" in figures.sent(1000, ("threads",))
    said = figures.exact(700)
    assert "strain-weight" in said
    assert "stress" in said


def test_the_command_writes_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text((Path(__file__).parent.parent / "docs" / "reports" / "graphs-scale.md").read_text())
    monkeypatch.setitem(figures.PARTS, "exact", lambda: "other figures")
    assert figures.main(["exact"], page) == 0
    assert "other figures" in page.read_text()
