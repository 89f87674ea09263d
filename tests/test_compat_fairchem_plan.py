"""fairchem's exchange as a plan: partitions, contexts, a model in today's form by the gather and by the exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.compat import fairchem as fc
from gradmesh.compat.fairchem import PartitionStrategy
from gradmesh.nn.graph import by_count, by_space
from tests.test_compat_fairchem import graph_parallel, random
from tools.replaced import lines

Ranks = Any


def edges_of(atoms: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(atoms, 1), (2, 5 * atoms), generator=draw)


# -- partitions


@pytest.mark.parametrize("strategy", ["index_split", "spatial", PartitionStrategy.SPATIAL])
@pytest.mark.parametrize(("atoms", "ranks"), [(10, 4), (7, 3), (2, 5), (0, 2), (9, 1)])
def test_parts_are_those_that_a_gather_takes(strategy: Any, atoms: int, ranks: int) -> None:
    at = random(atoms, atoms, 3)
    for rank in range(ranks):
        owner, own = fc.compute_a2a_partition(at, atoms, torch.device("cpu"), ranks, rank, strategy)
        assert torch.bincount(owner, minlength=ranks).tolist() == fc.size_list_fn(atoms, ranks)
        assert torch.equal(own, (owner == rank).nonzero().squeeze(1))
    assert torch.equal(owner, by_count(atoms, ranks) if strategy == "index_split" else by_space(at, ranks))


@pytest.mark.parametrize("strategy", ["metis", None, 0])
def test_a_strategy_that_is_none_is_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match=repr(strategy)):
        fc.compute_a2a_partition(random(0, 4, 3), 4, "cpu", 2, 0, strategy)


# -- contexts


def contexts(atoms: int, seed: int) -> list[str]:
    """Contexts against their definition, with atoms in any order and a rank that may have none."""
    with graph_parallel(dist.get_world_size()) as rank:
        size, draw = fc.get_gp_world_size(), torch.Generator().manual_seed(seed)
        owner = torch.randint(0, max(size - seed % 2, 1), (atoms,), generator=draw)
        edges = edges_of(atoms, seed)
        orders = [
            torch.tensor(
                [n for n in torch.randperm(atoms, generator=draw).tolist() if owner[n] == r],
                dtype=torch.int64,
            )
            for r in range(size)
        ]
        mine = [edges[:, owner[edges[1]] == r] for r in range(size)]
        wants = [
            sorted({int(s) for s in mine[r][0] if owner[s] != r}, key=lambda n: (int(owner[n]), n))
            for r in range(size)
        ]
        context = fc.build_gp_context(mine[rank], owner, rank, size, orders[rank])
        place = {n: at for at, n in enumerate([*orders[rank].tolist(), *wants[rank]])}
        sends = [[place[n] for n in wants[other] if owner[n] == rank] for other in range(size)]
        x = random(seed, atoms, 2)
        checks = {
            "total_local_atoms": context.total_local_atoms == len(orders[rank]),
            "send_indices": context.send_indices.tolist() == [n for part in sends for n in part],
            "send_splits": context.send_splits
            == context.send_counts.tolist()
            == [len(part) for part in sends],
            "recv_splits": context.recv_splits
            == context.recv_counts.tolist()
            == [sum(int(owner[n]) == other for n in wants[rank]) for other in range(size)],
            "total_recv": context.total_recv == len(wants[rank]),
            "edges": context.edge_index_local.tolist()
            == [[place[n] for n in row] for row in mine[rank].tolist()],
            "local": context.local_edge_idx.tolist()
            == [i for i, s in enumerate(mine[rank][0].tolist()) if owner[s] == rank],
            "rank_assignments": context.rank_assignments is owner,
            "rows": torch.equal(fc.all_to_all_collect(x[orders[rank]], context), x[wants[rank]]),
            "plan": context.plan is not None
            and torch.equal(
                context.plan.exchange(x[context.plan.own]),
                x[torch.cat((context.plan.own, torch.tensor(wants[rank], dtype=torch.int64)))],
            ),
        }
    alone = fc.build_gp_context(mine[rank], owner, rank, size, orders[rank])
    checks["alone"] = (
        torch.equal(alone.edge_index_local, context.edge_index_local) and alone.send_splits == [0] * size
    )
    return [f"{atoms} atoms, seed {seed}: {name}" for name, right in checks.items() if not right]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("atoms", "seed"), [(9, 0), (12, 1), (1, 2), (0, 3), (14, 5)])
def test_context_matches_its_definition(atoms: int, seed: int, ranks: int, threads: Ranks) -> None:
    assert threads(ranks)(contexts, atoms, seed) == [[]] * ranks


def with_edges_to_others(atoms: int, seed: int) -> list[str]:
    """Edges are dealt to any rank that has or receives both ends; rows are exchanged for sources alone."""
    with graph_parallel(dist.get_world_size()) as rank:
        size, draw = fc.get_gp_world_size(), torch.Generator().manual_seed(seed)
        owner = torch.randint(0, size, (atoms,), generator=draw)
        pairs = edges_of(atoms, seed + rank)
        mine = owner == rank
        reached = mine.clone()
        reached[pairs[0]] = True
        pairs = pairs[:, reached[pairs[1]]]
        context = fc.build_gp_context(pairs, owner, rank, size)
        x = torch.sin(torch.arange(1.0, 1 + 2 * atoms, dtype=torch.float64)).view(atoms, 2)
        own = x[mine].requires_grad_()
        received = fc.all_to_all_collect(own, context, context.send_indices)
        byhand = fc.AllToAllCollect.apply(
            own, context.send_indices, context.send_counts, context.recv_counts, fc.get_gp_group(), rank, size
        )
        whole = torch.cat([own, received])
        sources, targets = context.edge_index_local
        loss = (1 + rank) * (whole[sources] * whole[targets] ** 2).sum()
        (gradient,) = torch.autograd.grad(loss + 0 * byhand.sum(), own)
        every = fc.all_reduce_sum_with_grad(
            torch.zeros_like(x).index_put((mine.nonzero().squeeze(1),), gradient)
        )

        dense = x.clone().requires_grad_()
        whole_gradient = fc.all_reduce_sum_with_grad(
            torch.autograd.grad((1 + rank) * (dense[pairs[0]] * dense[pairs[1]] ** 2).sum(), dense)[0]
        )
        checks = {
            "rows": torch.equal(whole.detach(), x[torch.cat((context.node_partition, context.needed_atoms))]),
            "by hand": torch.equal(received, byhand),
            "gradient": torch.allclose(every, whole_gradient, rtol=1e-12, atol=1e-12),
            "numbers": torch.equal(context.global_to_local[pairs], context.edge_index_local),
            "owners": torch.equal(context.needed_from_ranks, owner[context.needed_atoms]),
            "amount": context.total_needed_atoms == len(received),
        }
        return [name for name, right in checks.items() if not right]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("atoms", "seed"), [(9, 0), (12, 1), (5, 20)])
def test_edges_may_end_at_an_atom_that_is_received(atoms: int, seed: int, ranks: int, threads: Ranks) -> None:
    assert threads(ranks)(with_edges_to_others, atoms, seed) == [[]] * ranks


@pytest.mark.processes
def test_between_processes_edges_may_end_at_an_atom_that_is_received(processes: Ranks) -> None:
    assert processes(2)(with_edges_to_others, 9, 0) == [[]] * 2


def with_a_lost_target() -> str:
    with graph_parallel(2) as rank:
        edges = torch.tensor([[rank], [1]])  # rank 0's edge ends at an atom that it neither has nor receives
        with pytest.raises((gm.ArgumentError, gm.MismatchError)) as error:
            fc.build_gp_context(edges, torch.tensor([0, 1]), rank, 2)
        return str(error.value)


def test_edge_to_a_missing_atom_raises_on_every_rank(threads: Ranks) -> None:
    assert all("neither owns nor receives" in said for said in threads(2)(with_a_lost_target))


def test_a_context_without_groups_takes_edges_of_other_ranks() -> None:
    edges, owner = torch.tensor([[0, 1, 2, 3, 2], [1, 0, 3, 2, 0]]), torch.tensor([0, 0, 1, 1])
    context = fc.build_gp_context(edges, owner, rank=0, world_size=2)
    assert context.plan is None
    assert context.needed_atoms.tolist() == [2, 3]
    assert context.edge_index_local.tolist() == edges.tolist()


def of_other_ranks() -> list[str]:
    owner, said = torch.tensor([0, 1, 2]), []
    rank = dist.get_rank()
    context = fc.build_gp_context(torch.tensor([[(rank + 1) % 3], [rank]]), owner, rank, 3)
    with graph_parallel(2 if dist.get_world_size() % 2 == 0 else 1), pytest.raises(gm.ArgumentError) as error:
        fc.all_to_all_collect(torch.ones(1), context)
    said.append(str(error.value))
    return said


def test_a_context_of_other_ranks_is_refused(threads: Ranks) -> None:
    for (said,) in threads(2)(of_other_ranks):
        assert "a context for 2 ranks" in said
        assert "before build_gp_context" in said


def too_many_rows_on_a_rank() -> str:
    with graph_parallel(2) as rank:
        context = fc.build_gp_context(torch.tensor([[1 - rank], [rank]]), torch.tensor([0, 1]), rank, 2)
        with pytest.raises((gm.ShapeError, gm.MismatchError)) as error:
            fc.all_to_all_collect(torch.ones(1 + rank, 3), context)
        return str(error.value)


def test_too_many_rows_on_one_rank_raise_on_every_rank(threads: Ranks) -> None:
    assert all(
        "the number of rows of x_local is not the number of local atoms" in said
        for said in threads(2)(too_many_rows_on_a_rank)
    )


# -- a model in today's form


def model(at: Tensor, edges: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Energy and forces by derivative, and forces of the model's own, whichever way the configuration says."""
    rank, size, config = fc.get_gp_rank(), fc.get_gp_world_size(), fc.get_gp_config()
    assert config is not None
    owner, own = fc.compute_a2a_partition(at, len(at), at.device, size, rank, config.partition)
    edges = edges[:, owner[edges[1]] == rank]
    x = torch.tanh(at[own] @ weights[0])
    if config.mode == "all_to_all":
        context = fc.build_gp_context(edges, owner, rank, size, own)
        source, target = context.edge_index_local
    else:
        place = torch.zeros(len(at), dtype=torch.int64)
        place[own] = torch.arange(len(own))
        source, target = edges[0], place[edges[1]]
    for weight in weights[1:]:
        if config.mode == "all_to_all":
            rows = torch.cat((x, fc.all_to_all_collect(x, context)))
        else:
            rows = fc.gather_from_model_parallel_region_sum_grad(x, len(at))
        messages = torch.sin(rows[source] @ weight) * x[target]
        x = x + torch.zeros_like(x).index_add(0, target, messages)
    energy = fc.reduce_from_model_parallel_region((x**2).sum())
    (slope,) = torch.autograd.grad(energy, at, create_graph=True)
    direct = fc.gather_from_model_parallel_region(x[:, :3].contiguous(), len(at))
    if config.mode == "all_to_all":  # they lie in the order of the ranks
        ordered = torch.empty_like(direct)
        ordered[torch.cat([(owner == r).nonzero().squeeze(1) for r in range(size)])] = direct
        direct = ordered
    return energy, torch.stack((-fc.reduce_from_model_parallel_region(slope), direct))


def model_on_one(at: Tensor, edges: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    x = torch.tanh(at @ weights[0])
    for weight in weights[1:]:
        x = x + torch.zeros_like(x).index_add(0, edges[1], torch.sin(x[edges[0]] @ weight) * x[edges[1]])
    energy = (x**2).sum()
    (slope,) = torch.autograd.grad(energy, at, create_graph=True)
    return energy, torch.stack((-slope, x[:, :3]))


def inputs(atoms: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    weights = [random(7, 3, 4), 0.3 * random(8, 4, 4), 0.3 * random(9, 4, 4)]
    return (
        random(6, atoms, 3).requires_grad_(),
        edges_of(atoms, 4),
        [each.requires_grad_() for each in weights],
    )


def trained(program: Any, atoms: int) -> list[Tensor]:
    at, edges, weights = inputs(atoms)
    energy, forces = program(at, edges, weights)
    draw = random(3, *forces.shape)
    # The gather to I is one whose gradient every rank has whole: only the sum of derivatives is trained on.
    gradients = torch.autograd.grad(energy + (draw[0] * forces[0] ** 2).sum(), weights)
    return [energy.detach(), forces.detach(), *gradients]


def on_ranks(atoms: int, mode: str, partition: str) -> list[Tensor]:
    with graph_parallel(dist.get_world_size()):
        fc.set_gp_config({"group_size": dist.get_world_size(), "mode": mode, "partition": partition})
        energy, forces, *terms = trained(model, atoms)
        return [energy, forces, *(fc.all_reduce_sum_with_grad(term) for term in terms)]


@pytest.mark.parametrize(
    ("mode", "partition"),
    [("allgather", "index_split"), ("all_to_all", "index_split"), ("all_to_all", "spatial")],
)
@pytest.mark.parametrize(("atoms", "ranks"), [(10, 4), (7, 3), (2, 3)])
def test_a_model_trains_on_forces_as_on_one_process_by_the_gather_and_by_the_exchange(
    mode: str, partition: str, atoms: int, ranks: int, threads: Ranks
) -> None:
    right = trained(model_on_one, atoms)
    for found in threads(ranks)(on_ranks, atoms, mode, partition):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


def compiled() -> list[bool]:
    with graph_parallel(dist.get_world_size()) as rank:
        size = fc.get_gp_world_size()
        owner = torch.arange(9) % size
        edges = edges_of(9, 1)
        context = fc.build_gp_context(edges[:, owner[edges[1]] == rank], owner, rank, size)
        x = random(rank, context.total_local_atoms, 3).requires_grad_()

        def layer(x: Tensor, context: fc.GPContext) -> Tensor:
            rows = torch.cat((x, fc.all_to_all_collect(x, context)))
            source, target = context.edge_index_local
            return (rows[source].sin() * x[target]).sum()

        torch._dynamo.reset()
        program = torch.compile(layer, fullgraph=True, backend="aot_eager")
        got, right = (torch.autograd.grad(each(x, context), x)[0] for each in (program, layer))
        return [torch.allclose(got, right, rtol=1e-12)]


@pytest.mark.slow
@pytest.mark.processes
def test_the_exchange_is_compiled_whole(worlds: Any) -> None:
    assert worlds(2, "gloo", 240).run(compiled) == [[True]] * 2


# -- what is counted of the code that goes


def test_replaced_lines_and_names_are_counted(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "common/parallelism").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "common/gp_utils.py").write_text(
        '"""Doc.\n\nMore."""\n\n# why\nx = """a\nb"""\n\ndef f():\n    return 1\n'
    )
    (tmp_path / "common/parallelism/a.py").write_text("y = 1\n")
    model = (
        "from core.common import gp_utils\n"
        "from core.common.parallelism.graph_parallel_a2a import {}\n"
        "gp_utils.initialized()\n"
    )
    (tmp_path / "models/a.py").write_text(model.format("all_to_all_collect, GPContext"))
    files = lines.counted(tmp_path)
    assert [(each.path, each.lines, each.code) for each in files] == [
        ("common/gp_utils.py", 10, 4),
        ("common/parallelism/a.py", 1, 1),
    ]
    assert files[1].blob == "a003ef79b149"  # as git hash-object says
    assert set(lines.names_used(tmp_path)) == {"initialized", "all_to_all_collect", "GPContext"}
    assert lines.show(tmp_path) == 0
    assert "3 names are used in 1 other files; missing: none" in capsys.readouterr().out
    (tmp_path / "models/b.py").write_text(model.format("symm_halo_collect"))
    assert lines.show(tmp_path) == 1
    assert "missing: symm_halo_collect" in capsys.readouterr().out
