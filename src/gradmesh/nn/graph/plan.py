"""`GraphPlan`: a partitioned graph, and the exchange of rows between its ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from gradmesh.nn.graph import state
from gradmesh.nn.graph.agree import agree
from gradmesh.nn.graph.edges import INDEX, Edges, added, checked_edges, is_table, local_edges, picked_edges
from gradmesh.nn.graph.inputs import (
    GraphInput,
    Kind,
    check_own_matches,
    checked_own,
    checked_owner,
    edges_of_parts,
    failing,
    hops_of,
    owner_of_parts,
    sent_by_root,
)
from gradmesh.nn.graph.rows import Rows
from gradmesh.runtime.mesh import AxisLike
from gradmesh.verbs.call import Call

__all__ = ["GraphPlan"]

_KINDS: tuple[Kind, ...] = ("whole", "root", "parts")


class GraphPlan(Rows):
    """A partitioned graph, and the exchange of rows between its ranks. Constructing it is a collective.

    An edge belongs to the rank that owns its target. Each rank has all edges that end at its nodes, in the given order,
    and receives the rows of their source nodes on other ranks: its remote rows.

    There are three ways to pass the graph:

    * on every rank: `GraphPlan(edges, owner)`;
    * on one rank: `GraphPlan(edges, owner, root=0)` there, `GraphPlan(root=0)` on the others;
    * in parts: `GraphPlan(edges, own=own)`, with the indices of the rank's nodes and the edges that end at them. If
      every rank has `owner` too, `GraphPlan(edges, owner, own=own)` saves the exchange of the owners.

    Args:
        edges: sources and targets, shape (2, edges), in global node indices.
        owner: the rank of each node, shape (nodes,); see `by_count`, `by_space`, `by_graph`, `by_metis`.
        axis: the ranks, as in every verb.
        own: the global indices of this rank's nodes, for a graph in parts. Rows are in the order of `plan.own`, which
            is sorted.
        root: the rank that has the graph. The plan is on the kind of device of the root's edges, on each rank's current
            device.
        hops: number of layers that an exchange serves. With more than one, remote rows are up to that many edges away,
            and this rank also has the edges that end at rows up to `hops - 1` edges away.

    Attributes:
        axis: the ranks.
        owner: the rank of each node.
        own: the global indices of the local rows, sorted.
        remote: the global indices of the remote rows, sorted by owner and index.
        counts: each rank's number of nodes.
        hops: number of layers that an exchange serves.
        hop: for each row of an exchange, its distance from the local rows in edges; 0 for local rows.
        edge_index: this rank's edges, sources and targets, as indices of the rows of an exchange.
        edges: the indices of these edges in the given list, for example to select their attributes. For a graph in
            parts, indices in this rank's list; with several hops, in the concatenation of all ranks' lists.
        interior: the edges between local rows, as indices into `edge_index`.
        boundary: the other edges, as indices into `edge_index`.

    Raises:
        ArgumentError, MismatchError: invalid edges or owners, or the ranks' arguments differ. If the arguments are
            invalid on one rank only, that rank raises ArgumentError and the others `MismatchError`.

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

    @torch.inference_mode(False)  # a plan made in inference mode must work in training
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
                "own= and root= cannot be combined",
                "own= if every rank passes its part, or root= if one rank passes the full graph",
                f"own=... and root={root!r}",
                "omit root if every rank passes its part, else omit own",
            )
        self._kind: Kind = "parts" if own is not None else "whole" if root is None else "root"
        self._root = -1 if root is None else call.rank(root)
        here, options = call.axis, [_KINDS.index(self._kind), depth, self._root]
        given: GraphInput | None = None
        if self._kind == "whole":
            nodes = checked_owner(owner, here.size, fail)
            pairs = checked_edges(edges, len(nodes), fail)
            nodes = nodes.to(pairs.device)
            agree(here, self.verb, "edges, owner, root and hops", options, pairs, nodes)
            given = _full(pairs)
        elif self._kind == "root":
            given, nodes = self._from_root(edges, owner, call, options)
        elif owner is None:
            local = checked_own(own, fail)
            agree(here, self.verb, "combination of arguments and hops", options)
            nodes = owner_of_parts(local, here, self.verb)
        else:
            nodes = checked_owner(owner, here.size, fail)
            check_own_matches(checked_own(own, fail), nodes, here.rank, fail)
            agree(here, self.verb, "owner, combination of arguments and hops", [*options, 1], nodes)
        super().__init__(here, nodes)
        self._build(given or edges_of_parts(edges, self, depth, call), depth)

    def _from_root(
        self, edges: Tensor | None, owner: Tensor | None, call: Call, options: list[int]
    ) -> tuple[GraphInput, Tensor]:
        fail = failing(call)
        if call.axis.rank == self._root:
            owner = checked_owner(owner, call.axis.size, fail)
            edges = checked_edges(edges, len(owner), fail)
            owner = owner.to(edges.device)
        elif edges is not None or owner is not None:
            fail(
                "edges or owner passed on a rank that is not the root",
                f"edges=None and owner=None: rank {self._root} is the root",
                f"edges={type(edges).__name__}, owner={type(owner).__name__}",
                f"pass GraphPlan(root={self._root}) on this rank, or omit root if every rank has the graph",
            )
        agree(call.axis, self.verb, "root and hops", options)
        return sent_by_root(edges, owner, call.axis, self._root)

    def _build(self, given: GraphInput, hops: int) -> None:
        """Find the edges and the remote rows, and request these."""
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
        """A plan with new edges and the same partition. A collective.

        Args:
            edges: passed in the same way as to this plan: all edges, those of this rank, or None if another rank is the
                root.

        Raises:
            ArgumentError, MismatchError: as `GraphPlan`.

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
        options, given = [_KINDS.index(self._kind), self.hops, self._root], None
        if self._kind == "whole":
            pairs = checked_edges(edges, self.nodes, failing(call))
            agree(self.axis, call.verb, "edges", options, pairs)
            given = _full(pairs)
        elif self._kind == "root":
            owner = self.owner if self.axis.rank == self._root else None
            given, _ = self._from_root(edges, owner, call, options)
        else:
            agree(self.axis, call.verb, "combination of arguments and hops", options)
            given = edges_of_parts(edges, self, self.hops, call)
        made._build(given, self.hops)
        return made

    # -- work at the edges

    def scatter_add(self, messages: Tensor, edges: Tensor | None = None) -> Tensor:
        """The sum of the messages at each target, deterministic. Sends nothing.

        Args:
            messages: one row for each edge.
            edges: the edges that `messages` belongs to, as an index or a mask, e.g. `plan.interior`; None: all, in the
                order of `edge_index`.

        Returns:
            One row for each local node; with several hops, one row for each row of an exchange (incomplete for the
            outermost rows).

        Raises:
            ShapeError: the number of rows is not the number of edges.
            ArgumentError: `edges` is neither an index nor a mask of this rank's edges.

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
        """This rank's plan as a dict of tensors and ints, for `torch.save`; restore it with `of_state`.

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
        """SHA-256 of the state, in hexadecimal; differs between plans and between ranks."""
        return state.digest(self.state())

    @classmethod
    @torch.inference_mode(False)
    def of_state(cls, stored: Mapping[str, Tensor | int], axis: AxisLike = None) -> GraphPlan:
        """Restore a plan from `state`. A collective.

        Args:
            stored: what `state` returned on this rank.
            axis: the ranks, as many as when the state was saved.

        Raises:
            ArgumentError: `stored` is not a state, or of another rank or number of ranks.
            MismatchError: the ranks' states belong to different plans, or another rank raised.
        """
        call = Call(f"{cls.verb}.of_state", torch.empty(0), axis)
        made = object.__new__(cls)
        made.__dict__.update(state.take(stored, call))
        return made


def _full(edges: Tensor) -> GraphInput:
    return GraphInput(edges, torch.arange(edges.shape[1], device=edges.device), whole=True)


def _operand(edges: object) -> Tensor:
    """A tensor on the plan's device, for `Call`."""
    return edges if is_table(edges, 2, INDEX) else torch.empty(0)
