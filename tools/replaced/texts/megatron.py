from gradmesh.compat import megatron
from gradmesh.compat.megatron import *
from gradmesh.compat.megatron import (
    _AllGatherFromTensorParallelRegion,
    _AllToAll,
    _CopyToModelParallelRegion,
    _GatherFromModelParallelRegion,
    _GatherFromSequenceParallelRegion,
    _ReduceFromModelParallelRegion,
    _ReduceScatterToSequenceParallelRegion,
    _ReduceScatterToTensorParallelRegion,
    _ScatterToModelParallelRegion,
    _ScatterToSequenceParallelRegion,
)
from megatron.core.parallel_state import get_tensor_model_parallel_group

megatron.set_default_group(get_tensor_model_parallel_group)
