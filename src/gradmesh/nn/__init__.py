"""What people build with the verbs.

* `gm.nn.graph`: networks on a graph that is cut over the ranks of an axis.
* Contrastive losses over the samples of all ranks.
"""

from gradmesh.nn import contrastive, graph
from gradmesh.nn.contrastive import *  # noqa: F403

__all__ = ["graph", *contrastive.__all__]
