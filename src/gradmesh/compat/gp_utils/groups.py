"""Set-up, look-up and clean-up of a rank's graph parallel and data parallel groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradmesh._torch import default_group
from gradmesh.compat._ops import single_rank_axis
from gradmesh.errors import ArgumentError, GradmeshError, NotInitializedError, message
from gradmesh.runtime.mesh import Axis, world_group
from gradmesh.runtime.state import rank_state

__all__ = [
    "cleanup_gp",
    "divide_and_check_no_remainder",
    "ensure_div",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "gp_axis",
    "initialized",
    "setup_gp",
    "setup_graph_parallel_groups",
]


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
        raise ArgumentError(
            message(
                f"{b} does not divide {a}",
                op="compat.gp_utils.ensure_div",
                expected=f"a positive divisor of {a}",
                got=f"a={a}, b={b}",
                remedy=f"choose a group size from {[n for n in range(1, min(a, 64) + 1) if a % n == 0]}"
                if 0 < a < 4096
                else "choose a group size that divides the number of ranks",
            )
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
        ...     found = get_dp_rank(), get_gp_rank()
        ...     cleanup_gp()
        ...     return found
        >>> gm.launch(on_each_rank, 4, backend="threads")
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    world = world_group("compat.gp_utils.setup_graph_parallel_groups")
    _set_up(world, graph_parallel_group_size, distributed_backend, "setup_graph_parallel_groups")


def _set_up(world: dist.ProcessGroup, size: int, backend: str | None, name: str) -> None:
    if initialized():
        raise GradmeshError(
            message(
                "the groups are set up already",
                op=f"compat.gp_utils.{name}",
                expected="one set-up",
                got=f"existing groups with {get_gp_world_size()} ranks for each graph",
                remedy="call cleanup_gp() first",
            )
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
        raise NotInitializedError(
            message(
                "the groups are not set up",
                op="compat.gp_utils.cleanup_gp",
                expected="groups made by setup_gp or setup_graph_parallel_groups",
                got="no groups",
                remedy="call cleanup_gp() once, after the set-up; test with initialized()",
            )
        )
    rank_state().drop(_Groups)
    if made.world is dist.group.WORLD:
        for group in (made.data, made.graph):
            # The caller may have destroyed one of them.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def initialized() -> bool:
    """True if the groups are set up."""
    return _groups() is not None


def get_dp_group() -> dist.ProcessGroup | None:
    """The data parallel group of this rank; None (torch's default, the world) before the set-up."""
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
    """The number of data parallel ranks; before the set-up all ranks of the world."""
    return dist.get_world_size(get_dp_group()) if dist.is_initialized() else 1


def get_gp_world_size() -> int:
    """The number of ranks that share a graph; 1 before the set-up."""
    return gp_axis().size


def gp_axis() -> Axis:
    """The axis of the ranks that share this rank's graph; before the set-up, this rank only."""
    group = get_gp_group()
    return single_rank_axis("gp") if group is None else Axis("gp", group.rank(), group.size(), group)
