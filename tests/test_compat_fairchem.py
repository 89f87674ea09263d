"""The drop-in for the gp_utils of fairchem-core 2.11 and later; derivatives by row are in test_compat_gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import gradmesh as gm
from gradmesh.compat import fairchem as fc
from gradmesh.compat import gp_utils

NAMES = [
    "AllReduceSumWithGrad",
    "GPContext",
    "GPMode",
    "GPPartition",
    "GatherFromModelParallelRegionGradPadded",
    "GatherFromModelParallelRegionSumGradPadded",
    "GraphParallelConfig",
    "PartitionStrategy",
    "ReduceFromModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
    "_DATA_PARALLEL_GROUP",
    "_GRAPH_PARALLEL_GROUP",
    "all_reduce_sum_with_grad",
    "all_to_all_collect",
    "build_gp_context",
    "cleanup_gp",
    "compute_a2a_partition",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_config",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_input",
    "partition_atoms_index_split",
    "partition_atoms_spatial",
    "reduce_from_model_parallel_region",
    "resolve_gp_config_for_workers",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    "set_gp_config",
    "setup_gp",
    "setup_graph_parallel_groups",
    "size_list_fn",
]


@contextlib.contextmanager
def graph_parallel(size: int) -> Iterator[int]:
    """Groups of `size` ranks; gives this rank's place in its own."""
    fc.setup_graph_parallel_groups(size, dist.get_backend())
    try:
        yield fc.get_gp_rank()
    finally:
        fc.cleanup_gp()


def owned(rank: int) -> Tensor:
    """Which atoms a rank owns."""
    return torch.tensor([owner == rank for owner in OWNERS.tolist()])


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_name_of_the_original_is_there() -> None:
    assert [name for name in NAMES if not hasattr(fc, name)] == []
    assert fc.__all__ == sorted(fc.__all__)
    with pytest.raises(AttributeError, match="_MODEL_PARALLEL_GROUP"):
        fc._MODEL_PARALLEL_GROUP  # noqa: B018


# ---- Configuration ----------------------------------------------------------------------------------------


def _configured() -> None:
    assert fc.get_gp_config() is None
    with graph_parallel(2):
        assert fc.get_gp_config() == fc.GraphParallelConfig(2)
        given = fc.GraphParallelConfig(2, fc.GPMode.ALL_TO_ALL)
        fc.set_gp_config(given)
        assert fc.get_gp_config() is given
        fc.set_gp_config({"group_size": 2, "partition": "spatial"})
        assert fc.get_gp_config() == fc.GraphParallelConfig(2, partition=fc.GPPartition.SPATIAL)
        assert fc._GRAPH_PARALLEL_GROUP is gp_utils.get_gp_group()
        assert fc._DATA_PARALLEL_GROUP is gp_utils.get_dp_group()
    assert fc.get_gp_config() is None


def test_a_configuration_lasts_until_the_groups_are_taken_down(threads: Any) -> None:
    threads(2)(_configured)


def test_a_configuration_is_fitted_to_the_workers() -> None:
    given = fc.GraphParallelConfig(mode=fc.GPMode.ALL_TO_ALL)
    assert fc.resolve_gp_config_for_workers(None, 1) is None
    assert fc.resolve_gp_config_for_workers(given, 1) is given
    assert fc.resolve_gp_config_for_workers(given, 3) == fc.GraphParallelConfig(3, fc.GPMode.ALL_TO_ALL)
    assert given.group_size == 1
    with pytest.raises(gm.ArgumentError, match=r"group_size=3(.|\n)*group_size=2"):
        fc.resolve_gp_config_for_workers(fc.GraphParallelConfig(2), 3)


# ---- Regions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(8))
def test_parts_are_balanced(size: int) -> None:
    sizes = fc.size_list_fn(size, 3)
    assert sizes == [len(part) for part in torch.arange(size).tensor_split(3)]


def test_padding_appends_zeros_along_the_first_dimension() -> None:
    x = random(1, 2, 3)
    assert torch.equal(fc.pad_input(x, 4), torch.cat([x, torch.zeros(2, 3, dtype=x.dtype)]))
    assert fc.pad_input(x, 2) is x
    with pytest.raises(gm.ShapeError, match="longer"):
        fc.pad_input(x, 1)


def _no_other_dimension() -> Tensor:
    with graph_parallel(2):
        return fc.scatter_to_model_parallel_region(torch.arange(10).view(5, 2))


def test_scatter_cuts_the_first_dimension_into_balanced_parts(threads: Any) -> None:
    first, second = threads(2)(_no_other_dimension)
    assert torch.equal(torch.cat([first, second]), torch.arange(10).view(5, 2))
    assert len(first) == 3


@pytest.mark.parametrize("natoms", [-1, None, 2.5, True])
def test_natoms_has_to_be_a_number_of_atoms(natoms: Any) -> None:
    with pytest.raises(
        gm.ArgumentError, match=r"natoms must be an int >= 0(.|\n)*gradmesh\.compat\.gp_utils"
    ):
        fc.gather_from_model_parallel_region(torch.zeros(2), natoms)


def test_a_part_that_is_not_this_ranks_is_refused_on_every_rank(threads: Any) -> None:
    def refused() -> None:
        with graph_parallel(2), pytest.raises(gm.ShapeError, match="size 5"):
            fc.gather_from_model_parallel_region_sum_grad(torch.zeros(5), 6)

    threads(2)(refused)


# ---- Message passing with just the atoms that are needed ----------------------------------------------------

ATOMS = 7
OWNERS = torch.tensor([1, 0, 1, 0, 0, 1, 1])
EDGES = torch.stack([torch.arange(2 * ATOMS) * 3 % ATOMS, torch.arange(ATOMS).repeat(2)])


def layer(x: Tensor, edges: Tensor, atoms: int, weight: Tensor) -> Tensor:
    sources, targets = edges
    messages = torch.sin(x[sources] @ weight) * x[targets] ** 2
    return torch.zeros(atoms, x.size(1), dtype=x.dtype).index_add(0, targets, messages)


def energy_on_one(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(2):
        x = x + layer(x, EDGES, ATOMS, weight)
    return (x**2).sum()


def _energy_and_forces(mode: str) -> tuple[Tensor, ...]:
    with graph_parallel(2) as rank:
        x = random(1, ATOMS, 3).requires_grad_()
        weight = random(2, 3, 3).requires_grad_()
        w = gp_utils.copy_to_model_parallel_region(weight)
        if mode == "all_to_all":
            own = owned(rank).nonzero().squeeze(1).flip(0)  # any order will do
            context = fc.build_gp_context(EDGES[:, owned(rank)[EDGES[1]]], OWNERS, rank, 2, own)
            assert torch.equal(
                context.local_edge_idx, context.edge_index_local[0].lt(len(own)).nonzero()[:, 0]
            )
            assert len(context.local_edge_idx) + len(
                context.remote_edge_idx
            ) == context.edge_index_local.size(1)
            mine = gp_utils.copy_to_model_parallel_region(x)[own]
            for _ in range(2):
                whole = torch.cat([mine, fc.all_to_all_collect(mine, context)])
                mine = mine + layer(whole, context.edge_index_local, len(own), w)
        else:
            mine = fc.scatter_to_model_parallel_region(x)
            start = rank * fc.size_list_fn(ATOMS, 2)[0]
            edges = EDGES[:, (EDGES[1] >= start) & (EDGES[1] < start + len(mine))]
            for _ in range(2):
                whole = fc.gather_from_model_parallel_region_sum_grad(mine, ATOMS)
                new = layer(whole, edges, ATOMS, w)[start : start + len(mine)]
                mine = mine + new
        energy = fc.reduce_from_model_parallel_region((mine**2).sum())
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        (energy + (forces**2).sum()).backward()
        assert x.grad is not None
        assert weight.grad is not None
        return energy.detach(), forces.detach(), x.grad, weight.grad


@pytest.mark.parametrize("mode", ["allgather", "all_to_all"])
def test_training_on_forces_differentiates_twice_as_on_one_process(threads: Any, mode: str) -> None:
    x, weight = random(1, ATOMS, 3).requires_grad_(), random(2, 3, 3).requires_grad_()
    energy = energy_on_one(x, weight)
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    (energy + (forces**2).sum()).backward()
    for found in threads(4)(_energy_and_forces, mode):
        torch.testing.assert_close(found, (energy.detach(), forces.detach(), x.grad, weight.grad))


@pytest.mark.processes
def test_the_exchange_works_on_real_processes(processes: Any) -> None:
    first, *others = processes(2)(_energy_and_forces, "all_to_all")
    for found in others:
        torch.testing.assert_close(found, first)


def _forward_mode() -> None:
    with graph_parallel(2) as rank, forward_ad.dual_level():
        own = owned(rank)
        context = fc.build_gp_context(EDGES[:, own[EDGES[1]]], OWNERS, rank, 2)
        x = forward_ad.make_dual(random(1, ATOMS, 2)[own], random(2, ATOMS, 2)[own])
        value, tangent = forward_ad.unpack_dual(fc.all_to_all_collect(x, context))
        needed = sorted({s for s, t in EDGES.T.tolist() if own[t] and not own[s]})
        torch.testing.assert_close(value, random(1, ATOMS, 2)[needed])
        torch.testing.assert_close(tangent, random(2, ATOMS, 2)[needed])


def test_forward_mode_goes_through_the_exchange(threads: Any) -> None:
    threads(2)(_forward_mode)


def test_a_context_can_be_built_without_groups() -> None:
    context = fc.build_gp_context(torch.tensor([[0, 2, 3], [1, 0, 1]]), torch.tensor([0, 0, 1, 1]), 0, 2)
    assert context.edge_index_local.tolist() == [[0, 2, 3], [1, 0, 1]]
    assert (context.recv_splits, context.send_splits, context.total_recv) == ([0, 2], [0, 0], 2)
    assert context.send_indices.tolist() == []
    with pytest.raises(gm.ArgumentError, match="neither owns nor receives"):
        fc.build_gp_context(torch.tensor([[0], [2]]), torch.tensor([0, 0, 1]), 0, 2)


def _nothing_needed() -> None:
    with graph_parallel(2) as rank:
        context = fc.build_gp_context(torch.tensor([[rank], [rank]]), torch.tensor([0, 1]), rank, 2)
        x = random(rank, 1, 2).requires_grad_()
        received = fc.all_to_all_collect(x, context)
        assert received.shape == (0, 2)
        (torch.cat([x, received]) ** 2).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())


def test_ranks_that_need_nothing_of_each_other_take_part(threads: Any) -> None:
    threads(2)(_nothing_needed)


Wrong = Callable[[int], tuple[Any, ...]]
GOOD = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[0, 1], [1, 1]])
WRONG: dict[str, tuple[str, Wrong]] = {
    "another's target": (
        "neither owns nor receives",
        lambda rank: (torch.tensor([[0], [1]]), torch.tensor([0, 1]), rank, 2),
    ),
    "no such atom": (
        "0 <= source < 2",
        lambda rank: (torch.tensor([[2], [0]]), torch.tensor([0, 1]), rank, 2),
    ),
    "no such rank": ("0 <= rank < 2", lambda rank: (GOOD[rank], torch.tensor([0, 2]), rank, 2)),
    "no list of edges": (
        "not an integer tensor of shape (2, edges)",
        lambda rank: (torch.tensor([0, 0]), torch.tensor([0, 1]), rank, 2),
    ),
    "another's rank": (
        "do not match the gp group",
        lambda rank: (GOOD[rank], torch.tensor([0, 1]), 1 - rank, 2),
    ),
    "another size": ("do not match the gp group", lambda rank: (GOOD[rank], torch.tensor([0, 1]), rank, 3)),
    "another partition": (
        "node_partition does not match rank_assignments",
        lambda rank: (GOOD[rank], torch.tensor([0, 1]), rank, 2, torch.tensor([0, 1])),
    ),
}


def _wrong_on_rank_0(name: str) -> str:
    _, wrong = WRONG[name]
    with graph_parallel(2) as rank:
        arguments = wrong(rank) if rank == 0 else (GOOD[rank], torch.tensor([0, 1]), rank, 2)
        kind = gm.ArgumentError if rank == 0 else gm.MismatchError
        with pytest.raises(kind) as error:
            fc.build_gp_context(*arguments)
        fc.build_gp_context(GOOD[rank], torch.tensor([0, 1]), rank, 2)  # the next call is right
        return str(error.value)


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_on_one_rank_are_an_error_on_every_rank(threads: Any, name: str) -> None:
    own, others = threads(2)(_wrong_on_rank_0, name)
    assert WRONG[name][0] in own
    assert WRONG[name][0] in others  # they are notified


@pytest.mark.processes
def test_wrong_arguments_are_an_error_on_every_process(processes: Any) -> None:
    _, others = processes(2)(_wrong_on_rank_0, "another's target")
    assert "neither owns nor receives" in others


def test_assignments_that_differ_are_refused_on_every_rank(threads: Any) -> None:
    def refused() -> None:
        with graph_parallel(2) as rank:
            edges, owners = torch.tensor([[rank], [rank]]), torch.tensor([0, 1, rank])
            with pytest.raises(gm.MismatchError, match="different values on rank 1"):
                fc.build_gp_context(edges, owners, rank, 2)

    threads(2)(refused)


def test_rows_must_belong_to_local_atoms(threads: Any) -> None:
    def refused() -> None:
        with graph_parallel(2) as rank:
            context = fc.build_gp_context(GOOD[rank], torch.tensor([0, 1]), rank, 2)
            with pytest.raises(gm.ShapeError, match="1 rows"):
                fc.all_to_all_collect(torch.zeros(2, 3), context)

    threads(2)(refused)
