"""What people build with the verbs.

* `gm.nn.graph`: networks on a graph that is cut over the ranks of an axis.
* Losses of the samples of all ranks, with tables that are never whole in memory: `clip_loss`, `siglip_loss`,
  `nt_xent_loss`, `sup_con_loss`, `vic_reg_loss`, `barlow_twins_loss`, each as a module too; and `cached_gradients`.
"""

from gradmesh.nn import graph
from gradmesh.nn.contrastive import (
    BarlowTwinsLoss,
    ClipLoss,
    NTXentLoss,
    SigLipLoss,
    SupConLoss,
    VicRegLoss,
    barlow_twins_loss,
    cached_gradients,
    clip_loss,
    nt_xent_loss,
    siglip_loss,
    sup_con_loss,
    vic_reg_loss,
)

__all__ = [
    "BarlowTwinsLoss",
    "ClipLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
    "VicRegLoss",
    "barlow_twins_loss",
    "cached_gradients",
    "clip_loss",
    "graph",
    "nt_xent_loss",
    "siglip_loss",
    "sup_con_loss",
    "vic_reg_loss",
]
