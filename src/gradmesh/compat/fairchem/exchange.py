"""The exchange of just those atoms that a rank's edges need from others: a `GraphPlan` under fairchem's names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.axis import Axis
from gradmesh.compat.gp_utils.groups import gp_axis, initialized
from gradmesh.errors import ShapeError
from gradmesh.nn.graph import GraphPlan, Rows
from gradmesh.nn.graph.edges import Fail
from gradmesh.nn.graph.given import checked_own, checked_owner, edges_of_rank, failing, see_that_own_fits
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes

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
        plan: the same as a plan, with the methods of one, whose own rows are the atoms in rising order; None where it
            was built without groups.
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
    _picked: Picked = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sent, received = Sizes(tuple(self.send_splits)), Sizes(tuple(self.recv_splits))
        self._picked = Picked(self.send_indices, sent, received, self.total_local_atoms)


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

    Args:
        edge_index: this rank's edges, shape (2, edges): the number of the source atom in the graph, and of the
            target atom, which this rank owns.
        rank_assignments: the rank that owns each atom, shape (atoms,), the same on every rank.
        rank: this rank's place in the gp group.
        world_size: the number of ranks of the group.
        node_partition: the atoms that this rank owns, in the order in which it holds them; None: by their number.

    Raises:
        ArgumentError: the arguments do not fit together: an edge whose target is owned by another rank, an atom that
            is not in the graph, a `node_partition` that is not what `rank_assignments` says, a rank or size that is
            not that of the group. Where one rank alone is wrong the others raise `MismatchError`.
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
    see_that_own_fits(own, owner, rank, fail, ("node_partition", "rank_assignments"))
    plan = GraphPlan(edge_index, owner, axis, own=own) if initialized() else None
    rows = plan or _alone(edge_index, owner, Axis("gp", rank, world_size, axis.group), fail)
    place = torch.empty_like(owner)
    place[torch.cat((own, rows.remote))] = torch.arange(len(own) + len(rows.remote), device=place.device)
    edges, sends = place[edge_index.to(place.device).long()], rows.send_rows
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
    )


def _alone(edge_index: Tensor, owner: Tensor, axis: Axis, fail: Fail) -> Rows:
    """The rows of one rank among others that are not there, and ask for none."""
    sources = edges_of_rank(edge_index, owner, axis.rank, fail)[0]
    rows, far = Rows(axis, owner), (owner != axis.rank).long().neg()
    far[sources[far[sources] < 0]] = 1
    rows.ask(far, ask=False)
    return rows


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
