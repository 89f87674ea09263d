"""The exchange of just those atoms that a rank's edges need from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.collectives import all_to_all
from gradmesh.compat.gp_utils.groups import gp_axis, initialized
from gradmesh.errors import ArgumentError, MismatchError, ShapeError, message

__all__ = ["GPContext", "all_to_all_collect", "build_gp_context"]


@dataclass
class GPContext:
    """What a rank sends and receives in each `all_to_all_collect`, and its edges in local numbers.

    Local numbers count this rank's own atoms first, in the order of its partition, and then those that it receives,
    by the rank that owns them and then by their number in the graph.

    Attributes:
        rank: this rank's place in the gp group.
        world_size: the number of ranks that share the graph.
        total_local_atoms: how many atoms this rank owns.
        send_indices: the local numbers of the atoms to send, rank after rank.
        send_counts: how many of them go to each rank, shape (W,).
        recv_counts: how many atoms come from each rank, shape (W,).
        edge_index_local: the edges in local numbers, shape (2, edges).
        send_splits: `send_counts` as a list.
        recv_splits: `recv_counts` as a list.
        total_recv: their sum.
        local_edge_idx: which edges start at an own atom.
        remote_edge_idx: which edges start at an atom that is received.
        rank_assignments: the rank that owns each atom of the graph, shape (atoms,).
    """

    rank: int
    world_size: int
    total_local_atoms: int
    send_indices: Tensor
    send_counts: Tensor
    recv_counts: Tensor
    edge_index_local: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    total_recv: int
    local_edge_idx: Tensor
    remote_edge_idx: Tensor
    rank_assignments: Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def build_gp_context(
    edge_index: Tensor,
    rank_assignments: Tensor,
    rank: int,
    world_size: int,
    node_partition: Tensor | None = None,
) -> GPContext:
    """Find out which atoms the ranks of the gp group need from each other, and number this rank's edges locally.

    Every rank of the group has to call it. Two small exchanges tell each rank which of its atoms are asked for.
    Before the set-up of the groups nothing is exchanged and nothing will be sent.

    Args:
        edge_index: this rank's edges, shape (2, edges): the number of the source atom in the graph, and of the
            target atom, which this rank owns.
        rank_assignments: the rank that owns each atom, shape (atoms,), the same on every rank.
        rank: this rank's place in the gp group.
        world_size: the number of ranks of the group.
        node_partition: the atoms that this rank owns, in the order in which it holds them; None: by their number.

    Raises:
        ArgumentError: on every rank, if on any of them the arguments do not fit together: an edge whose target is
            owned by another rank, an atom that is not in the graph, a `node_partition` that is not what
            `rank_assignments` says, a rank or size that is not that of the group.
        MismatchError: `rank_assignments` is not the same on every rank; on each.

    Example:
        >>> from gradmesh.compat import fairchem
        >>> def on_each_rank():
        ...     fairchem.setup_graph_parallel_groups(2, "threads")
        ...     rank = fairchem.get_gp_rank()
        ...     edges = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[1], [2]])][rank]
        ...     context = build_gp_context(edges, torch.tensor([0, 0, 1]), rank, 2)
        ...     fairchem.cleanup_gp()
        ...     return context.send_indices.tolist(), context.edge_index_local.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([1], [[0, 2], [1, 1]]), ([0], [[1], [0]])]
    """
    axis = gp_axis()
    mine = (rank_assignments == rank).nonzero().squeeze(1)
    own = mine if node_partition is None else node_partition
    problem = _problem(edge_index, rank_assignments, rank, world_size, own, mine)
    needed = edge_index.new_empty(0) if problem else _needed(edge_index[0], rank_assignments, rank)
    wanted = torch.bincount(rank_assignments[needed], minlength=world_size)
    if initialized():
        asked = _agree(wanted, rank_assignments, axis, problem)
    elif problem:
        _fail(axis, problem)
    else:
        asked = torch.zeros_like(wanted)
    recv_splits, send_splits = wanted.tolist(), asked.tolist()
    requested = needed[:0]
    if initialized():
        # A request goes to the rank that the atoms will come from, so what is sent here is what is received there.
        requested = all_to_all(needed, axis, split_sizes=recv_splits, concat_sizes=send_splits)
    local = torch.full_like(rank_assignments, -1, dtype=torch.long)
    local[torch.cat([own, needed])] = torch.arange(len(own) + len(needed), device=local.device)
    edges = local[edge_index]
    return GPContext(
        rank=rank,
        world_size=world_size,
        total_local_atoms=len(own),
        send_indices=local[requested],
        send_counts=asked,
        recv_counts=wanted,
        edge_index_local=edges,
        send_splits=send_splits,
        recv_splits=recv_splits,
        total_recv=len(needed),
        local_edge_idx=(edges[0] < len(own)).nonzero().squeeze(1),
        remote_edge_idx=(edges[0] >= len(own)).nonzero().squeeze(1),
        rank_assignments=rank_assignments,
    )


def all_to_all_collect(x_local: Tensor, gp_ctx: GPContext) -> Tensor:
    """Get the rows of those atoms of other ranks that this rank's edges start at.

    `torch.cat([x_local, all_to_all_collect(x_local, gp_ctx)])` is what `gp_ctx.edge_index_local` counts in.

    ::

        V -> V    shape (own atoms, ...) -> (gp_ctx.total_recv, ...)

                  rank 0, asked for a1   [a0 a1] -> [b0]      [0 g1] <- [g0]
                  rank 1, asked for b0   [b0 b1] -> [a1]      [g0 0] <- [g1]

    In backward the gradient of each row goes back to the rank that owns it, where those of all ranks are added.

    Args:
        x_local: the rows of this rank's atoms.
        gp_ctx: from `build_gp_context`, on every rank of the gp group.

    Raises:
        ShapeError: not one row for each atom that this rank owns.

    Example:
        >>> from gradmesh.compat import fairchem
        >>> def on_each_rank():
        ...     fairchem.setup_graph_parallel_groups(2, "threads")
        ...     rank = fairchem.get_gp_rank()
        ...     edges = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[1], [2]])][rank]
        ...     context = build_gp_context(edges, torch.tensor([0, 0, 1]), rank, 2)
        ...     x = torch.tensor([[10.0], [11.0]] if rank == 0 else [[12.0]], requires_grad=True)
        ...     received = all_to_all_collect(x, context)
        ...     (received**2).sum().backward()
        ...     fairchem.cleanup_gp()
        ...     return received.tolist(), x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([[12.0]], [[0.0], [22.0]]), ([[11.0]], [[24.0]])]
    """
    axis = gp_axis()
    if x_local.dim() == 0 or x_local.size(0) != gp_ctx.total_local_atoms:
        raise ShapeError(
            message(
                "x_local does not have one row for each atom of this rank",
                op="compat.fairchem.all_to_all_collect",
                axis=str(axis),
                expected=f"{gp_ctx.total_local_atoms} rows",
                got=f"shape {tuple(x_local.shape)}",
                remedy="pass the rows of the atoms that build_gp_context was told this rank owns",
            )
        )
    sent = x_local.index_select(0, gp_ctx.send_indices)
    return all_to_all(sent, axis, split_sizes=gp_ctx.send_splits, concat_sizes=gp_ctx.recv_splits)


def _needed(sources: Tensor, rank_assignments: Tensor, rank: int) -> Tensor:
    """The atoms of other ranks among the sources, by the rank that owns them, then by their number."""
    atoms: Tensor = sources[rank_assignments[sources] != rank].unique()
    return atoms[rank_assignments[atoms].argsort(stable=True)]


def _problem(
    edge_index: Tensor, rank_assignments: Tensor, rank: int, world_size: int, own: Tensor, mine: Tensor
) -> tuple[str, str, str] | None:
    """What is wrong with this rank's arguments, what was expected, and what came; None if nothing is."""
    atoms, axis = len(rank_assignments), gp_axis()
    if initialized() and (rank, world_size) != (axis.rank, axis.size):
        return (
            "rank and world_size are not those of the gp group",
            f"{axis.rank} and {axis.size}",
            f"{rank} and {world_size}",
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        return "edge_index is no list of edges", "shape (2, edges)", f"shape {tuple(edge_index.shape)}"
    for name, values, end in (
        ("rank_assignments", rank_assignments, world_size),
        ("edge_index", edge_index, atoms),
    ):
        if values.numel() and not 0 <= values.min() <= values.max() < end:
            low, high = values.min().item(), values.max().item()
            return f"{name} has numbers that are none", f"0 <= number < {end}", f"{low} to {high}"
    if not torch.equal(own.sort().values, mine):
        return (
            "node_partition is not what rank_assignments says",
            f"the {len(mine)} atoms of rank {rank}",
            f"{len(own)} atoms, not just those",
        )
    foreign = rank_assignments[edge_index[1]] != rank
    if foreign.any():
        return (
            "an edge ends at an atom of another rank",
            f"targets that rank {rank} owns",
            f"{int(foreign.sum())} of {edge_index.size(1)} edges with other targets",
        )
    return None


def _agree(
    wanted: Tensor, rank_assignments: Tensor, axis: Axis, problem: tuple[str, str, str] | None
) -> Tensor:
    """Tell each rank how many atoms are wanted of it; returns what each wants of this one.

    A rank whose arguments are wrong says -1, so that all ranks raise and none waits. With the count goes a checksum
    of `rank_assignments`, by which the ranks decide who is asked for what.
    """
    places = torch.arange(len(rank_assignments), device=rank_assignments.device)
    checksum = ((rank_assignments.long() + 1) * (places * _ODD + 1)).sum()
    counts = wanted if problem is None else wanted.new_full((axis.size,), -1)
    got = all_to_all(torch.stack([counts, checksum.expand(axis.size)], dim=1), axis)
    refused = (got[:, 0] < 0).nonzero().squeeze(1).tolist()
    if problem is not None:
        _fail(axis, problem)
    if refused:
        _fail(
            axis,
            ("a rank's arguments are wrong", "right ones on every rank", f"wrong ones on ranks {refused}"),
        )
    other = (got[:, 1] != checksum).nonzero().squeeze(1).tolist()
    if other:
        problem = (
            "rank_assignments differ",
            "the same on every rank of the gp group",
            f"others on ranks {other} than on this one",
        )
        _fail(axis, problem, MismatchError)
    return got[:, 0]


_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio, as an int64 (Knuth's multiplicative hash)."""


def _fail(
    axis: Axis, problem: tuple[str, str, str], kind: type[ArgumentError | MismatchError] = ArgumentError
) -> NoReturn:
    text, expected, got = problem
    raise kind(
        message(
            text,
            op="compat.fairchem.build_gp_context",
            axis=str(axis),
            expected=expected,
            got=got,
            remedy="assign the atoms alike on every rank, and keep on each the edges whose targets it owns",
        )
    )
