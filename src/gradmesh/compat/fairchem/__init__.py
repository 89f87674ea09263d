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

import torch.distributed as dist

from gradmesh.compat.fairchem.config import (
    GPMode,
    GPPartition,
    GraphParallelConfig,
    cleanup_gp,
    get_gp_config,
    resolve_gp_config_for_workers,
    set_gp_config,
)
from gradmesh.compat.fairchem.exchange import (
    AllToAllCollect,
    GPContext,
    all_to_all_collect,
    build_gp_context,
)
from gradmesh.compat.fairchem.functions import (
    AllReduceSumWithGrad,
    GatherFromModelParallelRegionGradPadded,
    GatherFromModelParallelRegionSumGradPadded,
    ScatterToModelParallelRegion,
    size_list_fn,
)
from gradmesh.compat.fairchem.partition import (
    PartitionStrategy,
    compute_a2a_partition,
    partition_atoms_index_split,
    partition_atoms_spatial,
)
from gradmesh.compat.fairchem.regions import (
    all_reduce_sum_with_grad,
    gather_from_model_parallel_region,
    gather_from_model_parallel_region_sum_grad,
    pad_input,
    scatter_to_model_parallel_region,
)
from gradmesh.compat.gp_utils import (
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
    initialized,
    reduce_from_model_parallel_region,
    scale_backward_grad,
    setup_gp,
    setup_graph_parallel_groups,
)

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

# Served by __getattr__: on the threads backend, ranks share this module.
_GRAPH_PARALLEL_GROUP: dist.ProcessGroup | None
_DATA_PARALLEL_GROUP: dist.ProcessGroup | None


def __getattr__(name: str) -> dist.ProcessGroup | None:
    if name == "_GRAPH_PARALLEL_GROUP":
        return get_gp_group()
    if name == "_DATA_PARALLEL_GROUP":
        return get_dp_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
