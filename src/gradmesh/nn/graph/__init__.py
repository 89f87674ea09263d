"""Graph parallelism: networks on one graph that is partitioned over the ranks of an axis.

A partition assigns each node to a rank (`by_count`, `by_space`, `by_graph`, `by_metis`, or any tensor of ranks).
`GraphPlan` is built from the partition and the edges, once for each neighbour list: each rank gets the edges that end
at its nodes, and receives the rows of their source nodes on other ranks (halo exchange). `HeteroPlan` does the same for
several types of nodes and edges.

>>> from gradmesh.nn.graph import GraphPlan, by_count
>>> def on_each_rank():
...     edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])  # a ring of four nodes
...     plan = GraphPlan(edges, by_count(4, 2))
...     x = torch.arange(10.0, 14.0)[plan.own]
...     source, target = plan.edge_index
...     return plan.scatter_add(plan.exchange(x)[source]).tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[13.0, 10.0], [11.0, 12.0]]
"""

from gradmesh.nn.graph.hetero import HeteroPlan
from gradmesh.nn.graph.partition import by_count, by_graph, by_metis, by_space
from gradmesh.nn.graph.plan import GraphPlan, Rows

__all__ = ["GraphPlan", "HeteroPlan", "Rows", "by_count", "by_graph", "by_metis", "by_space"]
