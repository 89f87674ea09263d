"""Attention over a sequence that is cut over the ranks of an axis: round a ring, or by heads."""

from gradmesh.nn.attention.by_heads import ulysses_attention
from gradmesh.nn.attention.by_ring import ring_attention

__all__ = ["ring_attention", "ulysses_attention"]
