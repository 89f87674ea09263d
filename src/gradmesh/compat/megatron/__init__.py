"""Drop-in for `megatron.core.tensor_parallel.mappings`: mappings of tensor and sequence parallel regions.

===================================================  ========  =============================  =====================
name                                                 type      forward                        backward
===================================================  ========  =============================  =====================
`copy_to_tensor_model_parallel_region`               I -> R    identity                       sum
`reduce_from_tensor_model_parallel_region`           P -> I    sum                            identity
`scatter_to_tensor_model_parallel_region`            I -> V    local slice of the last dim    concatenate
`gather_from_tensor_model_parallel_region`           V -> I    concatenate along the last     local slice
`all_gather_last_dim_from_tensor_parallel_region`    V -> R    concatenate along the last     sum, local slice
`reduce_scatter_last_dim_to_tensor_parallel_region`  P -> V    sum, local slice of the last   concatenate
`scatter_to_sequence_parallel_region`                I -> V    local slice of the first dim   concatenate
`gather_from_sequence_parallel_region`               V -> R    concatenate along the first    sum, local slice
the same, `tensor_parallel_output_grad=False`        V -> I    concatenate along the first    local slice
`reduce_scatter_to_sequence_parallel_region`         P -> V    sum, local slice of the first  concatenate
`all_to_all`                                         V -> V    exchange parts of the first    the inverse exchange
`all_to_all_sp2hp`                                   V -> V    gather rows, shard columns     `all_to_all_hp2sp`
`all_to_all_hp2sp`                                   V -> V    gather columns, shard rows     `all_to_all_sp2hp`
===================================================  ========  =============================  =====================

`group` is a ProcessGroup or anything that `gradmesh.axis` accepts; or an object with `rank()` and `size()` that has one
rank, or the ProcessGroup of its ranks as an attribute. None is the group of `set_default_group`, such as
`parallel_state.get_tensor_model_parallel_group`; else the axis "tp" of the current mesh if it has one, else the current
mesh's only axis, else the world. Results never alias the input, also on a group of one rank, and no gradient is summed
in place.

The autograd Functions have the original's names: `_CopyToModelParallelRegion`, ..., `_AllToAll`.
"""

from __future__ import annotations

from gradmesh.compat.megatron.arguments import set_default_group
from gradmesh.compat.megatron.exchange import all_to_all, all_to_all_hp2sp, all_to_all_sp2hp
from gradmesh.compat.megatron.functions import (
    _AllGatherFromTensorParallelRegion as _AllGatherFromTensorParallelRegion,
)
from gradmesh.compat.megatron.functions import _AllToAll as _AllToAll
from gradmesh.compat.megatron.functions import _CopyToModelParallelRegion as _CopyToModelParallelRegion
from gradmesh.compat.megatron.functions import (
    _GatherFromModelParallelRegion as _GatherFromModelParallelRegion,
)
from gradmesh.compat.megatron.functions import (
    _GatherFromSequenceParallelRegion as _GatherFromSequenceParallelRegion,
)
from gradmesh.compat.megatron.functions import (
    _ReduceFromModelParallelRegion as _ReduceFromModelParallelRegion,
)
from gradmesh.compat.megatron.functions import (
    _ReduceScatterToSequenceParallelRegion as _ReduceScatterToSequenceParallelRegion,
)
from gradmesh.compat.megatron.functions import (
    _ReduceScatterToTensorParallelRegion as _ReduceScatterToTensorParallelRegion,
)
from gradmesh.compat.megatron.functions import _ScatterToModelParallelRegion as _ScatterToModelParallelRegion
from gradmesh.compat.megatron.functions import (
    _ScatterToSequenceParallelRegion as _ScatterToSequenceParallelRegion,
)
from gradmesh.compat.megatron.sequence import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from gradmesh.compat.megatron.tensor import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_default_group",
]
