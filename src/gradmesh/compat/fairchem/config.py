"""fairchem-core's configuration of graph parallelism. Stored for its models; gradmesh does not read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gradmesh.compat.gp_utils import cleanup_gp as _cleanup_groups
from gradmesh.compat.gp_utils import get_gp_world_size, initialized
from gradmesh.errors import ArgumentError, message
from gradmesh.runtime.state import rank_state

__all__ = [
    "GPMode",
    "GPPartition",
    "GraphParallelConfig",
    "cleanup_gp",
    "get_gp_config",
    "resolve_gp_config_for_workers",
    "set_gp_config",
]


class GPMode(StrEnum):
    """How a rank receives other ranks' atoms: all of them, or those that its edges need."""

    ALLGATHER = "allgather"
    ALL_TO_ALL = "all_to_all"


class GPPartition(StrEnum):
    """How atoms are assigned to ranks: by index or by position."""

    INDEX_SPLIT = "index_split"
    SPATIAL = "spatial"


@dataclasses.dataclass
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
    """The configuration that was set; else, if the groups are set up, the default with their size; else None."""
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
        raise ArgumentError(
            message(
                "group_size differs from the number of workers",
                op="compat.fairchem.resolve_gp_config_for_workers",
                expected=f"group_size={num_workers}, or 1 (the default), which is replaced",
                got=f"group_size={given.group_size}",
                remedy="omit group_size",
            )
        )
    return dataclasses.replace(given, group_size=num_workers)


def cleanup_gp() -> None:
    """Destroy both groups and remove the configuration.

    Raises:
        NotInitializedError: the groups were not set up.
    """
    _cleanup_groups()
    rank_state().drop(GraphParallelConfig)
