"""What people build with the verbs: layers and losses whose gradients over the ranks are exact.

`gm.nn.graph` has networks on a graph that is cut over the ranks; `gm.nn.tensor` tensor parallel layers.
"""

from gradmesh.nn import graph, tensor
from gradmesh.nn.experts import ExpertDispatch, ExpertParallel, balance_loss
from gradmesh.nn.norms import SyncBatchNorm, SyncGroupNorm
from gradmesh.nn.tensor import (
    ColumnParallelLinear,
    Replicated,
    RowParallelLinear,
    VocabParallelEmbedding,
    dense_state_dict,
    linear_cross_entropy,
    load_dense_state_dict,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "ExpertDispatch",
    "ExpertParallel",
    "Replicated",
    "RowParallelLinear",
    "SyncBatchNorm",
    "SyncGroupNorm",
    "VocabParallelEmbedding",
    "balance_loss",
    "dense_state_dict",
    "graph",
    "linear_cross_entropy",
    "load_dense_state_dict",
    "tensor",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
