"""The exchange of just those atoms that a rank's edges need from others: a `GraphPlan` under fairchem's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.axis import Axis, AxisLike
from gradmesh.collectives import all_reduce
from gradmesh.compat import _ops
from gradmesh.compat._function import OpFunction, run
from gradmesh.compat.gp_utils.groups import gp_axis, initialized
from gradmesh.errors import ShapeError
from gradmesh.nn.graph import GraphPlan, Rows
from gradmesh.nn.graph.agree import exchange_device
from gradmesh.nn.graph.edges import checked_edges
from gradmesh.nn.graph.inputs import check_own_matches, checked_own, checked_owner, failing
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes
from gradmesh.types import R

__all__ = ["AllToAllCollect", "GPContext", "all_to_all_collect", "build_gp_context"]


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
        plan: the same as a plan, with the methods of one, whose own rows are the atoms in rising order; None where it
            was built without groups, or where a rank has edges that end at another rank's atom.
        node_partition: the atoms that this rank owns, in the order in which it holds them.
        needed_atoms: the atoms that it receives, in their order.
        global_to_local: the local number of each atom of the graph; -1 for those that this rank has not got.
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
    plan: GraphPlan | None = None
    node_partition: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    needed_atoms: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    global_to_local: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _picked: Picked = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sent, received = Sizes(tuple(self.send_splits)), Sizes(tuple(self.recv_splits))
        self._picked = Picked(self.send_indices, sent, received, self.total_local_atoms)

    @property
    def needed_from_ranks(self) -> Tensor:
        """The rank that owns each atom that is received."""
        return self.rank_assignments[self.needed_atoms]

    @property
    def total_needed_atoms(self) -> int:
        """How many atoms are received, as `total_recv`."""
        return self.total_recv


@torch.compiler.disable  # type: ignore[untyped-decorator]
def build_gp_context(
    edge_index: Tensor,
    rank_assignments: Tensor,
    rank: int,
    world_size: int,
    node_partition: Tensor | None = None,
) -> GPContext:
    """Find out which atoms the ranks of the gp group need from each other, and number this rank's edges locally.

    Every rank of the group has to call it: it makes a `GraphPlan`, which is the context's `plan`. Before the set-up of
    the groups nothing is exchanged and nothing will be sent.

    An edge may end at an atom of another rank, if this rank receives that atom because another of its edges begins
    there: rows are exchanged for sources alone. What is computed for such a target is for the caller to send back.
    A plan has no such edges, so `plan` is None on every rank then.

    Args:
        edge_index: this rank's edges, shape (2, edges): the numbers of the source atom and of the target atom in the
            graph. Mostly this rank owns the target.
        rank_assignments: the rank that owns each atom, shape (atoms,), the same on every rank.
        rank: this rank's place in the gp group.
        world_size: the number of ranks of the group.
        node_partition: the atoms that this rank owns, in the order in which it holds them; None: by their number.

    Raises:
        ArgumentError: the arguments do not fit together: an edge whose target this rank neither owns nor receives, an
            atom that is not in the graph, a `node_partition` that is not what `rank_assignments` says, a rank or size
            that is not that of the group. Where one rank alone is wrong the others raise `MismatchError`.
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
    call = Call("compat.fairchem.build_gp_context", torch.empty(0), gp_axis())
    axis, fail = call.axis, failing(call)
    if initialized() and (rank, world_size) != (axis.rank, axis.size):
        fail(
            "rank and world_size are not those of the gp group",
            f"{axis.rank} and {axis.size}",
            f"{rank} and {world_size}",
            "pass get_gp_rank() and get_gp_world_size()",
        )
    owner = checked_owner(rank_assignments, world_size, fail)
    own = (
        (owner == rank).nonzero().squeeze(1) if node_partition is None else checked_own(node_partition, fail)
    )
    check_own_matches(own, owner, rank, fail, ("node_partition", "rank_assignments"))
    pairs = checked_edges(edge_index, len(owner), fail).to(owner.device)
    ends_here = owner[pairs[1]] == rank
    far = (owner != rank).long().neg()
    far[pairs[0][far[pairs[0]] < 0]] = 1
    lost = ((far[pairs[1]] < 0).nonzero()).squeeze(1)
    if len(lost):
        fail(
            "an edge ends at an atom that this rank neither owns nor receives",
            f"targets that rank {rank} owns, or that another of its edges starts at",
            f"{len(lost)} of {pairs.shape[1]} edges with others, the first {pairs[:, lost[0]].tolist()}",
            "give each edge to the rank that owns its target",
        )
    plan = GraphPlan(pairs[:, ends_here], owner, axis, own=own) if initialized() else None
    rows: Rows
    if plan is not None and not _anywhere(not bool(ends_here.all()), axis):
        rows = plan
    else:
        plan, rows = None, Rows(axis if initialized() else Axis("gp", rank, world_size, axis.group), owner)
        rows.ask(far, ask=initialized())
    place = torch.full_like(owner, -1)
    place[torch.cat((own, rows.remote))] = torch.arange(len(own) + len(rows.remote), device=place.device)
    edges, sends = place[pairs], rows.send_rows
    sent = [len(sends.get(other, ())) for other in range(world_size)]
    received = [rows.receive_counts.get(other, 0) for other in range(world_size)]
    return GPContext(
        rank=rank,
        world_size=world_size,
        total_local_atoms=len(own),
        send_indices=place[rows.own[torch.cat((own[:0], *sends.values()))]],
        send_counts=torch.tensor(sent, device=place.device),
        recv_counts=torch.tensor(received, device=place.device),
        edge_index_local=edges,
        send_splits=sent,
        recv_splits=received,
        total_recv=len(rows.remote),
        local_edge_idx=(edges[0] < len(own)).nonzero().squeeze(1),
        remote_edge_idx=(edges[0] >= len(own)).nonzero().squeeze(1),
        rank_assignments=rank_assignments,
        plan=plan,
        node_partition=own,
        needed_atoms=rows.remote,
        global_to_local=place,
    )


def _anywhere(here: bool, axis: Axis) -> bool:
    """Whether something is so on any rank."""
    return bool(all_reduce(torch.tensor(int(here), device=exchange_device(axis)), axis, op="max", dst=R))


def all_to_all_collect(
    x_local: Tensor,
    gp_ctx: GPContext,
    send_indices: Tensor | None = None,  # noqa: ARG001 - that of the context, which some versions hand over again
) -> Tensor:
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
        send_indices: not read.

    Raises:
        ShapeError: not one row for each atom that this rank owns. The other ranks raise `MismatchError`.
        ArgumentError: a context of another number of ranks.

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
    call = Call("compat.fairchem.all_to_all_collect", x_local, gp_ctx.plan.axis if gp_ctx.plan else gp_axis())
    if call.axis.size != gp_ctx.world_size:
        call.fail(
            "the context is one of other ranks",
            expected=f"a context of {call.axis.size} ranks",
            got=f"one of {gp_ctx.world_size}, built without groups",
            remedy="set up the groups before build_gp_context",
        )
    if x_local.dim() == 0 or x_local.shape[0] != gp_ctx.total_local_atoms:
        call.fail(
            "x_local does not have one row for each atom of this rank",
            expected=f"{gp_ctx.total_local_atoms} rows",
            got=f"shape {tuple(x_local.shape)}",
            remedy="pass the rows of the atoms that build_gp_context was told this rank owns",
            kind=ShapeError,
        )
    rows: Tensor = call.run(NeighborAllToAll(call.axis, 0, gp_ctx._picked, **call.precision), x_local)
    return rows


class AllToAllCollect(OpFunction):
    """V -> V: `all_to_all_collect` as the autograd Function that it was in some versions, with all it needs by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        x_local: Tensor,
        send_indices: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        gp_group: AxisLike,
        rank: int,  # noqa: ARG004 - the group knows it
        world_size: int,  # noqa: ARG004
        precomputed_send_splits: Sequence[int] | None = None,
        precomputed_recv_splits: Sequence[int] | None = None,
        total_recv: int | None = None,  # noqa: ARG004
    ) -> Tensor:
        """Exchange rows, and keep on `ctx` what backward needs.

        Args:
            ctx: the context.
            x_local: the rows of this rank's atoms.
            send_indices: which of them to send, rank after rank.
            send_counts: how many of them go to each rank, shape (W,).
            recv_counts: how many rows come from each rank, shape (W,).
            gp_group: the ranks; None: the gp group.
            rank: not read, as `world_size` and `total_recv`.
            world_size: the group knows it.
            precomputed_send_splits: `send_counts` as a list.
            precomputed_recv_splits: `recv_counts` as a list.
            total_recv: their sum.
        """
        sent = send_counts.tolist() if precomputed_send_splits is None else precomputed_send_splits
        received = recv_counts.tolist() if precomputed_recv_splits is None else precomputed_recv_splits
        axis = gp_axis() if gp_group is None else gp_group
        return run(ctx, _ops.neighbors(x_local, axis, send_indices, sent, received), x_local, others=9)
