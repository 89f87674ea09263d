"""`HeteroPlan`: a partitioned graph with several types of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from gradmesh.autograd.pending import Pending, combined
from gradmesh.errors import ArgumentError, ShapeError
from gradmesh.nn.graph.plan import (
    Bound,
    Edges,
    Rows,
    added,
    checked_edges,
    checked_owner,
    digest,
    hops_of,
    local_edges,
    types_of_state,
    types_to_state,
)
from gradmesh.nn.inputs import agree, fingerprint
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import Convention, R
from gradmesh.verbs.call import Call

Relation = tuple[str, str, str]
"""Source type, name and target type of edges, e.g. ("author", "writes", "paper")."""


class HeteroPlan(Bound):
    """A partitioned graph with several types of nodes and edges. Constructing it is a collective.

    Each type of node has its own partition. All relations with the same source type share its rows: one exchange serves
    all of them. The methods are those of `GraphPlan`, on dicts by type or by relation. Every rank passes the full
    graph, and calls methods with the same types.

    Args:
        edges: for each relation, sources and targets, shape (2, edges), in global indices of their types.
        owner: for each type of node, the rank of each node.
        axis: the ranks, as in every verb.
        hops: number of layers that an exchange serves, as in `GraphPlan`; along edges of any relation.

    Attributes:
        axis: the ranks.
        hops: number of layers that an exchange serves.
        rows: for each type of node its `Rows`, e.g. `plan.rows["paper"].own`.
        edges: for each relation its edges on this rank: `edge_index`, `edges`, `interior` and `boundary`, as in
            `GraphPlan`.

    Raises:
        ArgumentError, MismatchError: invalid edges or owners, or the ranks' arguments differ.

    Example:
        >>> from gradmesh.nn.graph import HeteroPlan, by_count
        >>> writes = ("author", "writes", "paper")
        >>> def on_each_rank():
        ...     owner = {"author": by_count(2, 2), "paper": by_count(3, 2)}
        ...     plan = HeteroPlan({writes: torch.tensor([[0, 0, 1], [0, 2, 2]])}, owner)
        ...     authors = plan.exchange({"author": 1.0 + plan.rows["author"].own})["author"]
        ...     source, target = plan.edges[writes].edge_index
        ...     return plan.scatter_add({writes: authors[source]})["paper"].tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0, 0.0], [3.0]]
    """

    verb = "nn.graph.HeteroPlan"

    @torch.inference_mode(False)
    def __init__(
        self,
        edges: Mapping[Relation, Tensor],
        owner: Mapping[str, Tensor],
        axis: AxisLike = None,
        *,
        hops: int = 1,
    ) -> None:
        call = Call(self.verb, torch.empty(0), axis)
        fail = call.fail
        if not isinstance(owner, Mapping) or not isinstance(edges, Mapping):
            fail(
                "edges and owner must be dicts",
                expected="edges={(source type, relation, target type): edges}, owner={type: ranks}",
                got=f"edges={type(edges).__name__}, owner={type(owner).__name__}",
                remedy="pass dicts, or use gm.nn.graph.GraphPlan for one type of nodes and edges",
            )
        for kind in owner:
            if not isinstance(kind, str):
                fail(
                    "a node type in owner is not a str",
                    expected='owner={"paper": ranks, ...}',
                    got=f"the key {kind!r}",
                    remedy=f"name the type, e.g. owner={{'{kind}': ranks}}",
                )
        nodes = {kind: checked_owner(owner[kind], call.axis.size, fail) for kind in sorted(owner)}
        self.axis, self.hops = call.axis, hops_of(hops, fail)
        pairs = self._checked(edges, {kind: len(each) for kind, each in nodes.items()}, call)
        device = next((each.device for each in pairs.values()), None)
        nodes = {kind: each.to(device) for kind, each in nodes.items()}
        agree(self.axis, self.verb, "types, and hops", [self.hops, *fingerprint(list(nodes), list(pairs))])
        agree(self.axis, self.verb, "edges and owner", [], *nodes.values(), *pairs.values())
        self.rows = {kind: Rows(self.axis, each, kind) for kind, each in nodes.items()}
        self._build(pairs)

    def _checked(
        self, edges: Mapping[Relation, Tensor], nodes: Mapping[str, int], call: Call
    ) -> dict[Relation, Tensor]:
        fail = call.fail
        for relation in edges:
            if (
                not isinstance(relation, tuple)
                or len(relation) != 3
                or not all(isinstance(name, str) for name in relation)
                or not {relation[0], relation[2]} <= set(nodes)
            ):
                fail(
                    "a key of edges is not a relation between node types of owner",
                    expected=f"(source type, relation, target type) with types from {', '.join(map(repr, nodes))}",
                    got=repr(relation),
                    remedy="add the missing node types to owner, or correct the key",
                )
        return {
            relation: checked_edges(edges[relation], (nodes[relation[0]], nodes[relation[2]]), fail)
            for relation in sorted(edges)
        }

    def _build(self, pairs: Mapping[Relation, Tensor]) -> None:
        """Find the edges of each relation and the remote rows of each type, and request these."""
        far = {kind: (rows.owner != self.axis.rank).long().neg() for kind, rows in self.rows.items()}
        found: dict[Relation, list[Tensor]] = {relation: [] for relation in pairs}
        for hop in range(self.hops):
            for relation, (_, target) in pairs.items():
                found[relation].append((far[relation[2]][target] == hop).nonzero().squeeze(1))
            for relation, (source, _) in pairs.items():
                new = source[found[relation][hop]]
                far[relation[0]][new[far[relation[0]][new] < 0]] = hop + 1
        place: dict[str, Tensor] = {}
        for kind, rows in self.rows.items():
            rows.ask(far[kind])
            held = torch.cat((rows.own, rows.remote))
            place[kind] = torch.empty_like(rows.owner)
            place[kind][held] = torch.arange(len(held), device=held.device)
        self.edges: dict[Relation, Edges] = {}
        for relation, (source, target) in pairs.items():
            numbers = torch.cat(found[relation]).sort().values
            ends = relation[0], relation[2]
            local = torch.stack((place[ends[0]][source[numbers]], place[ends[1]][target[numbers]]))
            own = len(self.rows[ends[0]].own), len(self.rows[ends[1]].own)
            self.edges[relation] = local_edges(local, numbers, own)

    def rebuilt(self, edges: Mapping[Relation, Tensor]) -> HeteroPlan:
        """A plan with new edges and the same partition; `edges` has the edges of each relation."""
        owner = {kind: rows.owner for kind, rows in self.rows.items()}
        return HeteroPlan(edges, owner, self.axis, hops=self.hops)

    def state(self) -> dict[str, Any]:
        """This rank's plan as dicts of tensors and ints, for `torch.save`; restore it with `of_state`.

        Example:
            >>> from gradmesh.nn.graph import HeteroPlan, by_count
            >>> def on_each_rank():
            ...     edges = {("node", "to", "node"): torch.tensor([[0], [3]])}
            ...     plan = HeteroPlan(edges, {"node": by_count(4, 2)})
            ...     return HeteroPlan.of_state(plan.state()).digest == plan.digest
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [True, True]
        """
        return types_to_state(self.rows, self.edges, (self.axis.rank, self.axis.size, self.hops))

    @property
    def digest(self) -> str:
        """SHA-256 of the state, in hexadecimal; differs between plans and between ranks."""
        return digest(self.state())

    @classmethod
    @torch.inference_mode(False)
    def of_state(cls, stored: Mapping[str, Any], axis: AxisLike = None) -> HeteroPlan:
        """Restore a plan from `state`. A collective; arguments and errors as in `GraphPlan.of_state`."""
        call = Call(f"{cls.verb}.of_state", torch.empty(0), axis)
        made = object.__new__(cls)
        made.hops, fields, made.edges = types_of_state(stored, call)
        made.axis, made.rows = call.axis, {kind: object.__new__(Rows) for kind in fields}
        for kind, rows in made.rows.items():
            rows.__dict__.update(fields[kind])
        return made

    @overload
    def exchange(
        self, x: Mapping[str, Tensor], *, async_op: Literal[False] = False, **precision: Any
    ) -> dict[str, Tensor]: ...
    @overload
    def exchange(
        self, x: Mapping[str, Tensor], *, async_op: Literal[True], **precision: Any
    ) -> Pending[dict[str, Tensor]]: ...
    @overload
    def exchange(
        self, x: Mapping[str, Tensor], *, async_op: bool, **precision: Any
    ) -> dict[str, Tensor] | Pending[dict[str, Tensor]]: ...

    def exchange(
        self, x: Mapping[str, Tensor], *, async_op: bool = False, **precision: Any
    ) -> dict[str, Tensor] | Pending[dict[str, Tensor]]:
        """The local rows of some types, each followed by its remote rows; as `GraphPlan.exchange`.

        Args:
            x: for each type this rank's local rows.
            async_op: start all exchanges, and return one `gradmesh.Pending`.
            precision: `comm_dtype` and `backward_dtype`.
        """
        kinds = self._kinds(x, "exchange")
        if not async_op or not kinds:
            return {kind: self.rows[kind].exchange(x[kind], **precision) for kind in kinds}
        started = [self.rows[kind].exchange(x[kind], async_op=True, **precision) for kind in kinds]
        return combined(started, lambda rows: dict(zip(kinds, rows, strict=True)))

    def take(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local rows of replicated tensors, by type; as `GraphPlan.take`."""
        return {kind: self.rows[kind].take(x[kind]) for kind in self._kinds(x)}

    def gather(self, x: Mapping[str, Tensor], *, dst: Convention = R) -> dict[str, Tensor]:
        """The rows of all nodes, by type; as `GraphPlan.gather`."""
        return {kind: self.rows[kind].gather(x[kind], dst=dst) for kind in self._kinds(x, "gather")}

    def pool(
        self, x: Mapping[str, Tensor], structure: Mapping[str, Tensor] | None = None, structures: int = 1
    ) -> dict[str, Tensor]:
        """The sum of all nodes' rows for each structure of a batch, by type; as `GraphPlan.pool`."""
        kinds = self._kinds(x, "pool")
        for kind in kinds:
            if structure is not None and kind not in structure:
                problem = "structure has no entry for a node type of x"
                self._refuse(problem, f"an entry for {kind!r}", repr(list(structure)), communicates="pool")
        return {
            kind: self.rows[kind].pool(x[kind], None if structure is None else structure[kind], structures)
            for kind in kinds
        }

    def scatter_add(self, messages: Mapping[Relation, Tensor]) -> dict[str, Tensor]:
        """The sum of the messages at each target, over all given relations. Sends nothing.

        Args:
            messages: for some relations, one row for each edge of `plan.edges[relation]`.

        Returns:
            For each target type of these relations, one row for each local node; with several hops, one row for each
            row of an exchange (incomplete for the outermost rows).

        Raises:
            ArgumentError: unknown relation.
            ShapeError: the number of rows is not the number of edges.
        """
        if not isinstance(messages, Mapping):
            self._refuse("messages must be a dict", "{relation: rows}", type(messages).__name__)
        sums: dict[str, Tensor] = {}
        for relation in messages:
            if relation not in self.edges:
                self._refuse("unknown relation", f"one of {list(self.edges)}", repr(relation))
        for relation in sorted(messages):
            target, given = self.edges[relation].edge_index[1], messages[relation]
            if not isinstance(given, Tensor) or given.dim() == 0 or given.shape[0] != target.shape[0]:
                text = f"{target.shape[0]} rows for {relation}"
                got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                self._refuse("the number of rows is not the number of edges", text, got, ShapeError)
            rows = self.rows[relation[2]]
            count = rows.own.shape[0]
            one = added(given, target, count if self.hops == 1 else count + rows.remote.shape[0])
            sums[relation[2]] = sums[relation[2]] + one if relation[2] in sums else one
        return sums

    def _kinds(self, x: Mapping[str, Tensor], communicates: str = "") -> list[str]:
        """The node types of `x`, in the same order on every rank."""
        if not isinstance(x, Mapping):
            self._refuse("x must be a dict", "{type: rows}", type(x).__name__, communicates=communicates)
        unknown = [kind for kind in x if kind not in self.rows]
        if unknown:
            kinds = f"one of {', '.join(map(repr, self.rows))}"
            self._refuse("unknown node type", kinds, repr(unknown[0]), communicates=communicates)
        return sorted(x)

    def _refuse(
        self,
        problem: str,
        expected: str,
        got: str,
        kind: type[ArgumentError] = ArgumentError,
        communicates: str = "",
    ) -> NoReturn:
        """Raise an error; if the method `communicates`, the other ranks raise too."""
        remedy = "use the node types and relations of the plan: sorted(plan.rows), sorted(plan.edges)"
        if communicates:
            call = Call(f"{self.verb}.{communicates}", torch.empty(0), self.axis)
            call.fail(problem, expected=expected, got=got, remedy=remedy, kind=kind)
        raise kind.of(problem, op=self.verb, axis=str(self.axis), expected=expected, got=got, remedy=remedy)
