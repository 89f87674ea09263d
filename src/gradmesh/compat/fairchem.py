"""Drop-in for `fairchem.core.common.gp_utils` of fairchem-core 2.11 and later, with its all-to-all exchange of atoms.

The atoms of a graph are along dim 0, sharded over the ranks of the graph parallel (gp) group evenly (`size_list_fn`:
the first n % W ranks have one more), or, for `all_to_all_collect`, as the caller assigns them.

==============================================  ======  ========================  =============================
name                                            type    forward                   backward
==============================================  ======  ========================  =============================
`reduce_from_model_parallel_region`             P -> I  sum                       identity
`all_reduce_sum_with_grad`                      P -> R  sum                       sum
`scatter_to_model_parallel_region`              I -> V  local shard of dim 0      concatenate the shards
`gather_from_model_parallel_region`             V -> I  concatenate the shards    local shard
`gather_from_model_parallel_region_sum_grad`    V -> R  concatenate the shards    sum, local shard
`scale_backward_grad`                           I -> R  identity                  W times the gradient
`all_to_all_collect`                            V -> V  requested rows            rows sent back and added
==============================================  ======  ========================  =============================

The groups are those of `gradmesh.compat.gp_utils`: set them up with `setup_gp` or `setup_graph_parallel_groups`; before
that, a graph has one rank. `build_gp_context`, `all_to_all_collect`, `AllToAllCollect` and `GPContext` replace those of
`fairchem.core.common.parallelism`.

Up to 2.10, these functions take a dimension instead of the number of atoms: use `gradmesh.compat.gp_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.compat import _shared
from gradmesh.compat._shared import (
    GATHER,
    GATHER_SUM_GRAD,
    SCATTER,
    OpFunction,
    TupleFunction,
    gathered,
    region,
    run,
)
from gradmesh.compat.gp_utils import (
    _SETUP,
    ReduceFromModelParallelRegion,
    ScaleBackwardGrad,
    divide_and_check_no_remainder,
    ensure_div,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_gp_group,
    get_gp_rank,
    get_gp_world_size,
    gp_axis,
    initialized,
    pad_tensor,
    reduce_from_model_parallel_region,
    scale_backward_grad,
    setup_gp,
    setup_graph_parallel_groups,
)
from gradmesh.compat.gp_utils import cleanup_gp as _cleanup_groups
from gradmesh.errors import ArgumentError, ShapeError
from gradmesh.nn.graph import GraphPlan, Rows, by_count, by_space
from gradmesh.nn.graph.plan import check_own_matches, checked_edges, checked_own, checked_owner
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes, balanced
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.runtime.state import rank_state
from gradmesh.transport.run import exchange_device
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_gather, all_reduce

__all__ = [
    "AllReduceSumWithGrad",
    "AllToAllCollect",
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

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002


def size_list_fn(size: int, parts: int) -> list[int]:
    """An even split: the first `size % parts` parts have one more.

    >>> size_list_fn(5, 3)
    [2, 2, 1]
    """
    return list(balanced(size, parts))


class AllReduceSumWithGrad(OpFunction):
    """P -> R: the sum over the gp group; backward sums too. See `all_reduce_sum_with_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Sum, and save the op on `ctx`."""
        return run(ctx, _shared.all_reduce(input, gp_axis(), dst=R), input)


class ScatterToModelParallelRegion(OpFunction):
    """I -> V: the local shard of dim 0; backward concatenates. See `scatter_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:  # noqa: ARG004 - ignored by the original too
        """Take the local shard of dim 0, and save the op on `ctx`; `dim` is ignored."""
        return run(ctx, _shared.shard(input, gp_axis(), 0, size_list_fn), input, others=1)


class GatherFromModelParallelRegionGradPadded(TupleFunction):
    """The ranks' tensors, of the same shape, as a tuple; backward is the gradient of this rank's tensor.

    ::

        V -> I    shape (n, ...) -> W of shape (n, ...)    x0 -> (x0, x1)      g[0] <- (g[0], g[1])
                                                           x1 -> (x0, x1)      g[1] <- (g[0], g[1])
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, ...]:
        """Gather, and save the op on `ctx`."""
        return gathered(ctx, input, gp_axis(), dst=I)


class GatherFromModelParallelRegionSumGradPadded(TupleFunction):
    """The ranks' tensors, of the same shape, as a tuple; backward sums the ranks' gradients of this rank's tensor.

    ::

        V -> R    shape (n, ...) -> W of shape (n, ...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                           x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    Every rank must use at least one element of the tuple, because backward is a collective.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, ...]:
        """Gather, and save the op on `ctx`."""
        return gathered(ctx, input, gp_axis(), dst=R)


def pad_input(input: Tensor, padded_size: int) -> Tensor:
    """Append zeros along dim 0.

    Args:
        input: any tensor; returned unchanged if it needs no padding.
        padded_size: the size to reach.

    Raises:
        ShapeError: the tensor is longer than `padded_size`.

    Example:
        >>> pad_input(torch.ones(2), 3)
        tensor([1., 1., 0.])
    """
    return pad_tensor(input, 0, padded_size)


def all_reduce_sum_with_grad(input: Tensor) -> Tensor:
    """Sum over the gp group, into a tensor that each rank uses differently.

    ::

        P -> R    shape (...) -> (...)    x0 -> x0+x1      g0+g1 <- g0
                                          x1 -> x0+x1      g0+g1 <- g1

    Args:
        input: this rank's term; not modified.

    Raises:
        ArgumentError: `input` is not a dense tensor.
        MismatchError: the shapes or dtypes differ (detected on some backends).

    Example:
        >>> def on_each_rank():
        ...     setup_graph_parallel_groups(2, "threads")
        ...     x = torch.tensor(1.0 + gm.rank(), requires_grad=True)
        ...     ((1 + gm.rank()) * all_reduce_sum_with_grad(x)).backward()
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    return AllReduceSumWithGrad.forward(None, input)


@region(SCATTER, "(n, ...) -> (n / W, ...), one more on the first n % W ranks", setup=_SETUP)
def scatter_to_model_parallel_region(input: Tensor) -> Tensor:
    """This rank's shard of dim 0 of a tensor that is replicated over the gp group.

    Args:
        input: the same tensor on every rank.

    Raises:
        ArgumentError: `input` is 0-dim.
    """
    return ScatterToModelParallelRegion.forward(None, input)


@region(GATHER, "(n_r, ...) -> (natoms, ...)", setup=_SETUP, more=", 2")
def gather_from_model_parallel_region(input: Tensor, natoms: int) -> Tensor:
    """Concatenate the shards of the gp group along dim 0, into a tensor on which every rank does identical work.

    If the work that follows differs between ranks, use `gather_from_model_parallel_region_sum_grad`: each rank then has
    only its contribution to the gradient, and this function does not sum.

    Args:
        input: this rank's shard of the even split, or that shard padded to the size of the largest.
        natoms: the number of atoms of all ranks.

    Raises:
        ArgumentError: `natoms` is not an int >= 0.
        ShapeError: `input` is neither this rank's shard of `natoms` nor that shard padded.
    """
    return _gather(input, natoms, I, "gather_from_model_parallel_region")


@region(GATHER_SUM_GRAD, "(n_r, ...) -> (natoms, ...)", setup=_SETUP, more=", 2")
def gather_from_model_parallel_region_sum_grad(input: Tensor, natoms: int) -> Tensor:
    """Concatenate the shards of the gp group along dim 0, into a tensor that each rank uses differently.

    Arguments and errors are those of `gather_from_model_parallel_region`.
    """
    return _gather(input, natoms, R, "gather_from_model_parallel_region_sum_grad")


def _gather(input: Tensor, natoms: int, dst: Convention, name: str) -> Tensor:
    axis, total = gp_axis(), integer(natoms)
    if total is None or total < 0:
        raise ArgumentError.of(
            "natoms must be an int >= 0",
            op=f"compat.fairchem.{name}",
            axis=str(axis),
            expected="the number of atoms of all ranks, e.g. natoms=100",
            got=f"natoms={natoms!r}",
            remedy="if this is a dimension, the call is for fairchem-core up to 2.10: import\n"
            "gradmesh.compat.gp_utils instead of gradmesh.compat.fairchem",
        )
    sizes = size_list_fn(total, axis.size)
    padded = input.dim() > 0 and input.size(0) == sizes[0]
    part = input.narrow(0, 0, sizes[axis.rank]) if padded else input
    return all_gather(part, axis, 0, dst=dst, sizes=sizes)


class GPMode(StrEnum):
    """How a rank receives other ranks' atoms: all of them, or those that its edges need."""

    ALLGATHER = "allgather"
    ALL_TO_ALL = "all_to_all"


class GPPartition(StrEnum):
    """How atoms are assigned to ranks: by index or by position."""

    INDEX_SPLIT = "index_split"
    SPATIAL = "spatial"


@dataclass
class GraphParallelConfig:
    """The configuration of graph parallelism.

    Attributes:
        group_size: the number of ranks that share a graph.
        mode: how a rank receives other ranks' atoms.
        partition: how atoms are assigned to ranks.
    """

    group_size: int = 1
    mode: GPMode = GPMode.ALLGATHER
    partition: GPPartition = GPPartition.INDEX_SPLIT


def set_gp_config(config: GraphParallelConfig | Mapping[str, Any] | None) -> None:
    """Set the configuration that `get_gp_config` returns on this rank, until `cleanup_gp`.

    Args:
        config: a configuration, or a mapping with its fields; None removes it.

    Example:
        >>> set_gp_config({"group_size": 2, "mode": "all_to_all"})
        >>> get_gp_config().mode == GPMode.ALL_TO_ALL
        True
        >>> set_gp_config(None)
    """
    rank_state().drop(GraphParallelConfig)
    if config is not None:
        rank_state().put(GraphParallelConfig(**config) if isinstance(config, Mapping) else config)


def get_gp_config() -> GraphParallelConfig | None:
    """The configuration that was set; else, if the groups are set up, the default with their size; else None.

    Example:
        >>> get_gp_config() is None
        True
    """
    found = rank_state().get(GraphParallelConfig)
    return GraphParallelConfig(get_gp_world_size()) if found is None and initialized() else found


def resolve_gp_config_for_workers(
    gp_config: GraphParallelConfig | None, num_workers: int
) -> GraphParallelConfig | None:
    """The configuration with the number of workers as its group size.

    Args:
        gp_config: the user's configuration; not modified.
        num_workers: the number of workers that share a graph; with 1, `gp_config` is returned.

    Raises:
        ArgumentError: the group size is neither 1 (the default) nor the number of workers.

    Example:
        >>> resolve_gp_config_for_workers(None, 4).group_size
        4
    """
    if num_workers <= 1:
        return gp_config
    given = gp_config or GraphParallelConfig()
    if given.group_size not in (1, num_workers):
        raise ArgumentError.of(
            "group_size differs from the number of workers",
            op="compat.fairchem.resolve_gp_config_for_workers",
            expected=f"group_size={num_workers}, or 1 (the default), which is replaced",
            got=f"group_size={given.group_size}",
            remedy="omit group_size",
        )
    return replace(given, group_size=num_workers)


def cleanup_gp() -> None:
    """Destroy both groups and remove the configuration.

    Raises:
        NotInitializedError: the groups were not set up.
    """
    _cleanup_groups()
    rank_state().drop(GraphParallelConfig)


PartitionStrategy = GPPartition


def partition_atoms_index_split(
    total_atoms: int, num_ranks: int, device: torch.device | str | None = None
) -> Tensor:
    """Partition atoms by index into equal parts; the first ranks get one more if the division has a remainder.

    Args:
        total_atoms: the number of atoms.
        num_ranks: the number of ranks.
        device: of the result.

    Raises:
        ArgumentError: invalid numbers.

    Example:
        >>> partition_atoms_index_split(5, 2, torch.device("cpu"))
        tensor([0, 0, 0, 1, 1])
    """
    return by_count(total_atoms, num_ranks).to(device or "cpu")


def partition_atoms_spatial(
    pos: Tensor,
    num_ranks: int,
    num_iters: int = 10,  # noqa: ARG001 - ignored by the original too
) -> Tensor:
    """Partition atoms by region; the first ranks get one more if the division has a remainder.

    The regions are those of `by_space`, not those of the original: any partition is valid, and this one has fewer edges
    between ranks.

    Args:
        pos: positions, shape (atoms, 3); no gradient flows.
        num_ranks: the number of ranks.
        num_iters: ignored.

    Raises:
        ArgumentError: `pos` is not a matrix of finite numbers.

    Example:
        >>> corners = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
        >>> partition_atoms_spatial(corners, 2)
        tensor([0, 1, 0, 1])
    """
    return by_space(pos, num_ranks)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_a2a_partition(
    pos: Tensor,
    total_atoms: int,
    device: torch.device | str,
    world_size: int,
    rank: int,
    strategy: GPPartition,
) -> tuple[Tensor, Tensor]:
    """The rank that owns each atom, and the atoms that one rank owns.

    Args:
        pos: positions, shape (atoms, 3).
        total_atoms: the number of atoms.
        device: of the result.
        world_size: the number of ranks.
        rank: the rank whose atoms are returned.
        strategy: by position, `PartitionStrategy.SPATIAL`, or by index.

    Raises:
        ArgumentError: invalid positions or numbers.

    Example:
        >>> compute_a2a_partition(torch.rand(3, 3), 3, "cpu", 2, 1, PartitionStrategy.INDEX_SPLIT)
        (tensor([0, 0, 1]), tensor([2]))
    """
    if GPPartition(strategy) is GPPartition.SPATIAL:
        assignments = partition_atoms_spatial(pos, world_size).to(device)
    else:
        assignments = partition_atoms_index_split(total_atoms, world_size, device)
    return assignments, (assignments == rank).nonzero().squeeze(1)


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
        >>> def on_each_rank():
        ...     setup_graph_parallel_groups(2, "threads")
        ...     edges = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[1], [2]])][gm.rank()]
        ...     context = build_gp_context(edges, torch.tensor([0, 0, 1]), gm.rank(), 2)
        ...     return context.send_indices.tolist(), context.edge_index_local.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([1], [[0, 2], [1, 1]]), ([0], [[1], [0]])]
    """
    call = Call("compat.fairchem.build_gp_context", torch.empty(0), gp_axis())
    axis, fail = call.axis, call.fail
    if initialized() and (rank, world_size) != (axis.rank, axis.size):
        fail(
            "rank and world_size do not match the gp group",
            expected=f"rank={axis.rank}, world_size={axis.size}",
            got=f"rank={rank}, world_size={world_size}",
            remedy="pass get_gp_rank() and get_gp_world_size()",
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
            expected=f"targets that rank {rank} owns, or that are sources of its other edges",
            got=f"{len(lost)} of {pairs.shape[1]} edges with other targets, e.g. {pairs[:, lost[0]].tolist()}",
            remedy="pass each edge on the rank that owns its target",
        )
    plan = GraphPlan(pairs[:, ends_here], owner, axis, own=own) if initialized() else None
    rows: Rows
    foreign = torch.tensor(int(not ends_here.all()), device=exchange_device(axis))
    if plan is not None and not all_reduce(foreign, axis, op="max", dst=R):
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
        >>> def on_each_rank():
        ...     setup_graph_parallel_groups(2, "threads")
        ...     edges = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[1], [2]])][gm.rank()]
        ...     context = build_gp_context(edges, torch.tensor([0, 0, 1]), gm.rank(), 2)
        ...     x = torch.tensor([[10.0], [11.0]] if gm.rank() == 0 else [[12.0]], requires_grad=True)
        ...     received = all_to_all_collect(x, context)
        ...     (received**2).sum().backward()
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
        return run(ctx, _shared.neighbors(x_local, axis, send_indices, sent, received), x_local, others=9)


# Served by __getattr__: on the threads backend, ranks share this module.
_GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
_DATA_PARALLEL_GROUP: dist.ProcessGroup | None


def __getattr__(name: str) -> dist.ProcessGroup | None:
    if name == "_GRAPH_PARALLEL_GROUP":
        return get_gp_group()
    if name == "_DATA_PARALLEL_GROUP":
        return get_dp_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
