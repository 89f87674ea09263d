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

import torch.distributed as dist

from gradmesh.compat.gp_utils.cutting import _split_tensor as _split_tensor
from gradmesh.compat.gp_utils.cutting import pad_tensor, trim_tensor
from gradmesh.compat.gp_utils.functions import (
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    GatherFromModelParallelRegionSumGrad,
    ReduceFromModelParallelRegion,
    ScaleBackwardGrad,
    ScatterToModelParallelRegion,
)
from gradmesh.compat.gp_utils.functions import _gather as _gather
from gradmesh.compat.gp_utils.functions import _gather_with_padding as _gather_with_padding
from gradmesh.compat.gp_utils.functions import _reduce as _reduce
from gradmesh.compat.gp_utils.functions import _split as _split
from gradmesh.compat.gp_utils.groups import (
    cleanup_gp,
    divide_and_check_no_remainder,
    ensure_div,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_gp_group,
    get_gp_rank,
    get_gp_world_size,
    initialized,
    setup_gp,
    setup_graph_parallel_groups,
)
from gradmesh.compat.gp_utils.regions import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_model_parallel_region_sum_grad,
    reduce_from_model_parallel_region,
    scale_backward_grad,
    scatter_to_model_parallel_region,
)

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
