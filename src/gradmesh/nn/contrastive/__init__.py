"""Contrastive and other self-supervised losses of the samples of all ranks, of which no table is ever whole in memory.

Every one of them returns the mean over the global batch, the same on every rank; see `clip_loss`.
"""

from gradmesh.nn.contrastive.moments import barlow_twins_loss, vic_reg_loss
from gradmesh.nn.contrastive.pairs import clip_loss, siglip_loss
from gradmesh.nn.contrastive.views import nt_xent_loss, sup_con_loss

__all__ = [
    "barlow_twins_loss",
    "clip_loss",
    "nt_xent_loss",
    "siglip_loss",
    "sup_con_loss",
    "vic_reg_loss",
]
