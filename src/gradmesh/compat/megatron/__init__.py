"""Drop-in for `megatron.core.tensor_parallel.mappings`: the regions of tensor and sequence parallelism.

===================================================  ========  =============================  =====================
name                                                 type      forward                        backward
===================================================  ========  =============================  =====================
`copy_to_tensor_model_parallel_region`               I -> R    identity                       sum
`reduce_from_tensor_model_parallel_region`           P -> I    sum                            identity
`scatter_to_tensor_model_parallel_region`            I -> V    own part of the last dim       concatenate
`gather_from_tensor_model_parallel_region`           V -> I    concatenate along the last     own part
`all_gather_last_dim_from_tensor_parallel_region`    V -> R    concatenate along the last     sum, own part
`reduce_scatter_last_dim_to_tensor_parallel_region`  P -> V    sum, own part of the last      concatenate
`scatter_to_sequence_parallel_region`                I -> V    own part of the first dim      concatenate
`gather_from_sequence_parallel_region`               V -> R    concatenate along the first    sum, own part
the same, `tensor_parallel_output_grad=False`        V -> I    concatenate along the first    own part
`reduce_scatter_to_sequence_parallel_region`         P -> V    sum, own part of the first     concatenate
`all_to_all`                                         V -> V    exchange parts of the first    the way back
`all_to_all_sp2hp`                                   V -> V    rows whole, columns cut        `all_to_all_hp2sp`
`all_to_all_hp2sp`                                   V -> V    columns whole, rows cut        `all_to_all_sp2hp`
===================================================  ========  =============================  =====================

`group` is a ProcessGroup or whatever else `gradmesh.axis` takes; or an object that has `rank()` and `size()` alone, as
some callers make for one rank, or that holds the ProcessGroup of its ranks. None is what `set_default_group` says, such
as `parallel_state.get_tensor_model_parallel_group`; else the axis "tp" of the current mesh if it has one, else the
current mesh's only axis, else the world. Results are always fresh memory, also on a group of one rank, and no gradient
is summed in place.

The autograd Functions behind the regions are there too, under the original's names: `_CopyToModelParallelRegion` and
its like, `_AllToAll` among them.
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
