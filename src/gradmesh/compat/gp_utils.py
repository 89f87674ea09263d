"""Drop-in for `ocpmodels.common.gp_utils`: graph parallel groups, and the four regions of Megatron between them.

The region functions and classes, over the ranks of the graph parallel (gp) group:

==========================================  ========  ========================  =============================
name                                        type      forward                   backward
==========================================  ========  ========================  =============================
`copy_to_model_parallel_region`             I -> R    identity                  sum
`reduce_from_model_parallel_region`         P -> I    sum                       identity
`scatter_to_model_parallel_region`          I -> V    own part                  concatenate the parts
`gather_from_model_parallel_region`         V -> I    concatenate the parts     own part, of its true size
==========================================  ========  ========================  =============================

Parts of a scatter are those of `_split_tensor`: ceil(n / W) each, the last ones smaller or empty. A gather takes
parts of any sizes and exchanges these first. Any `dim`, negative ones too. Nothing handed in is written to.

Before `setup_gp` there is no graph parallelism: the gp group has one rank, on which every region is the identity, and
all ranks of the world are data parallel. Ranks that are threads have groups of their own each.
"""

# The signatures are those of the original, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.collectives import all_gather, all_reduce, replicate, shard
from gradmesh.compat._function import FunctionLike
from gradmesh.errors import ArgumentError, GradmeshError, NotInitializedError, ShapeError, message
from gradmesh.state import rank_state
from gradmesh.types import I
from gradmesh.world import world_group

__all__ = [
    "CopyToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "ReduceFromModelParallelRegion",
    "ScatterToModelParallelRegion",
    "cleanup_gp",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_tensor",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "setup_gp",
    "trim_tensor",
]

# Both are served by __getattr__, since ranks that are threads share this module.
_GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
_DATA_PARALLEL_GROUP: dist.ProcessGroup | None


def __getattr__(name: str) -> dist.ProcessGroup | None:
    if name == "_GRAPH_PARALLEL_GROUP":
        return get_gp_group()
    if name == "_DATA_PARALLEL_GROUP":
        return get_dp_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- Groups -----------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    graph: dist.ProcessGroup
    data: dist.ProcessGroup
    world: dist.ProcessGroup


def _groups() -> _Groups | None:
    """This rank's groups, unless the world they were made in is gone."""
    found = rank_state().find(_Groups)
    return found if found is not None and found.world is dist.group.WORLD else None


def ensure_div(a: int, b: int) -> None:
    """Refuse numbers of which the second does not divide the first.

    Raises:
        ArgumentError: b does not divide a, or is not positive.
    """
    if b < 1 or a % b:
        raise ArgumentError(
            message(
                f"{b} does not divide {a}",
                op="compat.gp_utils.ensure_div",
                expected="a divisor",
                got=f"a={a}, b={b}",
                remedy="choose a group size that divides the number of ranks",
            )
        )


def divide_and_check_no_remainder(a: int, b: int) -> int:
    """Divide without remainder.

    >>> divide_and_check_no_remainder(6, 3)
    2
    """
    ensure_div(a, b)
    return a // b


def setup_gp(config: Mapping[str, Any]) -> None:
    """Make the graph parallel and the data parallel groups.

    Ranks are laid out row by row as (dp, gp): consecutive ranks share a graph, and a data parallel group takes one
    rank of each. Every rank of the world has to call it.

    Args:
        config: with `config["gp_gpus"]`, the ranks that share a graph (at most all of them; they must divide the
            number of ranks), and `config["distributed_backend"]`, or None for that of the world.

    Raises:
        ArgumentError: `gp_gpus` does not divide the number of ranks.
        GradmeshError: the groups are there already.
        NotInitializedError: there is no process group yet.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> setup_gp({"gp_gpus": 8, "distributed_backend": "gloo"})
        >>> get_gp_world_size(), get_gp_rank()
        (1, 0)
        >>> cleanup_gp()
    """
    world = world_group("compat.gp_utils.setup_gp")
    if initialized():
        raise GradmeshError(
            message(
                "the groups are set up already",
                op="compat.gp_utils.setup_gp",
                expected="one call",
                got=f"groups with {get_gp_world_size()} ranks to a graph",
                remedy="call cleanup_gp() before another set-up",
            )
        )
    size, backend = min(config["gp_gpus"], world.size()), config["distributed_backend"]
    ensure_div(world.size(), size)
    layout = torch.arange(world.size()).view(-1, size)
    data = _own_group(layout.T.tolist(), world.rank(), backend)
    graph = _own_group(layout.tolist(), world.rank(), backend)
    rank_state().keep(_Groups(graph, data, world))


def _own_group(rows: Iterable[list[int]], rank: int, backend: str | None) -> dist.ProcessGroup:
    """Make a group of each row, as every rank has to, and return that of `rank`."""
    made: dict[bool, dist.ProcessGroup] = {rank in row: dist.new_group(row, backend=backend) for row in rows}
    return made[True]


def cleanup_gp() -> None:
    """Destroy both groups.

    Raises:
        NotInitializedError: `setup_gp` was not called.
    """
    made = rank_state().find(_Groups)
    if made is None:
        raise NotInitializedError(
            message(
                "there are no groups",
                op="compat.gp_utils.cleanup_gp",
                expected="groups made by setup_gp",
                got="none",
                remedy="call it once, after setup_gp",
            )
        )
    rank_state().drop(_Groups)
    if made.world is dist.group.WORLD:
        for group in (made.data, made.graph):
            # The caller may have destroyed one of them.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def initialized() -> bool:
    """Whether `setup_gp` was called, and `cleanup_gp` not since."""
    return _groups() is not None


def get_dp_group() -> dist.ProcessGroup | None:
    """The data parallel group of this rank; None before `setup_gp`, which torch reads as the world."""
    groups = _groups()
    return groups.data if groups else None


def get_gp_group() -> dist.ProcessGroup | None:
    """The graph parallel group of this rank; None before `setup_gp`."""
    groups = _groups()
    return groups.graph if groups else None


def get_dp_rank() -> int:
    """This rank's place in its data parallel group; before `setup_gp` in the world."""
    return dist.get_rank(get_dp_group()) if dist.is_initialized() else 0


def get_gp_rank() -> int:
    """This rank's place in its graph parallel group; 0 before `setup_gp`."""
    return _axis().rank


def get_dp_world_size() -> int:
    """The number of data parallel ranks; before `setup_gp` all ranks of the world."""
    return dist.get_world_size(get_dp_group()) if dist.is_initialized() else 1


def get_gp_world_size() -> int:
    """The number of ranks that share a graph; 1 before `setup_gp`."""
    return _axis().size


def _axis() -> Axis:
    group = get_gp_group() or dist.ProcessGroup(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    return Axis("gp", group.rank(), group.size(), group)


# ---- Cutting and padding, on one rank ---------------------------------------------------------------------


def pad_tensor(tensor: Tensor, dim: int = -1, target_size: int | None = None) -> Tensor:
    """Append zeros along `dim`.

    Args:
        tensor: any tensor; returned as it is when it needs no padding.
        dim: the dimension to make longer.
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
        raise ShapeError(
            message(
                "the tensor is longer than the size to pad to",
                op="compat.gp_utils.pad_tensor",
                expected=f"at most {target_size} along dim {dim}",
                got=f"shape {tuple(tensor.shape)}",
                remedy="pass a target_size that no rank's tensor exceeds",
            )
        )
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def trim_tensor(tensor: Tensor, sizes: Tensor | None = None, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Cut off the end along `dim`, so that the gp world size divides what is left.

    Args:
        tensor: any tensor; returned as it is when it needs no cutting.
        sizes: the sizes of the pieces that lie along `dim`, such as atoms per molecule.
        dim: the dimension to cut.

    Returns:
        The tensor, and new sizes from whose end as much is taken; the given ones are only read.

    Example:
        >>> trim_tensor(torch.ones(3), torch.tensor([1, 2]))
        (tensor([1., 1., 1.]), tensor([1, 2]))
    """
    size = tensor.size(dim)
    excess = size % get_gp_world_size()
    if excess == 0:
        return tensor, sizes
    if sizes is not None:
        # A last piece smaller than the excess goes whole, and the one before it gives the rest.
        left = (sizes.flip(0).cumsum(0) - excess).clamp(min=0)
        sizes = left.diff(prepend=left.new_zeros(1)).flip(0).to(sizes.dtype)
    return tensor.narrow(dim, 0, size - excess), sizes


def _split_tensor(
    tensor: Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Cut along `dim` into exactly `num_parts` views of ceil(n / num_parts), the last ones smaller or empty.

    >>> [part.tolist() for part in _split_tensor(torch.arange(5), 4)]
    [[0, 1], [2, 3], [4], []]
    """
    parts = tensor.split(_part_sizes(tensor.size(dim), num_parts), dim)
    return tuple(part.contiguous() for part in parts) if contiguous_chunks else tuple(parts)


def _part_sizes(size: int, num_parts: int) -> list[int]:
    part = -(-size // num_parts)
    return [max(0, min(part, size - rank * part)) for rank in range(num_parts)]


# ---- Regions ----------------------------------------------------------------------------------------------


def _reduce(ctx: Any, input: Tensor) -> Tensor:  # noqa: ARG001 - the original marks `input` as changed on it
    """P -> I: the sum over the gp group, as a new tensor; backward is the identity."""
    return all_reduce(input, _axis(), dst=I)


def _split(input: Tensor, dim: int = -1) -> Tensor:
    """I -> V: the own part, copied; backward concatenates."""
    axis = _axis()
    return shard(input, axis, dim, sizes=_part_sizes(input.size(dim), axis.size))


def _gather(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the parts of the gp group, of equal sizes, concatenated; backward is the own part."""
    return all_gather(input, _axis(), dim, dst=I)


def _gather_with_padding(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the parts of the gp group, of any sizes, concatenated; backward is the own part. Nothing is padded."""
    return all_gather(input, _axis(), dim, dst=I, sizes="auto")


class CopyToModelParallelRegion(FunctionLike):
    """I -> R: the identity; backward sums over the gp group."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Say that the ranks of the gp group use `input` differently from here on."""
        return replicate(input, _axis())


class ReduceFromModelParallelRegion(FunctionLike):
    """P -> I: the sum over the gp group; backward is the identity."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Sum."""
        return _reduce(None, input)


class ScatterToModelParallelRegion(FunctionLike):
    """I -> V: the own part of a tensor that the gp group's ranks all hold; backward concatenates the parts."""

    @staticmethod
    def apply(input: Tensor, dim: int = -1) -> Tensor:
        """Keep the own part along `dim`."""
        return _split(input, dim)


class GatherFromModelParallelRegion(FunctionLike):
    """V -> I: the gp group's parts concatenated; backward is the own part."""

    @staticmethod
    def apply(input: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim`; the sizes may differ from rank to rank."""
        return _gather_with_padding(input, dim)


def copy_to_model_parallel_region(input: Tensor) -> Tensor:
    """I -> R: say that the ranks of the gp group use `input` differently from here on; backward sums.

    The way of a tensor that every rank holds into work that is split over the graph.
    """
    return CopyToModelParallelRegion.apply(input)


def reduce_from_model_parallel_region(input: Tensor) -> Tensor:
    """P -> I: the sum over the gp group; backward is the identity.

    The way of partial results back to where every rank repeats the same work.
    """
    return ReduceFromModelParallelRegion.apply(input)


def scatter_to_model_parallel_region(input: Tensor, dim: int = -1) -> Tensor:
    """I -> V: the own part along `dim`, by `_split_tensor`; backward concatenates the parts' gradients."""
    return ScatterToModelParallelRegion.apply(input, dim)


def gather_from_model_parallel_region(input: Tensor, dim: int = -1) -> Tensor:
    """V -> I: the gp group's parts, of any sizes, concatenated along `dim`; backward is the own part.

    Every rank has to repeat the same work on the result. Where each uses it differently, use
    `gradmesh.all_gather(input, get_gp_group(), dim, sizes="auto")`, whose backward sums.
    """
    return GatherFromModelParallelRegion.apply(input, dim)
