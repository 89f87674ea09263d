"""Rows of nodes that are cut over the ranks: which of them this rank has, needs and sends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from gradmesh._torch import is_fake
from gradmesh.arguments import Call, integer
from gradmesh.axis import Axis
from gradmesh.collectives import all_gather, all_reduce, exchange, shard
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.nn.graph.bound import Bound
from gradmesh.nn.graph.edges import added
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes
from gradmesh.overlap.pending import Pending
from gradmesh.transport import compiling
from gradmesh.types import Convention, I, R

__all__ = ["Rows"]


class Rows(Bound):
    """The rows of the nodes of a graph, one part on each rank, and what moves them. A `GraphPlan` is one.

    This rank's rows lie in the order of `own`. Every method is differentiable in every mode and to every order, and
    every rank of the axis has to call it, but `take`, which sends nothing forward.

    Attributes:
        axis: the ranks.
        owner: the rank of each node, shape (nodes,).
        own: the nodes whose rows this rank has, by number.
        remote: the nodes whose rows it gets, by owner and then by number.
        hop: how far each row of an exchange is from the own ones, in edges; 0 for these.
        counts: how many nodes each rank owns.
        kind: the type of the nodes, in a graph of several; ranks that exchange rows of different types are told.
    """

    verb = "nn.graph.Rows"
    kind: str | None = None

    def __init__(self, axis: Axis, owner: Tensor, kind: str | None = None) -> None:
        """Made by a plan: the rows of a partition, with no remote ones yet."""
        self.axis, self.owner, self.kind = axis, owner, kind
        self.own = (owner == axis.rank).nonzero().squeeze(1)
        counts = torch.bincount(owner, minlength=axis.size).tolist()
        self.counts: tuple[int, ...] = tuple(counts)
        # All rows in the order in which the ranks hold them, one rank after another; and each node's place there.
        self._by_rank = owner.argsort(stable=True)
        self._places = torch.empty_like(owner)
        self._places[self._by_rank] = torch.arange(len(owner), device=owner.device)
        self._in_order = bool((owner[1:] >= owner[:-1]).all())
        self.ask((owner != axis.rank).long().neg(), ask=False)

    def ask(self, far: Tensor, *, ask: bool = True) -> None:
        """Tell the other ranks which of their rows this one needs. Every rank calls it, once.

        Args:
            far: how far each node is from the own ones, 0 for these; -1 for those that are not needed.
            ask: whether any other rank may need any of this one's.
        """
        remote = (far > 0).nonzero().squeeze(1)
        remote = remote[(self.owner[remote] * len(self.owner) + remote).argsort()]
        owners = self.owner[remote]
        wanted: list[int] = torch.bincount(owners, minlength=self.axis.size).tolist()
        begins = torch.tensor(list(accumulate(self.counts, initial=0)), device=remote.device)
        asked = [remote[:0]] * self.axis.size
        if ask:
            asked = exchange(list((self._places[remote] - begins[owners]).split(wanted)), self.axis)
        self.remote, self.hop = remote, far[torch.cat((self.own, remote))]
        sent = Sizes(tuple(len(rows) for rows in asked))
        self._picked = Picked(torch.cat(asked), sent, Sizes(tuple(wanted)), len(self.own))
        self._ops: dict[Any, NeighborAllToAll] = {}

    # -- what is known of them

    @property
    def nodes(self) -> int:
        """The number of all nodes."""
        return self.owner.shape[0]

    @property
    def send_rows(self) -> dict[int, Tensor]:
        """For each rank that gets rows of this one, which; as `gradmesh.neighbor_all_to_all` takes them."""
        parts = self._picked.index.split(self._picked.sent.explicit)
        return {rank: rows for rank, rows in enumerate(parts) if len(rows)}

    @property
    def receive_counts(self) -> dict[int, int]:
        """For each rank that sends rows to this one, how many."""
        return {rank: rows for rank, rows in enumerate(self._picked.received.explicit) if rows}

    @property
    def rows_sent(self) -> int:
        """The rows that this rank sends in an exchange, one for each rank that needs it."""
        return self._picked.sent.total

    @property
    def rows_of_gather(self) -> int:
        """The rows that it would send if every rank got all rows."""
        return len(self.own) * (self.axis.size - 1)

    # -- what moves them

    @overload
    def exchange(
        self,
        x: Tensor,
        *,
        async_op: Literal[False] = False,
        comm_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> Tensor: ...
    @overload
    def exchange(
        self,
        x: Tensor,
        *,
        async_op: Literal[True],
        comm_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> Pending[Tensor]: ...
    @overload
    def exchange(
        self,
        x: Tensor,
        *,
        async_op: bool,
        comm_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> Tensor | Pending[Tensor]: ...

    def exchange(
        self,
        x: Tensor,
        *,
        async_op: bool = False,
        comm_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> Tensor | Pending[Tensor]:
        """The own rows followed by the remote ones, each of which comes from the rank that owns it.

        ::

            V -> V    shape (own, ...) -> (own + remote, ...)

                      rank 0 needs c    [a b] -> [a b c]      [ga gb+gb'] <- [ga gb gc']
                      rank 1 needs b    [c]   -> [c b]        [gc+gc']    <- [gc gb']

        Backward sends the rows' gradients back, and adds them in an order that is the same every time.

        Args:
            x: this rank's own rows, along dim 0.
            async_op: begin, and return a `gradmesh.Pending` of it: edges of `interior` need own rows alone.
            comm_dtype: the dtype that travels, as in every verb; the own rows are not rounded.
            backward_dtype: that of the backward.

        Raises:
            ShapeError: not one row for each own node. The other ranks raise `MismatchError`.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.tensor([[0, 1, 2], [1, 2, 1]]), torch.tensor([0, 0, 1]))
            ...     return plan.exchange(10.0 + plan.own).tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[10.0, 11.0, 12.0], [12.0, 11.0]]
        """
        call = Call(f"{self.verb}.exchange", x, self.axis, comm_dtype, backward_dtype, async_op=async_op)
        self._check(x, self.own.shape[0], "own node", call)
        result: Tensor | Pending[Tensor] = call.run(self._op(call), x, lambda rows: torch.cat((x, rows)))
        return result

    def take(self, x: Tensor) -> Tensor:
        """The own rows of a tensor that is the same on every rank.

        ::

            I -> V    shape (nodes, ...) -> (own, ...)

                      [a b c] -> [a b]      [ga gb gc] <- [ga gb]
                      [a b c] -> [c]        [ga gb gc] <- [gc]

        So positions require grad once, and their gradient comes out whole and equal on every rank.

        Args:
            x: the rows of all nodes, by number.

        Raises:
            ShapeError: not one row for each node.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan, by_count
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.empty(2, 0, dtype=torch.int64), by_count(3, 2))
            ...     x = torch.ones(3, requires_grad=True)
            ...     (plan.take(x) ** 2 * (1 + gm.rank())).sum().backward()
            ...     return x.grad.tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[2.0, 2.0, 4.0], [2.0, 2.0, 4.0]]
        """
        self._check(x, self.nodes, "node")
        ordered = x if self._in_order else x.index_select(0, self._by_rank)
        return shard(ordered, self.axis, sizes=self.counts)

    def gather(self, x: Tensor, *, dst: Convention = R) -> Tensor:
        """The rows of all nodes, by number, on every rank.

        ::

            V -> R    shape (own, ...) -> (nodes, ...)     backward adds the ranks' gradients
            V -> I    the same; each rank has the whole gradient already

        Args:
            x: this rank's own rows.
            dst: `gm.R` if each rank uses the result differently, `gm.I` if every rank repeats the same work on it.

        Raises:
            ShapeError: not one row for each own node. The other ranks raise `MismatchError`.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.empty(2, 0, dtype=torch.int64), torch.tensor([1, 0, 1]))
            ...     return plan.gather(10 + plan.own).tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[10, 11, 12], [10, 11, 12]]
        """
        self._check(x, self.own.shape[0], "own node", Call(f"{self.verb}.gather", x, self.axis))
        whole = all_gather(x, self.axis, dst=dst, sizes=self.counts)
        return whole if self._in_order else whole.index_select(0, self._places)

    def pool(self, x: Tensor, structure: Tensor | None = None, structures: int = 1) -> Tensor:
        """The sum of all nodes' rows, for each structure of a batch.

        ::

            V -> I    shape (own, ...) -> (structures, ...)     backward: to each row the gradient of its structure

        Args:
            x: this rank's own rows.
            structure: the structure of each own row, counted from 0; None: there is one.
            structures: how many there are.

        Raises:
            ShapeError: not one row for each own node, or not one structure for each row.
            ArgumentError: numbers of structures that are none. In either case the other ranks raise `MismatchError`.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan, by_count
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.empty(2, 0, dtype=torch.int64), by_count(3, 2))
            ...     batch = torch.tensor([0, 1, 1])
            ...     return plan.pool(1.0 + plan.own, batch[plan.own], 2).tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[1.0, 5.0], [1.0, 5.0]]
        """
        call = Call(f"{self.verb}.pool", x, self.axis)
        self._check(x, self.own.shape[0], "own node", call)
        if structure is None:
            if structures != 1:
                self._fail_structures(call, "None", structures)
            part = x.sum(0, keepdim=True)
        else:
            self._check(structure, x.shape[0], "row", call)
            if structure.dim() != 1 or structure.dtype not in (torch.int64, torch.int32):
                self._fail_structures(call, f"{structure.dtype}{list(structure.shape)}", structures)
            number = structures if compiling() else integer(structures)
            if number is None or number < 0:
                self._fail_structures(call, "a tensor", structures)
            if not compiling() and structure.is_cpu and not is_fake(structure) and structure.numel():
                first, last = int(structure.min()), int(structure.max())
                if first < 0 or last >= structures:
                    self._fail_structures(call, f"numbers from {first} to {last}", structures)
            part = added(x, structure, structures)
        return all_reduce(part, self.axis, dst=I)

    def _op(self, call: Call) -> NeighborAllToAll:
        """The exchange, made once for each of the ways in which it can be asked for."""
        precision = call.precision
        if self.kind is not None:
            precision = precision | {"operand_desc": f"rows of type {self.kind!r}"}
        if compiling():
            return NeighborAllToAll(call.axis, 0, self._picked, **precision)
        key = (call.axis, *precision.values())
        op = self._ops.get(key)
        if op is None:
            op = self._ops[key] = NeighborAllToAll(call.axis, 0, self._picked, **precision)
        return op

    def _check(self, x: Tensor, rows: int, of: str, call: Call | None = None) -> None:
        """Refuse a tensor with another number of rows; where a call follows, its other ranks hear of it."""
        if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows:
            return
        problem = f"there is not one row for each {of}"
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        remedy = {
            "node": "pass the rows of all nodes, by number",
            "edge": "give one for each of plan.edge_index, or say for which with edges=",
        }.get(of, "take the rows of plan.own, by plan.take(x) of a tensor that every rank has")
        if call is not None:
            call.fail(problem, expected=f"{rows} rows", got=got, remedy=remedy, kind=ShapeError)
        self._refuse(problem, f"{rows} rows", got, remedy)

    def _fail_structures(self, call: Call, got: str, structures: object) -> NoReturn:
        call.fail(
            "the rows' structures are not those that there are",
            expected=f"structure as a 1-d tensor of int64, with 0 <= number < {structures}",
            got=f"structure={got}, structures={structures!r}",
            remedy="pass batch[plan.own] and the number of structures in all of the batch",
            kind=ArgumentError,
        )

    def _refuse(
        self, problem: str, expected: str, got: str, remedy: str, kind: type[ArgumentError] = ShapeError
    ) -> NoReturn:
        """Raise an error of which no other rank has to hear, as none waits."""
        raise kind(
            message(problem, op=self.verb, axis=str(self.axis), expected=expected, got=got, remedy=remedy)
        )
