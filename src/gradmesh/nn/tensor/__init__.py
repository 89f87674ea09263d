"""Tensor parallelism: linear layers, embeddings and cross entropies that are sharded over the ranks of an axis."""

from gradmesh.nn.tensor.convert import tensor_parallel
from gradmesh.nn.tensor.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from gradmesh.nn.tensor.cuts import Replicated, dense_state_dict, load_dense_state_dict
from gradmesh.nn.tensor.embedding import VocabParallelEmbedding
from gradmesh.nn.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "Replicated",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "dense_state_dict",
    "linear_cross_entropy",
    "load_dense_state_dict",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
