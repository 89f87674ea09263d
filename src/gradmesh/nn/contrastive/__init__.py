"""Contrastive and other self-supervised losses over the samples of all ranks, computed in tiles.

Each returns the mean over the global batch, the same on every rank; see `clip_loss`.
"""

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
    "nt_xent_loss",
    "siglip_loss",
    "sup_con_loss",
    "vic_reg_loss",
]
