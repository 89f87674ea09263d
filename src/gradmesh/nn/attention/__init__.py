"""Context parallelism: attention over a sequence that is sharded over the ranks, by a ring or by heads (Ulysses)."""

from gradmesh.nn.attention.by_heads import ulysses_attention
from gradmesh.nn.attention.by_ring import ring_attention

__all__ = ["ring_attention", "ulysses_attention"]
