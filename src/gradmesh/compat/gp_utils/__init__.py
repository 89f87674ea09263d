"""Drop-in for `ocpmodels.common.gp_utils`: graph parallel groups, and the regions of Megatron between them.

It is also that of fairchem-core 1.x, where 1.10 added the last three names of the table, and of 2.0 to 2.10. From 2.11
on the same names take other arguments: `gradmesh.compat.fairchem`.

The region functions, over the ranks of the graph parallel (gp) group; each has a Function class of its name:

=============================================  ======  ========================  =============================
name                                           type    forward                   backward
=============================================  ======  ========================  =============================
`copy_to_model_parallel_region`                I -> R  identity                  sum
`reduce_from_model_parallel_region`            P -> I  sum                       identity
`scatter_to_model_parallel_region`             I -> V  own part                  concatenate the parts
`gather_from_model_parallel_region`            V -> I  concatenate the parts     own part, of its true size
`gather_from_model_parallel_region_sum_grad`   V -> R  concatenate the parts     sum, own part
`scale_backward_grad`                          I -> R  identity                  W times the gradient
=============================================  ======  ========================  =============================

Parts of a scatter are those of `_split_tensor`: ceil(n / W) each, the last ones smaller or empty. A gather takes
parts of any sizes and exchanges these first. Any `dim`, negative ones too. Nothing handed in is written to.

Before the set-up there is no graph parallelism: the gp group has one rank, on which every region is the identity, and
all ranks of the world are data parallel. Ranks that are threads have groups of their own each.
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

# Both are served by __getattr__, since ranks that are threads share this module.
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
