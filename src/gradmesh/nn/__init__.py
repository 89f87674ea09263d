"""What people build with the verbs: `gm.nn.graph`, networks on a graph that is cut over the ranks of an axis."""

from gradmesh.nn import graph

__all__ = ["graph"]
