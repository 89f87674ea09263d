"""Contrastive and other self-supervised losses over the samples of all ranks, computed in tiles.

Each returns the mean over the global batch, the same on every rank; see `clip_loss`.
"""
