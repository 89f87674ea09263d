"""Drop-in for `ocpmodels.common.gp_utils`: graph parallel groups, and mappings over their ranks.

It also replaces that of fairchem-core 1.x (1.10 added the last three names of the table) and 2.0 to 2.10. From 2.11 on,
the same names have other arguments: use `gradmesh.compat.fairchem`.

The mappings over the ranks of the graph parallel (gp) group; each has a Function class with a corresponding name:

=============================================  ======  ========================  =============================
name                                           type    forward                   backward
=============================================  ======  ========================  =============================
`copy_to_model_parallel_region`                I -> R  identity                  sum
`reduce_from_model_parallel_region`            P -> I  sum                       identity
`scatter_to_model_parallel_region`             I -> V  local shard               concatenate the shards
`gather_from_model_parallel_region`            V -> I  concatenate the shards    local shard, of its true size
`gather_from_model_parallel_region_sum_grad`   V -> R  concatenate the shards    sum, local shard
`scale_backward_grad`                          I -> R  identity                  W times the gradient
=============================================  ======  ========================  =============================

A scatter splits like `_split_tensor`: ceil(n / W) each, the last ones smaller or empty. A gather accepts shards of any
sizes, which it exchanges first. `dim` may be negative. Inputs are not modified.

Before the set-up there is no graph parallelism: the gp group has one rank, every mapping is the identity, and all ranks
of the world are data parallel. On the threads backend, each rank has separate groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import default_group
from gradmesh.autograd.rule import apply
from gradmesh.compat import _shared
from gradmesh.compat._shared import (
    COPY,
    GATHER,
    GATHER_SUM_GRAD,
    REDUCE,
    SCATTER,
    OpFunction,
    region,
    run,
    single_rank_axis,
)
from gradmesh.errors import ArgumentError, GradmeshError, NotInitializedError, ShapeError
from gradmesh.runtime.mesh import Axis, world_group
from gradmesh.runtime.state import rank_state
from gradmesh.types import I, R

__all__ = [
    "CopyToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "GatherFromModelParallelRegionSumGrad",
    "ReduceFromModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
    "cleanup_gp",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_tensor",
    "reduce_from_model_parallel_region",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    "setup_gp",
    "setup_graph_parallel_groups",
    "trim_tensor",
]

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002


_SETUP = 'setup_graph_parallel_groups(2, "threads")'
"""The first line of the examples of regions."""


class _Groups(NamedTuple):
    graph: dist.ProcessGroup
    data: dist.ProcessGroup
    world: dist.ProcessGroup


def _groups() -> _Groups | None:
    """This rank's groups, unless the world in which they were made was destroyed."""
    found = rank_state().get(_Groups)
    return found if found is not None and found.world is default_group() else None


def ensure_div(a: int, b: int) -> None:
    """Check that `b` divides `a`.

    Raises:
        ArgumentError: b does not divide a, or is not positive.

    Example:
        >>> ensure_div(6, 3)
    """
    if b < 1 or a % b:
        raise ArgumentError.of(
            f"{b} does not divide {a}",
            op="compat.gp_utils.ensure_div",
            expected=f"a positive divisor of {a}",
            got=f"a={a}, b={b}",
            remedy=f"choose a group size from {[n for n in range(1, min(a, 64) + 1) if a % n == 0]}"
            if 0 < a < 4096
            else "choose a group size that divides the number of ranks",
        )


def divide_and_check_no_remainder(a: int, b: int) -> int:
    """Divide without remainder.

    Raises:
        ArgumentError: b does not divide a, or is not positive.

    Example:
        >>> divide_and_check_no_remainder(6, 3)
        2
    """
    ensure_div(a, b)
    return a // b


def setup_gp(config: Mapping[str, Any]) -> None:
    """Make the graph parallel and data parallel groups of a configuration. A collective of all ranks of the world.

    The layout is that of `setup_graph_parallel_groups`.

    Args:
        config: has `config["gp_gpus"]`, the number of ranks that share a graph (clamped to the number of ranks, which
            it must divide), and `config["distributed_backend"]`, or None for the world's backend.

    Raises:
        ArgumentError: `gp_gpus` does not divide the number of ranks.
        GradmeshError: the groups exist already.
        NotInitializedError: torch.distributed is not initialized.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> setup_gp({"gp_gpus": 8, "distributed_backend": "gloo"})
        >>> get_gp_world_size(), get_gp_rank()
        (1, 0)
        >>> cleanup_gp()
    """
    world = world_group("compat.gp_utils.setup_gp")
    _set_up(world, min(config["gp_gpus"], world.size()), config["distributed_backend"], "setup_gp")


def setup_graph_parallel_groups(graph_parallel_group_size: int, distributed_backend: str | None) -> None:
    """Make the graph parallel and data parallel groups. A collective of all ranks of the world.

    Ranks are laid out row by row as (dp, gp): consecutive ranks share a graph, and a data parallel group has one rank
    of each graph.

    Args:
        graph_parallel_group_size: the number of ranks that share a graph; must divide the number of ranks.
        distributed_backend: the backend of the groups; None: the world's.

    Raises:
        ArgumentError: the size does not divide the number of ranks.
        GradmeshError: the groups exist already.
        NotInitializedError: torch.distributed is not initialized.

    Example:
        >>> def on_each_rank():
        ...     setup_graph_parallel_groups(2, "threads")
        ...     return get_dp_rank(), get_gp_rank()
        >>> gm.launch(on_each_rank, 4, backend="threads")
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    world = world_group("compat.gp_utils.setup_graph_parallel_groups")
    _set_up(world, graph_parallel_group_size, distributed_backend, "setup_graph_parallel_groups")


def _set_up(world: dist.ProcessGroup, size: int, backend: str | None, name: str) -> None:
    if initialized():
        raise GradmeshError.of(
            "the groups are set up already",
            op=f"compat.gp_utils.{name}",
            expected="one set-up",
            got=f"existing groups with {get_gp_world_size()} ranks for each graph",
            remedy="call cleanup_gp() first",
        )
    ensure_div(world.size(), size)
    layout = torch.arange(world.size()).view(-1, size)
    data = _own_group(layout.T.tolist(), world.rank(), backend)
    graph = _own_group(layout.tolist(), world.rank(), backend)
    rank_state().put(_Groups(graph, data, world))


def _own_group(rows: Iterable[list[int]], rank: int, backend: str | None) -> dist.ProcessGroup:
    """Make all rows' groups (a collective), and return the one that contains `rank`."""
    made: dict[bool, dist.ProcessGroup] = {rank in row: dist.new_group(row, backend=backend) for row in rows}
    return made[True]


def cleanup_gp() -> None:
    """Destroy both groups.

    Raises:
        NotInitializedError: the groups were not set up.

    Example:
        >>> gm.init()
        >>> setup_graph_parallel_groups(1, None)
        >>> cleanup_gp()
        >>> initialized()
        False
    """
    made = rank_state().get(_Groups)
    if made is None:
        raise NotInitializedError.of(
            "the groups are not set up",
            op="compat.gp_utils.cleanup_gp",
            expected="groups made by setup_gp or setup_graph_parallel_groups",
            got="no groups",
            remedy="call cleanup_gp() once, after the set-up; test with initialized()",
        )
    rank_state().drop(_Groups)
    if made.world is dist.group.WORLD:
        for group in (made.data, made.graph):
            # The caller may have destroyed one of them.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def initialized() -> bool:
    """True if the groups are set up.

    Example:
        >>> initialized()
        False
    """
    return _groups() is not None


def get_dp_group() -> dist.ProcessGroup | None:
    """The data parallel group of this rank; None (torch's default, the world) before the set-up.

    Example:
        >>> get_dp_group() is None
        True
    """
    groups = _groups()
    return groups.data if groups else None


def get_gp_group() -> dist.ProcessGroup | None:
    """The graph parallel group of this rank; None before the set-up."""
    groups = _groups()
    return groups.graph if groups else None


def get_dp_rank() -> int:
    """This rank's index in its data parallel group; before the set-up, in the world."""
    return dist.get_rank(get_dp_group()) if dist.is_initialized() else 0


def get_gp_rank() -> int:
    """This rank's index in its graph parallel group; 0 before the set-up."""
    return gp_axis().rank


def get_dp_world_size() -> int:
    """The number of data parallel ranks; before the set-up all ranks of the world.

    Example:
        >>> def on_each_rank():
        ...     before = get_dp_world_size()
        ...     setup_graph_parallel_groups(2, "threads")
        ...     return before, get_dp_world_size()
        >>> gm.launch(on_each_rank, 4, backend="threads")[0]
        (4, 2)
    """
    return dist.get_world_size(get_dp_group()) if dist.is_initialized() else 1


def get_gp_world_size() -> int:
    """The number of ranks that share a graph; 1 before the set-up."""
    return gp_axis().size


def gp_axis() -> Axis:
    """The axis of the ranks that share this rank's graph; before the set-up, this rank only."""
    group = get_gp_group()
    return single_rank_axis("gp") if group is None else Axis("gp", group.rank(), group.size(), group)


def pad_tensor(tensor: Tensor, dim: int = -1, target_size: int | None = None) -> Tensor:
    """Append zeros along `dim`.

    Args:
        tensor: any tensor; returned unchanged if it needs no padding.
        dim: the dimension to pad.
        target_size: the size to reach; None: the next multiple of the gp world size.

    Raises:
        ShapeError: the tensor is longer than `target_size`.

    Example:
        >>> pad_tensor(torch.ones(2), target_size=3)
        tensor([1., 1., 0.])
    """
    size = tensor.size(dim)
    missing = -size % get_gp_world_size() if target_size is None else target_size - size
    if missing < 0:
        raise ShapeError.of(
            "the tensor is longer than target_size",
            op="compat.gp_utils.pad_tensor",
            expected=f"size at most {target_size} along dim {dim}",
            got=f"shape {tuple(tensor.shape)}",
            remedy=f"pass the maximum of all ranks' sizes, at least target_size={size}",
        )
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def trim_tensor(tensor: Tensor, sizes: Tensor | None = None, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Trim the end along `dim`, so that the size is divisible by the gp world size.

    Args:
        tensor: any tensor; returned unchanged if it needs no trimming.
        sizes: the sizes of consecutive pieces along `dim`, such as atoms per molecule.
        dim: the dimension to trim.

    Returns:
        The tensor, and a copy of the sizes, reduced accordingly from the end.

    Example:
        >>> trim_tensor(torch.ones(3), torch.tensor([1, 2]))
        (tensor([1., 1., 1.]), tensor([1, 2]))
    """
    size = tensor.size(dim)
    excess = size % get_gp_world_size()
    if excess == 0:
        return tensor, sizes
    if sizes is not None:
        # If the last piece is smaller than the excess, it becomes 0 and the piece before it is reduced by the rest.
        left = (sizes.flip(0).cumsum(0) - excess).clamp(min=0)
        sizes = left.diff(prepend=left.new_zeros(1)).flip(0).to(sizes.dtype)
    return tensor.narrow(dim, 0, size - excess), sizes


def _split_tensor(
    tensor: Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split along `dim` into exactly `num_parts` views of ceil(n / num_parts), the last ones smaller or empty.

    >>> [part.tolist() for part in _split_tensor(torch.arange(5), 4)]
    [[0, 1], [2, 3], [4], []]
    """
    parts = tensor.split(part_sizes(tensor.size(dim), num_parts), dim)
    return tuple(part.contiguous() for part in parts) if contiguous_chunks else tuple(parts)


def part_sizes(size: int, num_parts: int) -> list[int]:
    """The sizes of the parts of `_split_tensor`.

    >>> part_sizes(5, 4)
    [2, 2, 1, 0]
    """
    part = -(-size // num_parts)
    return [max(0, min(part, size - rank * part)) for rank in range(num_parts)]


class CopyToModelParallelRegion(OpFunction):
    """I -> R: the identity; backward sums over the gp group. See `copy_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Copy, and save the op on `ctx`."""
        return run(ctx, _shared.replicate(input, gp_axis()), input)


class ReduceFromModelParallelRegion(OpFunction):
    """P -> I: the sum over the gp group; backward is the identity. See `reduce_from_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Sum, and save the op on `ctx`."""
        return run(ctx, _shared.all_reduce(input, gp_axis(), dst=I), input)


class ScatterToModelParallelRegion(OpFunction):
    """I -> V: the local shard; backward concatenates the shards. See `scatter_to_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Take the local shard along `dim`, and save the op on `ctx`."""
        return run(ctx, _shared.shard(input, gp_axis(), dim, part_sizes), input, others=1)


class GatherFromModelParallelRegion(OpFunction):
    """V -> I: the shards concatenated; backward is the local shard. See `gather_from_model_parallel_region`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim`, and save the op on `ctx`."""
        op = _shared.all_gather(input, gp_axis(), dim, dst=I, sizes="auto")
        return run(ctx, op, input, others=1)


class GatherFromModelParallelRegionSumGrad(OpFunction):
    """V -> R: the shards concatenated; backward sums. See `gather_from_model_parallel_region_sum_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim`, and save the op on `ctx`."""
        op = _shared.all_gather(input, gp_axis(), dim, dst=R, sizes="auto")
        return run(ctx, op, input, others=1)


class ScaleBackwardGrad(OpFunction):
    """I -> R: the identity; backward is W times the gradient. See `scale_backward_grad`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Copy, and save the op on `ctx`."""
        return run(ctx, _shared.CountedByAll(gp_axis()), input)


def _reduce(ctx: Any, input: Tensor) -> Tensor:  # noqa: ARG001 - the original's signature
    """P -> I: the sum over the gp group, as a new tensor; backward is the identity."""
    return ReduceFromModelParallelRegion.forward(None, input)


def _split(input: Tensor, dim: int = -1) -> Tensor:
    """I -> V: a copy of the local shard; backward concatenates."""
    return ScatterToModelParallelRegion.forward(None, input, dim)


def _gather(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the shards of the gp group, of equal sizes, concatenated; backward is the local shard."""
    return apply(_shared.all_gather(input, gp_axis(), dim, dst=I), input)


def _gather_with_padding(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the shards of the gp group, of any sizes, concatenated without padding; backward is the local shard."""
    return GatherFromModelParallelRegion.forward(None, input, dim)


@region(COPY, setup=_SETUP)
def copy_to_model_parallel_region(input: Tensor) -> Tensor:
    """Mark that the ranks of the gp group use `input` differently from here on: the identity, with summed gradients.

    For replicated tensors that enter graph parallel work.

    Args:
        input: the same tensor on every rank of the group.

    Raises:
        ArgumentError: `input` is not a dense tensor.
    """
    return CopyToModelParallelRegion.forward(None, input)


@region(REDUCE, setup=_SETUP)
def reduce_from_model_parallel_region(input: Tensor) -> Tensor:
    """Sum over the gp group, into a tensor on which every rank does identical work.

    Args:
        input: this rank's term; not modified.

    Raises:
        ArgumentError: `input` is not a dense tensor.
        MismatchError: the shapes or dtypes differ (detected on some backends).
    """
    return ReduceFromModelParallelRegion.forward(None, input)


@region(SCATTER, "(n, ...) -> (ceil(n / W), ...), less or 0 on the last ranks", setup=_SETUP)
def scatter_to_model_parallel_region(input: Tensor, dim: int = -1) -> Tensor:
    """This rank's shard along `dim` of a tensor that is replicated over the gp group.

    Args:
        input: the same tensor on every rank.
        dim: the dimension to split, the last one by default. fairchem-core 2.11 and later has no `dim` and splits the
            first one: see `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range.
    """
    return ScatterToModelParallelRegion.forward(None, input, dim)


@region(GATHER, "(n_r, ...) -> (n_0 + ... + n_W-1, ...)", setup=_SETUP)
def gather_from_model_parallel_region(input: Tensor, dim: int = -1, natoms: None = None) -> Tensor:
    """Concatenate the shards of the gp group, into a tensor on which every rank does identical work.

    The gradient of the result is complete on every rank, so backward takes the local slice without a sum. If the work
    that follows differs between ranks, each rank has only its contribution to the gradient: use
    `gather_from_model_parallel_region_sum_grad`, or call `copy_to_model_parallel_region` on the result.

    Args:
        input: this rank's shard; its size along `dim` may differ between ranks.
        dim: the dimension to concatenate along.
        natoms: not supported; the argument of fairchem-core 2.11 and later, see `gradmesh.compat.fairchem`.

    Raises:
        ArgumentError: `dim` is out of range, or `natoms` is given.
        MismatchError: other sizes or dtypes differ (detected on some backends).
    """
    _refuse_natoms(input, dim, natoms, "gather_from_model_parallel_region")
    return GatherFromModelParallelRegion.forward(None, input, dim)


@region(GATHER_SUM_GRAD, "(n_r, ...) -> (n_0 + ... + n_W-1, ...)", setup=_SETUP)
def gather_from_model_parallel_region_sum_grad(input: Tensor, dim: int = -1, natoms: None = None) -> Tensor:
    """Concatenate the shards of the gp group, into a tensor that each rank uses differently.

    Arguments and errors are those of `gather_from_model_parallel_region`.
    """
    _refuse_natoms(input, dim, natoms, "gather_from_model_parallel_region_sum_grad")
    return GatherFromModelParallelRegionSumGrad.forward(None, input, dim)


def scale_backward_grad(input: Tensor) -> Tensor:
    """Scale the gradient of a loss by the number of ranks of the gp group.

    For a data parallel wrapper that averages gradients over all ranks of the world, while the W ranks of a graph share
    one loss: without this factor, the average is W times too small.

    ::

        I -> R    shape (...) -> (...)    x -> x      W g <- g
                                          x -> x      W g <- g

    It is `copy_to_model_parallel_region` without communication, for a result whose gradient is the same on every rank.
    The derivative of this gradient is W times the second derivative. (The original's is W * W times that: its backward
    scales again.)

    Args:
        input: the same on every rank of the group; the gradient of the result must be the same too.

    Example:
        >>> def on_each_rank():
        ...     setup_graph_parallel_groups(2, "threads")
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     loss = scale_backward_grad(x**2)
        ...     loss.backward()
        ...     return loss.item(), x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(9.0, 12.0), (9.0, 12.0)]
    """
    return ScaleBackwardGrad.forward(None, input)


def _refuse_natoms(input: Tensor, dim: int, natoms: object, name: str) -> None:
    """Raise for calls with arguments of fairchem-core 2.11 and later, if they can be recognized."""
    inside = not isinstance(dim, int) or -input.dim() <= dim < input.dim()
    if natoms is None and inside:
        return
    raise ArgumentError.of(
        "natoms is not supported" if natoms is not None else "dim is out of range",
        op=f"compat.gp_utils.{name}",
        axis=str(gp_axis()),
        expected=f"(input, dim), with {-input.dim()} <= dim < {input.dim()} for a {input.dim()}-d tensor",
        got=f"natoms={natoms!r}" if natoms is not None else f"dim={dim!r} for shape {tuple(input.shape)}",
        remedy="if this is a number of atoms, the call is for fairchem-core 2.11 or later: import\n"
        "gradmesh.compat.fairchem instead of gradmesh.compat.gp_utils",
    )


# Served by __getattr__: on the threads backend, ranks share this module.
_GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
_DATA_PARALLEL_GROUP: dist.ProcessGroup | None


def __getattr__(name: str) -> dist.ProcessGroup | None:
    if name == "_GRAPH_PARALLEL_GROUP":
        return get_gp_group()
    if name == "_DATA_PARALLEL_GROUP":
        return get_dp_group()
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; names of fairchem-core 2.11 and later are in "
        "gradmesh.compat.fairchem"
    )
