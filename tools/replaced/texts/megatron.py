from gradmesh.compat import megatron
from gradmesh.compat.megatron import *
from megatron.core.parallel_state import get_tensor_model_parallel_group

megatron.set_default_group(get_tensor_model_parallel_group)
