"""`GraphPlan`: a graph that is cut over the ranks of an axis, and the rows that its ranks need of each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.axis import AxisLike
from gradmesh.nn.graph import state
from gradmesh.nn.graph.agree import agree
from gradmesh.nn.graph.edges import INDEX, Edges, added, checked_edges, is_table, local_edges, picked_edges
from gradmesh.nn.graph.inputs import (
    GraphInput,
    Kind,
    checked_own,
    checked_owner,
    edges_of_parts,
    failing,
    hops_of,
    owner_of_parts,
    part_of_whole,
    see_that_own_fits,
    sent_by_root,
)
from gradmesh.nn.graph.rows import Rows
from gradmesh.nn.graph.stored import digest

__all__ = ["GraphPlan"]

_KINDS: tuple[Kind, ...] = ("whole", "root", "parts")


class GraphPlan(Rows):
    """A graph in parts, one on each rank, and the rows that these need of each other; made by all ranks together.

    An edge belongs to the rank that owns its target. So each rank has all edges that end at its nodes, in the order in
    which they were given, and needs the rows of those nodes of other ranks that they begin at: its remote rows.

    The graph is given in one of three ways:

    * whole on every rank: `GraphPlan(edges, owner)`;
    * whole on one rank: `GraphPlan(edges, owner, root=0)` there, `GraphPlan(root=0)` on the others;
    * in parts: `GraphPlan(edges, own=own)`, with the numbers of the rank's nodes and the edges that end at them. Where
      every rank knows the owners of all nodes, `GraphPlan(edges, owner, own=own)` need not exchange them.

    Args:
        edges: sources and targets, shape (2, edges), counted over the whole graph.
        owner: the rank of each node, shape (nodes,); see `by_count`, `by_space`, `by_graph`, `by_metis`.
        axis: the ranks, as in every verb.
        own: the numbers of this rank's nodes, where each rank gives its part. Their rows are then those of `plan.own`,
            in rising order.
        root: the rank that has the graph, where one has it. The plan is then on the kind of device that the root's
            edges are on; on each rank on the one that is current.
        hops: how many layers an exchange is to serve. With more than one the remote rows reach that many edges far,
            and the edges that end at rows within `hops - 1` are on this rank too.

    Attributes:
        axis: the ranks.
        owner: the rank of each node.
        own: the nodes whose rows this rank has, by number.
        remote: the nodes whose rows it gets, by owner and then by number.
        counts: how many nodes each rank owns.
        hops: how many layers an exchange serves.
        hop: how far each row of an exchange is from the own ones, in edges; 0 for these.
        edge_index: this rank's edges, sources and targets, counted in the rows of an exchange.
        edges: which of the given edges they are, for example to pick their attributes. In parts, those of the rank's
            own list; with several hops, counted over all ranks' lists.
        interior: the edges that need own rows alone, counted in `edge_index`.
        boundary: the others.

    Raises:
        ArgumentError, MismatchError: what is given is no graph, no partition, or not the same on every rank. Where one
            rank alone is wrong it says so, and the others raise `MismatchError`.

    Example:
        >>> from gradmesh.nn.graph import GraphPlan, by_count
        >>> def on_each_rank():
        ...     plan = GraphPlan(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), by_count(4, 2))
        ...     return plan.own.tolist(), plan.remote.tolist(), plan.edge_index.tolist(), plan.edges.tolist()
        >>> for part in gm.launch(on_each_rank, 2, backend="threads"):
        ...     print(part)
        ([0, 1], [3], [[0, 2], [1, 0]], [0, 3])
        ([2, 3], [1], [[2, 0], [0, 1]], [1, 2])
    """

    verb = "nn.graph.GraphPlan"

    @torch.inference_mode(False)  # a plan made in inference mode can be trained through
    def __init__(
        self,
        edges: Tensor | None = None,
        owner: Tensor | None = None,
        axis: AxisLike = None,
        *,
        own: Tensor | None = None,
        root: int | None = None,
        hops: int = 1,
    ) -> None:
        call = Call(self.verb, _operand(edges), axis)
        fail = failing(call)
        depth = hops_of(hops, fail)
        if own is not None and root is not None:
            fail(
                "the graph is given in two ways",
                "own for a graph in parts, or root",
                f"own beside root={root!r}",
                "leave out root where every rank has its part",
            )
        self._kind: Kind = "parts" if own is not None else "whole" if root is None else "root"
        self._root = -1 if root is None else call.rank(root)
        here, told = call.axis, [_KINDS.index(self._kind), depth, self._root]
        given: GraphInput | None = None
        if self._kind == "whole":
            nodes = checked_owner(owner, here.size, fail)
            pairs = checked_edges(edges, len(nodes), fail)
            nodes = nodes.to(pairs.device)
            agree(here, self.verb, "edges, owner, root and hops", told, pairs, nodes)
            given = part_of_whole(pairs)
        elif self._kind == "root":
            given, nodes = self._from_root(edges, owner, call, told)
        elif owner is None:
            mine = checked_own(own, fail)
            agree(here, self.verb, "way to give the graph, and hops", told)
            nodes = owner_of_parts(mine, here, self.verb)
        else:
            nodes = checked_owner(owner, here.size, fail)
            see_that_own_fits(checked_own(own, fail), nodes, here.rank, fail)
            agree(here, self.verb, "owner, way to give the graph, and hops", [*told, 1], nodes)
        super().__init__(here, nodes)
        self._build(given or edges_of_parts(edges, self, depth, call), depth)

    def _from_root(
        self, edges: Tensor | None, owner: Tensor | None, call: Call, told: list[int]
    ) -> tuple[GraphInput, Tensor]:
        fail = failing(call)
        if call.axis.rank == self._root:
            owner = checked_owner(owner, call.axis.size, fail)
            edges = checked_edges(edges, len(owner), fail)
            owner = owner.to(edges.device)
        elif edges is not None or owner is not None:
            fail(
                "a graph is given on a rank that is not the root",
                f"edges=None, owner=None beside root={self._root}",
                "a tensor",
                "leave out root= where every rank has the graph, or pass None",
            )
        agree(call.axis, self.verb, "root and hops", told)
        return sent_by_root(edges, owner, call.axis, self._root)

    def _build(self, given: GraphInput, hops: int) -> None:
        """Find the edges and the remote rows, and ask for these."""
        found = given.ending_at(self.own, self) if given.whole else given
        pairs, numbers = [found.pairs], [found.numbers]
        far = torch.full_like(self.owner, -1)
        far[self.own] = 0
        for hop in range(1, hops + 1):
            new = pairs[-1][0].unique()
            new = new[far[new] < 0]
            far[new] = hop
            if hop < hops:
                found = given.ending_at(new, self)
                pairs.append(found.pairs)
                numbers.append(found.numbers)
        self.ask(far)
        self.hops = hops
        which = torch.cat(numbers)
        order = which.argsort(stable=True)
        row = torch.empty_like(self.owner)
        row[torch.cat((self.own, self.remote))] = torch.arange(len(self.hop), device=row.device)
        own = len(self.own)
        self._number(local_edges(row[torch.cat(pairs, dim=1)[:, order]], which[order], (own, own)))

    def _number(self, local: Edges) -> None:
        self.edge_index, self.edges = local.edge_index, local.edges
        self.interior, self.boundary = local.interior, local.boundary

    @torch.inference_mode(False)
    def rebuilt(self, edges: Tensor | None = None) -> GraphPlan:
        """A plan of other edges between the same nodes, in the same partition, given in the same way.

        Args:
            edges: as the plan itself was given them: all, those of this rank, or None where another is the root.

        Raises:
            ArgumentError, MismatchError: as the plan itself.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan, by_count
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.tensor([[0], [3]]), by_count(4, 2))
            ...     return plan.remote.tolist(), plan.rebuilt(torch.tensor([[3], [0]])).remote.tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [([], [3]), ([0], [])]
        """
        call = Call(f"{self.verb}.rebuilt", _operand(edges), self.axis)
        made = copy.copy(self)
        told, given = [_KINDS.index(self._kind), self.hops, self._root], None
        if self._kind == "whole":
            pairs = checked_edges(edges, self.nodes, failing(call))
            agree(self.axis, call.verb, "edges", told, pairs)
            given = part_of_whole(pairs)
        elif self._kind == "root":
            owner = self.owner if self.axis.rank == self._root else None
            given, _ = self._from_root(edges, owner, call, told)
        else:
            agree(self.axis, call.verb, "way to give the graph, and hops", told)
            given = edges_of_parts(edges, self, self.hops, call)
        made._build(given, self.hops)
        return made

    # -- work at the edges

    def scatter_add(self, messages: Tensor, edges: Tensor | None = None) -> Tensor:
        """The sum of the messages at each target, in an order that is the same every time. Nothing is sent.

        Args:
            messages: a row for each edge.
            edges: which edges they are for, `plan.interior` for example, as an index or a mask; None: all, in the order
                of `edge_index`.

        Returns:
            A row for each own node; with several hops for each row of an exchange, of which the outermost lack edges.

        Raises:
            ShapeError: not one row for each edge.
            ArgumentError: `edges` is no index into this rank's edges and no mask of them.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan, by_count
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.tensor([[0, 1, 2, 3], [1, 1, 0, 1]]), by_count(4, 2))
            ...     return plan.scatter_add(torch.ones(plan.edges.shape[0])).tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[1.0, 3.0], [0.0, 0.0]]
        """
        target = self.edge_index[1]
        if edges is not None:
            known = edges is self.interior or edges is self.boundary
            target = target.index_select(
                0, edges if known else picked_edges(edges, len(target), self._refuse)
            )
        self._check(messages, target.shape[0], "edge")
        rows = self.own.shape[0]
        return added(messages, target, rows if self.hops == 1 else rows + self.remote.shape[0])

    # -- checkpoints

    def state(self) -> dict[str, Tensor | int]:
        """What this rank needs to have the plan again: tensors and ints, which `torch.save` takes as they are.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan, by_count
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.tensor([[0], [3]]), by_count(4, 2))
            ...     return GraphPlan.of_state(plan.state()).digest == plan.digest
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [True, True]
        """
        return state.put(self)

    @property
    def digest(self) -> str:
        """A number of 256 bits, in hexadecimal, that is another one for another plan or another rank of it."""
        return digest(self.state())

    @classmethod
    @torch.inference_mode(False)
    def of_state(cls, stored: Mapping[str, Tensor | int], axis: AxisLike = None) -> GraphPlan:
        """The plan that `state` was asked of; every rank hands in its own.

        Args:
            stored: what `state` returned on this rank.
            axis: ranks of the same number.

        Raises:
            ArgumentError: no state, that of another rank or of another number of ranks.
            MismatchError: the ranks' states are not those of one plan; and where another rank refuses its own.
        """
        call = Call(f"{cls.verb}.of_state", torch.empty(0), axis)
        made = object.__new__(cls)
        made.__dict__.update(state.take(stored, call))
        return made


def _operand(edges: object) -> Tensor:
    """A tensor that is where the plan will be, for a call that is refused."""
    return edges if is_table(edges, 2, INDEX) else torch.empty(0)
