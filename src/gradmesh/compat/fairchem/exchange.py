"""The all-to-all exchange of the atoms that a rank's edges need: a `GraphPlan` under fairchem's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.types import R
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import all_reduce

__all__ = ["AllToAllCollect", "GPContext", "all_to_all_collect", "build_gp_context"]


@dataclass
class GPContext:
    """What a rank sends and receives in each `all_to_all_collect`, and its edges in local indices.

    Local indices count this rank's atoms first, in the order of its partition, then the received atoms, sorted by owner
    and global index.

    Attributes:
        rank: this rank's index in the gp group.
        world_size: the number of ranks that share the graph.
        total_local_atoms: the number of atoms that this rank owns.
        send_indices: the local indices of the atoms to send, ordered by receiving rank.
        send_counts: the number of atoms sent to each rank, shape (W,).
        recv_counts: the number of atoms received from each rank, shape (W,).
        edge_index_local: the edges in local indices, shape (2, edges).
        send_splits: `send_counts` as a list.
        recv_splits: `recv_counts` as a list.
        total_recv: the sum of `recv_counts`.
        local_edge_idx: the edges whose source is a local atom.
        remote_edge_idx: the edges whose source is a received atom.
        rank_assignments: the rank that owns each atom of the graph, shape (atoms,).
        plan: the same as a `GraphPlan`, whose local rows are the atoms sorted by index; None if built without groups,
            or if any rank has edges that end at another rank's atom.
        node_partition: the atoms that this rank owns, in its order.
        needed_atoms: the received atoms, in order.
        global_to_local: the local index of each atom of the graph; -1 if not on this rank.
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
        """The owner of each received atom."""
        return self.rank_assignments[self.needed_atoms]

    @property
    def total_needed_atoms(self) -> int:
        """The number of received atoms, `total_recv`."""
        return self.total_recv


@torch.compiler.disable  # type: ignore[untyped-decorator]
def build_gp_context(
    edge_index: Tensor,
    rank_assignments: Tensor,
    rank: int,
    world_size: int,
    node_partition: Tensor | None = None,
) -> GPContext:
    """Find the atoms that the ranks of the gp group need from each other, and map this rank's edges to local indices.

    A collective of the gp group: it makes a `GraphPlan`, which is the context's `plan`. Before the set-up of the
    groups, nothing is exchanged.

    An edge may end at an atom of another rank if this rank receives that atom as the source of another edge: rows are
    exchanged for sources only. The caller must send back the results for such targets. A plan does not support such
    edges, so `plan` is then None on every rank.

    Args:
        edge_index: this rank's edges, shape (2, edges): global indices of source and target atoms. Usually this rank
            owns the targets.
        rank_assignments: the rank that owns each atom, shape (atoms,), the same on every rank.
        rank: this rank's index in the gp group.
        world_size: the number of ranks of the group.
        node_partition: the atoms that this rank owns, in its order; None: sorted by index.

    Raises:
        ArgumentError: an edge's target is neither owned nor received, an atom is out of range, `node_partition` does
            not match `rank_assignments`, or `rank` or `world_size` are not those of the group. If one rank raises it,
            the others raise `MismatchError`.
        MismatchError: `rank_assignments` differs between ranks.

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
            "rank and world_size do not match the gp group",
            f"rank={axis.rank}, world_size={axis.size}",
            f"rank={rank}, world_size={world_size}",
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
            f"targets that rank {rank} owns, or that are sources of its other edges",
            f"{len(lost)} of {pairs.shape[1]} edges with other targets, e.g. {pairs[:, lost[0]].tolist()}",
            "pass each edge on the rank that owns its target",
        )
    plan = GraphPlan(pairs[:, ends_here], owner, axis, own=own) if initialized() else None
    rows: Rows
    if plan is not None and not _any_rank(not bool(ends_here.all()), axis):
        rows = plan
    else:
        plan, rows = None, Rows(axis if initialized() else Axis("gp", rank, world_size, axis.group), owner)
        rows.ask(far, ask=initialized())
    local = torch.full_like(owner, -1)
    local[torch.cat((own, rows.remote))] = torch.arange(len(own) + len(rows.remote), device=local.device)
    edges, sends = local[pairs], rows.send_rows
    sent = [len(sends.get(other, ())) for other in range(world_size)]
    received = [rows.receive_counts.get(other, 0) for other in range(world_size)]
    return GPContext(
        rank=rank,
        world_size=world_size,
        total_local_atoms=len(own),
        send_indices=local[rows.own[torch.cat((own[:0], *sends.values()))]],
        send_counts=torch.tensor(sent, device=local.device),
        recv_counts=torch.tensor(received, device=local.device),
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
        global_to_local=local,
    )


def _any_rank(here: bool, axis: Axis) -> bool:
    return bool(all_reduce(torch.tensor(int(here), device=exchange_device(axis)), axis, op="max", dst=R))


def all_to_all_collect(
    x_local: Tensor,
    gp_ctx: GPContext,
    send_indices: Tensor | None = None,  # noqa: ARG001 - some versions pass it in addition to the context
) -> Tensor:
    """Receive the rows of other ranks' atoms that are sources of this rank's edges.

    `gp_ctx.edge_index_local` indexes `torch.cat([x_local, all_to_all_collect(x_local, gp_ctx)])`.

    ::

        V -> V    shape (local atoms, ...) -> (gp_ctx.total_recv, ...)

                  rank 0 sends a1   [a0 a1] -> [b0]      [0 g1] <- [g0]
                  rank 1 sends b0   [b0 b1] -> [a1]      [g0 0] <- [g1]

    In backward, the gradient of each row is sent back to its owner, which adds those of all ranks.

    Args:
        x_local: the rows of this rank's atoms.
        gp_ctx: from `build_gp_context`, on every rank of the gp group.
        send_indices: ignored.

    Raises:
        ShapeError: the number of rows is not the number of local atoms. The other ranks raise `MismatchError`.
        ArgumentError: the context was built for another number of ranks.

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
            "the context was built for another number of ranks",
            expected=f"a context for {call.axis.size} ranks",
            got=f"a context for {gp_ctx.world_size} ranks, built without groups",
            remedy=f"call setup_graph_parallel_groups({gp_ctx.world_size}, None) before build_gp_context",
        )
    if x_local.dim() == 0 or x_local.shape[0] != gp_ctx.total_local_atoms:
        call.fail(
            "the number of rows of x_local is not the number of local atoms",
            expected=f"{gp_ctx.total_local_atoms} rows",
            got=f"shape {tuple(x_local.shape)}",
            remedy="pass the rows of gp_ctx.node_partition, e.g. x[gp_ctx.node_partition]",
            kind=ShapeError,
        )
    rows: Tensor = call.run(NeighborAllToAll(call.axis, 0, gp_ctx._picked, **call.precision), x_local)
    return rows


class AllToAllCollect(OpFunction):
    """V -> V: `all_to_all_collect` as the autograd Function of some versions, with explicit arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x_local: Tensor,
        send_indices: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        gp_group: AxisLike,
        rank: int,  # noqa: ARG004 - taken from the group
        world_size: int,  # noqa: ARG004
        precomputed_send_splits: Sequence[int] | None = None,
        precomputed_recv_splits: Sequence[int] | None = None,
        total_recv: int | None = None,  # noqa: ARG004
    ) -> Tensor:
        """Exchange rows, and save the op on `ctx`.

        Args:
            ctx: the context.
            x_local: the rows of this rank's atoms.
            send_indices: the rows to send, ordered by receiving rank.
            send_counts: the number of rows sent to each rank, shape (W,).
            recv_counts: the number of rows received from each rank, shape (W,).
            gp_group: the ranks; None: the gp group.
            rank: ignored.
            world_size: ignored.
            precomputed_send_splits: `send_counts` as a list.
            precomputed_recv_splits: `recv_counts` as a list.
            total_recv: ignored.
        """
        sent = send_counts.tolist() if precomputed_send_splits is None else precomputed_send_splits
        received = recv_counts.tolist() if precomputed_recv_splits is None else precomputed_recv_splits
        axis = gp_axis() if gp_group is None else gp_group
        return run(ctx, _ops.neighbors(x_local, axis, send_indices, sent, received), x_local, others=9)
