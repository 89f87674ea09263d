"""Distributed layers and losses with exact gradients.

* `gm.nn.graph`: graph-parallel networks (one graph partitioned across the ranks).
* Contrastive losses over the samples of all ranks, computed in tiles: `clip_loss`, `siglip_loss`, `nt_xent_loss`,
  `sup_con_loss`, `vic_reg_loss`, `barlow_twins_loss`, also as modules; `cached_gradients` (GradCache).
* `gm.nn.ring_attention`, `gm.nn.ulysses_attention`: context parallelism; `gm.nn.sequence` shards the sequence.
* `gm.nn.ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding` and the cross entropies: tensor
  parallelism; `gm.nn.tensor_parallel` converts a dense module.
* `gm.nn.ExpertParallel`: expert parallelism (mixture of experts).
* `gm.nn.sharded_state_dict`, `dense_state_dict`: checkpoints that any number of ranks can load.
* `gm.nn.clip_grad_norm_`: clipping by the gradient norm of the dense model; `mark_sharded` for custom shards.
* `gm.nn.skipped`: for ranks without data for a module under FSDP or DDP.
* `gm.nn.SyncBatchNorm`, `SyncGroupNorm`: normalization by statistics of all ranks.
* `gm.nn.fields`: domain decomposition of grids; `HaloConv1d` and other halo layers, `SpectralConv`.

On a device, a layer or loss never makes the host wait for the device, forward or backward, except where its docstring
says so: `ExpertDispatch` and `ExpertParallel` once, norms with `norm_type=0`, and the construction of a graph plan.
Sizes that are exchanged travel on the CPU, if the process group has a backend for it.
"""

from gradmesh.nn import fields, graph, sequence, tensor
from gradmesh.nn.attention import ring_attention, ulysses_attention
from gradmesh.nn.checkpoints import load_sharded_state_dict, sharded_state_dict
from gradmesh.nn.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm, mark_sharded
from gradmesh.nn.contrastive.cached import cached_gradients
from gradmesh.nn.contrastive.losses import (
    BarlowTwinsLoss,
    ClipLoss,
    NTXentLoss,
    SigLipLoss,
    SupConLoss,
    VicRegLoss,
    barlow_twins_loss,
    clip_loss,
    nt_xent_loss,
    siglip_loss,
    sup_con_loss,
    vic_reg_loss,
)
from gradmesh.nn.experts import ExpertDispatch, ExpertParallel, balance_loss
from gradmesh.nn.fields import (
    HaloAvgPool,
    HaloConv1d,
    HaloConv2d,
    HaloConv3d,
    HaloConvTranspose1d,
    HaloConvTranspose2d,
    HaloConvTranspose3d,
    HaloMaxPool,
    SpectralConv,
)
from gradmesh.nn.norms import SyncBatchNorm, SyncGroupNorm
from gradmesh.nn.skipped import skipped
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
    "BarlowTwinsLoss",
    "ClipLoss",
    "ColumnParallelLinear",
    "ExpertDispatch",
    "ExpertParallel",
    "HaloAvgPool",
    "HaloConv1d",
    "HaloConv2d",
    "HaloConv3d",
    "HaloConvTranspose1d",
    "HaloConvTranspose2d",
    "HaloConvTranspose3d",
    "HaloMaxPool",
    "NTXentLoss",
    "Replicated",
    "RowParallelLinear",
    "SigLipLoss",
    "SpectralConv",
    "SupConLoss",
    "SyncBatchNorm",
    "SyncGroupNorm",
    "VicRegLoss",
    "VocabParallelEmbedding",
    "balance_loss",
    "barlow_twins_loss",
    "cached_gradients",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_loss",
    "dense_state_dict",
    "fields",
    "get_total_norm",
    "graph",
    "linear_cross_entropy",
    "load_dense_state_dict",
    "load_sharded_state_dict",
    "mark_sharded",
    "nt_xent_loss",
    "ring_attention",
    "sequence",
    "sharded_state_dict",
    "siglip_loss",
    "skipped",
    "sup_con_loss",
    "tensor",
    "tensor_parallel",
    "ulysses_attention",
    "vic_reg_loss",
    "vocab_parallel_cross_entropy",
]
