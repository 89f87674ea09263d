"""Rows of partitioned nodes: the rows that this rank holds, receives and sends."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor

from gradmesh._torch import is_fake
from gradmesh.autograd.pending import Pending
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.nn.graph.edges import added
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import compiling
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_gather, all_reduce, exchange, shard

__all__ = ["Bound", "Rows"]

BoundT = TypeVar("BoundT", bound="Bound")


class Bound:
    """A plan, or part of one: copies share its axis, and pickling raises. `verb` is its name in errors."""

    verb: str

    def __copy__(self: BoundT) -> BoundT:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self: BoundT, memo: dict[int, Any]) -> BoundT:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise ArgumentError."""
        raise ArgumentError(
            message(
                "a plan cannot be pickled: it refers to a process group",
                op=self.verb,
                expected="plan.state(), a dict of tensors and ints",
                got=f"a {type(self).__name__}",
                remedy="save plan.state() on each rank, and restore it with "
                f"{type(self).__name__}.of_state(torch.load(path))",
            )
        )


class Rows(Bound):
    """Partitioned rows of nodes, and their communication. Base class of `GraphPlan`.

    This rank's rows are in the order of `own`. Every method is a collective, differentiable in every mode and to every
    order; `take` communicates in backward only.

    Attributes:
        axis: the ranks.
        owner: the rank of each node, shape (nodes,).
        own: the global indices of the local rows, sorted.
        remote: the global indices of the remote rows, sorted by owner and index.
        hop: for each row of an exchange, its distance from the local rows in edges; 0 for local rows.
        counts: each rank's number of nodes.
        kind: the node type in a `HeteroPlan`; the ranks compare it in every exchange.
    """

    verb = "nn.graph.Rows"
    kind: str | None = None

    def __init__(self, axis: Axis, owner: Tensor, kind: str | None = None) -> None:
        """The rows of a partition, before remote rows are requested."""
        self.axis, self.owner, self.kind = axis, owner, kind
        self.own = (owner == axis.rank).nonzero().squeeze(1)
        counts = torch.bincount(owner, minlength=axis.size).tolist()
        self.counts: tuple[int, ...] = tuple(counts)
        # The nodes in the order of the concatenated local rows of all ranks, and the inverse permutation.
        self._by_rank = owner.argsort(stable=True)
        self._places = torch.empty_like(owner)
        self._places[self._by_rank] = torch.arange(len(owner), device=owner.device)
        self._in_order = bool((owner[1:] >= owner[:-1]).all())
        self.ask((owner != axis.rank).long().neg(), ask=False)

    def ask(self, far: Tensor, *, ask: bool = True) -> None:
        """Request remote rows from their owners. A collective, called by plans only.

        Args:
            far: each node's distance from the local rows; -1: not needed.
            ask: False if no rank requests any row.
        """
        remote = (far > 0).nonzero().squeeze(1)
        remote = remote[(self.owner[remote] * len(self.owner) + remote).argsort()]
        owners = self.owner[remote]
        wanted: list[int] = torch.bincount(owners, minlength=self.axis.size).tolist()
        begins = torch.tensor(list(accumulate(self.counts, initial=0)), device=remote.device)
        requested = [remote[:0]] * self.axis.size
        if ask:
            requested = exchange(list((self._places[remote] - begins[owners]).split(wanted)), self.axis)
        self.remote, self.hop = remote, far[torch.cat((self.own, remote))]
        sent = Sizes(tuple(len(rows) for rows in requested))
        self._picked = Picked(torch.cat(requested), sent, Sizes(tuple(wanted)), len(self.own))
        self._ops: dict[Any, NeighborAllToAll] = {}

    # -- sizes

    @property
    def nodes(self) -> int:
        """The number of all nodes."""
        return self.owner.shape[0]

    @property
    def send_rows(self) -> dict[int, Tensor]:
        """The local rows that each other rank receives, in the form of `gradmesh.neighbor_all_to_all`."""
        parts = self._picked.index.split(self._picked.sent.explicit)
        return {rank: rows for rank, rows in enumerate(parts) if len(rows)}

    @property
    def receive_counts(self) -> dict[int, int]:
        """The number of rows that each other rank sends to this one."""
        return {rank: rows for rank, rows in enumerate(self._picked.received.explicit) if rows}

    @property
    def rows_sent(self) -> int:
        """The number of rows that this rank sends in an exchange."""
        return self._picked.sent.total

    @property
    def rows_of_gather(self) -> int:
        """The number of rows that this rank would send in an all-gather."""
        return len(self.own) * (self.axis.size - 1)

    # -- communication

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
        """The local rows followed by the remote rows (halo exchange).

        ::

            V -> V    shape (own, ...) -> (own + remote, ...)

                      rank 0 needs c    [a b] -> [a b c]      [ga gb+gb'] <- [ga gb gc']
                      rank 1 needs b    [c]   -> [c b]        [gc+gc']    <- [gc gb']

        Backward sends the remote rows' gradients to their owners and adds them, deterministically.

        Args:
            x: this rank's rows, along dim 0.
            async_op: start the exchange, and return a `gradmesh.Pending`; edges of `interior` use local rows only.
            comm_dtype: the dtype in which rows are sent, as in every verb; local rows are not rounded.
            backward_dtype: the dtype in which gradients are sent.

        Raises:
            ShapeError: the number of rows is not `len(plan.own)`. The other ranks raise `MismatchError`.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.tensor([[0, 1, 2], [1, 2, 1]]), torch.tensor([0, 0, 1]))
            ...     return plan.exchange(10.0 + plan.own).tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[10.0, 11.0, 12.0], [12.0, 11.0]]
        """
        call = Call(f"{self.verb}.exchange", x, self.axis, comm_dtype, backward_dtype, async_op=async_op)
        self._check(x, self.own.shape[0], "local node", call)
        result: Tensor | Pending[Tensor] = call.run(self._op(call), x, lambda rows: torch.cat((x, rows)))
        return result

    def take(self, x: Tensor) -> Tensor:
        """The local rows of a replicated tensor.

        ::

            I -> V    shape (nodes, ...) -> (own, ...)

                      [a b c] -> [a b]      [ga gb gc] <- [ga gb]
                      [a b c] -> [c]        [ga gb gc] <- [gc]

        The gradient of `x`, such as of atomic positions, is complete and the same on every rank.

        Args:
            x: the rows of all nodes, in global order.

        Raises:
            ShapeError: the number of rows is not the number of nodes.

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
        """The rows of all nodes, in global order, on every rank.

        ::

            V -> R    shape (own, ...) -> (nodes, ...)     backward adds the ranks' gradients
            V -> I    the same forward; every rank already has the complete gradient

        Args:
            x: this rank's rows.
            dst: `gm.R` if each rank uses the result differently, `gm.I` if every rank does identical work on it.

        Raises:
            ShapeError: the number of rows is not `len(plan.own)`. The other ranks raise `MismatchError`.

        Example:
            >>> from gradmesh.nn.graph import GraphPlan
            >>> def on_each_rank():
            ...     plan = GraphPlan(torch.empty(2, 0, dtype=torch.int64), torch.tensor([1, 0, 1]))
            ...     return plan.gather(10 + plan.own).tolist()
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [[10, 11, 12], [10, 11, 12]]
        """
        self._check(x, self.own.shape[0], "local node", Call(f"{self.verb}.gather", x, self.axis))
        whole = all_gather(x, self.axis, dst=dst, sizes=self.counts)
        return whole if self._in_order else whole.index_select(0, self._places)

    def pool(self, x: Tensor, structure: Tensor | None = None, structures: int = 1) -> Tensor:
        """The sum of all nodes' rows, for each structure of a batch.

        ::

            V -> I    shape (own, ...) -> (structures, ...)     backward: each row gets the gradient of its structure

        Args:
            x: this rank's rows.
            structure: the index of each row's structure; None: there is one.
            structures: the number of structures in the batch.

        Raises:
            ShapeError: the number of rows is not `len(plan.own)`, or `structure` has another length. The other ranks
                raise `MismatchError`.
            ArgumentError: invalid indices or number of structures. The other ranks raise `MismatchError`.

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
        self._check(x, self.own.shape[0], "local node", call)
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
                    self._fail_structures(call, f"indices from {first} to {last}", structures)
            part = added(x, structure, structures)
        return all_reduce(part, self.axis, dst=I)

    def _op(self, call: Call) -> NeighborAllToAll:
        """The exchange op, cached for each axis and precision."""
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
        """Raise if `x` does not have `rows` rows; with `call`, the other ranks raise too."""
        if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows:
            return
        problem = f"the number of rows is not the number of {of}s"
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        remedy = {
            "node": "pass the rows of all nodes, in global order",
            "edge": "pass one row for each column of plan.edge_index, or select edges, e.g. edges=plan.interior",
            "row": "pass one structure index for each row of x, e.g. structure=batch[plan.own]",
        }.get(of, "pass the rows of plan.own: plan.take(x) of a replicated tensor x")
        if call is not None:
            call.fail(problem, expected=f"{rows} rows", got=got, remedy=remedy, kind=ShapeError)
        self._refuse(problem, f"{rows} rows", got, remedy)

    def _fail_structures(self, call: Call, got: str, structures: object) -> NoReturn:
        call.fail(
            "structure and structures do not match",
            expected=f"structure a 1-d tensor of int64 with 0 <= index < {structures}; structures an int >= 0 (1 if "
            "structure is None)",
            got=f"structure={got}, structures={structures!r}",
            remedy="pass e.g. plan.pool(x, batch[plan.own], int(batch.max()) + 1), with batch of the full graph",
            kind=ArgumentError,
        )

    def _refuse(
        self, problem: str, expected: str, got: str, remedy: str, kind: type[ArgumentError] = ShapeError
    ) -> NoReturn:
        """Raise on this rank; the other ranks are not waiting."""
        raise kind(
            message(problem, op=self.verb, axis=str(self.axis), expected=expected, got=got, remedy=remedy)
        )
