"""What people build with the verbs.

* `gm.nn.graph`: networks on a graph that is cut over the ranks.
* `gm.nn.ring_attention`, `gm.nn.ulysses_attention`: attention over a sequence that is cut over the ranks, and
  `gm.nn.sequence`, which cuts it.
"""

from gradmesh.nn import graph, sequence
from gradmesh.nn.attention import ring_attention, ulysses_attention

__all__ = ["graph", "ring_attention", "sequence", "ulysses_attention"]
