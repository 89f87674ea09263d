"""`GraphPlan`: a partitioned graph, and the exchange of rows between its ranks.

A plan is made from the full graph on every rank, from the full graph on one rank, or from one part on each rank. `Rows`
are the rows that this rank holds, receives and sends, `Edges` those that end at its nodes, in local row indices. A plan
is saved as tensors and ints.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, NoReturn, TypeGuard, TypeVar, cast, overload

import torch
from torch import Tensor

from gradmesh._torch import is_fake, modes_active
from gradmesh.autograd.pending import Pending
from gradmesh.errors import ArgumentError, MismatchError, ShapeError
from gradmesh.nn.inputs import agree, checksum, device_of_root, fingerprint, outside
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.transport import compiling
from gradmesh.transport.run import exchange_device
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, integer, kind_of
from gradmesh.verbs.collectives import all_gather, all_reduce, exchange, shard

INDEX = (torch.int64, torch.int32)
"""Index dtypes."""

Fail = Callable[..., NoReturn]
"""Raises an error; takes the arguments of `Call.fail`."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges in local row indices, where local rows come first, then remote rows; see `GraphPlan`."""

    edge_index: Tensor
    edges: Tensor
    interior: Tensor
    boundary: Tensor


def local_edges(pairs: Tensor, numbers: Tensor, own: tuple[int, int]) -> Edges:
    """Edges from local row indices; `own` has the numbers of local rows of the source and target types."""
    inside = (pairs[0] < own[0]) & (pairs[1] < own[1])
    return Edges(pairs, numbers, inside.nonzero().squeeze(1), (~inside).nonzero().squeeze(1))


def checked_edges(edges: object, nodes: int | tuple[int, int], fail: Fail) -> Tensor:
    """The edges as int64; `nodes` is the number of nodes, or of source nodes and of target nodes."""
    if not is_table(edges, 2, INDEX) or edges.shape[0] != 2:
        fail(
            "edges is not an integer tensor of shape (2, edges)",
            expected="int64 node indices, sources in row 0 and targets in row 1",
            got=shown(edges),
            remedy="pass edges.T"
            if is_table(edges, 2, INDEX) and edges.shape[1] == 2
            else "torch.stack((source, target))",
        )
    ends = (nodes, nodes) if isinstance(nodes, int) else nodes
    for name, numbers, most in zip(("source", "target"), edges, ends, strict=True):
        if wrong := outside(numbers, most):
            fail(
                f"an edge's {name} is out of range",
                expected=f"0 <= {name} < {most}",
                got=f"{name}s {wrong}",
                remedy="use global node indices that start at 0",
            )
    return edges.long()


def picked_edges(edges: Tensor, count: int, refuse: Callable[..., NoReturn]) -> Tensor:
    """An index or a mask of a rank's edges, as an index; values are checked on a CPU only."""
    traced = compiling() or (isinstance(edges, Tensor) and is_fake(edges))
    valid = traced or is_table(edges, 1, INDEX)
    if not traced and valid and edges.is_cpu and not modes_active():
        valid = not outside(edges, count)
    if not valid and not (is_table(edges, 1, (torch.bool,)) and edges.shape[0] == count):
        numbers = f" from {int(edges.min())} to {int(edges.max())}" if is_table(edges, 1, INDEX) else ""
        refuse(
            "edges is not an index or a mask of this rank's edges",
            f"a 1-d tensor of int64 with 0 <= edge < {count}, or a mask of shape [{count}]",
            shown(edges) + numbers,
            "pass e.g. edges=plan.interior or edges=plan.boundary; indices count columns of plan.edge_index",
            ArgumentError,
        )
    return edges.nonzero().squeeze(1) if edges.dtype is torch.bool else edges


def is_table(x: object, dims: int, dtypes: Container[torch.dtype]) -> TypeGuard[Tensor]:
    """True for a dense tensor of `dims` dimensions and one of the dtypes, with readable values."""
    dense = (
        isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and not hasattr(x, "to_local")
    )
    return isinstance(x, Tensor) and dense and x.dim() == dims and x.dtype in dtypes and not is_fake(x)


def shown(x: object) -> str:
    """Describe an invalid tensor argument."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return kind_of(x)
    kind = "" if type(x) is Tensor else f"{type(x).__name__} of "
    return f"{kind}{x.dtype}{list(x.shape)}{', which has no values' if is_fake(x) else ''}"


def added(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Deterministic `zeros.index_add(0, index, values)`."""
    zeros = values.new_zeros((rows, *values.shape[1:]))
    if values.is_cpu:
        return zeros.index_add(0, index, values)
    # On a GPU index_add is not deterministic; index_put sorts first.
    return zeros.index_put((index,), values, accumulate=True)


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
        raise ArgumentError.of(
            "a plan cannot be pickled: it refers to a process group",
            op=self.verb,
            expected="plan.state(), a dict of tensors and ints",
            got=f"a {type(self).__name__}",
            remedy="save plan.state() on each rank, and restore it with "
            f"{type(self).__name__}.of_state(torch.load(path))",
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
            known = not compiling() and structure.is_cpu and not is_fake(structure)
            if known and (wrong := outside(structure, structures)):
                self._fail_structures(call, f"indices {wrong}", structures)
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
        raise kind.of(problem, op=self.verb, axis=str(self.axis), expected=expected, got=got, remedy=remedy)


Kind = Literal["whole", "root", "parts"]
KINDS: tuple[Kind, ...] = ("whole", "root", "parts")
"""A plan is made from the full graph on every rank, from the full graph on one rank, or from one part on each rank."""

_VERSION = 1
_FIELDS = ("owner", "own", "remote", "hop", "_by_rank", "_places")
_COUNTS = ("counts", "sent", "received")
_ROWS = {*(name.lstrip("_") for name in _FIELDS), "send", *_COUNTS}
_EDGES = ("edge_index", "edges", "interior", "boundary")


def types_to_state(
    rows: Mapping[str, Rows], edges: Mapping[Any, Edges], header: tuple[int, int, int]
) -> dict[str, Any]:
    """The state of a `HeteroPlan`."""
    return {
        **_header(*header),
        "rows": {kind: _put_rows(each) for kind, each in rows.items()},
        "relations": {relation: _put_edges(each) for relation, each in edges.items()},
    }


def types_of_state(
    state: Mapping[str, Any], call: Call
) -> tuple[int, dict[str, dict[str, Any]], dict[Any, Edges]]:
    """The hops, the fields of each type's rows, and each relation's edges."""
    numbers = _numbers(state, {"rows", "relations"}, (), call)
    rows, relations = state["rows"], state["relations"]
    if (
        not isinstance(rows, Mapping)
        or not isinstance(relations, Mapping)
        or not all(isinstance(kind, str) and _are_rows(part, numbers["ranks"]) for kind, part in rows.items())
        or not all(
            isinstance(relation, tuple)
            and len(relation) == 3
            and {relation[0], relation[2]} <= set(rows)
            and _are_edges(part, (len(rows[relation[0]]["hop"]), len(rows[relation[2]]["hop"])))
            for relation, part in relations.items()
        )
    ):
        _refuse(state, call)
    _check_rank(numbers, call)
    agree(call.axis, call.verb, "types and relations", fingerprint(list(rows), list(relations)))
    fields = {kind: _take_rows(rows[kind], call, [numbers["hops"]], kind) for kind in sorted(rows)}
    edges = {key: Edges(*(_plain(relations[key][name]) for name in _EDGES)) for key in sorted(relations)}
    return numbers["hops"], fields, edges


def _header(rank: int, ranks: int, hops: int) -> dict[str, int]:
    return {"version": _VERSION, "rank": rank, "ranks": ranks, "hops": hops}


def _numbers(
    state: Mapping[str, Any], parts: set[str], further: tuple[str, ...], call: Call
) -> dict[str, int]:
    """The checked ints of a state."""
    names = {*_header(0, 0, 0), *further}
    if (
        not isinstance(state, Mapping)
        or set(state) != names | parts
        or not all(type(state[name]) is int for name in names)
        or state["version"] != _VERSION
        or state["hops"] < 1
    ):
        _refuse(state, call)
    return {name: state[name] for name in names}


def _refuse(state: object, call: Call) -> NoReturn:
    listed = (
        f"{type(state).__name__} of {', '.join(map(str, state))}"
        if isinstance(state, Mapping)
        else repr(state)
    )
    call.fail(
        "the argument is not a valid plan state",
        expected="the dict that plan.state() returned",
        got=listed,
        remedy='save and load it unchanged, e.g. torch.save(plan.state(), "plan.pt")',
    )


def _check_rank(numbers: Mapping[str, int], call: Call) -> None:
    axis = call.axis
    if (numbers["rank"], numbers["ranks"]) != (axis.rank, axis.size):
        call.fail(
            "the state belongs to another rank",
            expected=f"the state of rank {axis.rank} of {axis.size}",
            got=f"the state of rank {numbers['rank']} of {numbers['ranks']}",
            remedy="construct the plan anew for another number of ranks"
            if numbers["ranks"] != axis.size
            else "load the state that this rank saved, e.g. from a file with the rank in its name",
        )


def _put_rows(rows: Rows) -> dict[str, Tensor]:
    """The tensors of rows, not copied."""
    fields = vars(rows)
    picked: Picked = fields["_picked"]
    counts = zip(_COUNTS, (rows.counts, picked.sent.explicit, picked.received.explicit), strict=True)
    return {
        **{name.lstrip("_"): fields[name] for name in _FIELDS},
        "send": picked.index,
        **{name: torch.tensor(numbers) for name, numbers in counts},
    }


def _take_rows(
    part: Mapping[str, Tensor], call: Call, equal: Sequence[int], kind: str | None = None
) -> dict[str, Any]:
    """The fields of `Rows` from `_put_rows`. A collective, which compares `equal` and the rows that are sent."""
    part = {name: _plain(each) for name, each in part.items()}
    _check_pairs(
        call, [*equal, checksum(part["owner"])], _per_rank(part, "sent"), _per_rank(part, "received")
    )
    sent, received = (Sizes(tuple(part[name].tolist())) for name in ("sent", "received"))
    return {
        "axis": call.axis,
        "kind": kind,
        **{name: part[name.lstrip("_")] for name in _FIELDS},
        "counts": tuple(part["counts"].tolist()),
        "_picked": Picked(part["send"], sent, received, len(part["own"])),
        "_in_order": bool((part["owner"][1:] >= part["owner"][:-1]).all()),
        "_ops": {},
    }


def _put_edges(edges: object) -> dict[str, Tensor]:
    """The tensors of edges, or of a plan."""
    return {name: getattr(edges, name) for name in _EDGES}


def _plain(x: Tensor) -> Tensor:
    """A tensor that autograd can save; one that was loaded in inference mode is cloned."""
    return x.clone() if x.is_inference() else x


def _are_rows(part: object, ranks: int) -> bool:
    """True if these are tensors of rows, with consistent lengths and indices in range."""
    if not _are_tensors(part, _ROWS):
        return False
    own, remote, nodes = len(part["own"]), len(part["remote"]), len(part["owner"])
    limits = {"owner": ranks, "own": nodes, "remote": nodes, "by_rank": nodes, "places": nodes, "send": own}
    return (
        all(tuple(part[name].shape) == (ranks,) for name in _COUNTS)
        and all(part[name].dim() == 1 and not outside(part[name], most) for name, most in limits.items())
        and len(part["by_rank"]) == len(part["places"]) == int(part["counts"].sum()) == nodes
        and int(part["sent"].sum()) == len(part["send"])
        and int(part["received"].sum()) == remote
        and len(part["hop"]) == own + remote
    )


def _are_edges(part: object, rows: tuple[int, int]) -> bool:
    """True if these are tensors of edges, with indices of so many source and target rows."""
    if not _are_tensors(part, _EDGES) or part["edge_index"].dim() != 2 or len(part["edge_index"]) != 2:
        return False
    count = part["edge_index"].shape[1]
    return (
        all(not outside(ends, most) for ends, most in zip(part["edge_index"], rows, strict=True))
        and tuple(part["edges"].shape) == (count,)
        and all(part[name].dim() == 1 and not outside(part[name], count) for name in ("interior", "boundary"))
        and len(part["interior"]) + len(part["boundary"]) == count
    )


def _are_tensors(part: object, names: Collection[str]) -> TypeGuard[Mapping[str, Tensor]]:
    return (
        isinstance(part, Mapping)
        and set(part) == set(names)
        and all(isinstance(x, Tensor) and is_table(x, x.dim(), (torch.int64,)) for x in part.values())
    )


def digest(state: Mapping[Any, Any]) -> str:
    """SHA-256 of a state."""
    made = hashlib.sha256()
    for name, value in _flat(state):
        numbers = value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]
        made.update(f"{name}:{len(numbers)};".encode())
        made.update(array("q", numbers).tobytes())
    return made.hexdigest()


def _flat(state: Mapping[Any, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of nested states, with their names."""
    for name in sorted(state):
        if isinstance(state[name], Mapping):
            yield from _flat(state[name], f"{within}{name!r}.")
        else:
            yield f"{within}{name}", state[name]


def _per_rank(tensors: Mapping[str, Tensor], name: str) -> list[tuple[int, int]]:
    """The number and a checksum of the rows that are sent to, or received from, each rank."""
    nodes = tensors["own"][tensors["send"]] if name == "sent" else tensors["remote"]
    return [(len(part), checksum(part)) for part in nodes.split(tensors[name].tolist())]


def _check_pairs(
    call: Call, equal: Sequence[int], sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]
) -> None:
    """Raise on every rank if sent and received rows do not match, or `equal` differs."""
    ranks, shared = call.axis.size, len(equal)
    row = torch.tensor([[*equal, *chain(*sent), *chain(*received)]], device=exchange_device(call.axis))
    table = all_gather(row, call.axis).tolist()
    sends, takes = (
        [_pairs(row[begin:][: 2 * ranks]) for row in table] for begin in (shared, shared + 2 * ranks)
    )
    differing = [
        f"rank {a} sends {sends[a][b][0]} rows to rank {b}, which expects "
        + ("other rows" if sends[a][b][0] == takes[b][a][0] else f"{takes[b][a][0]}")
        for a in range(ranks)
        for b in range(ranks)
        if sends[a][b] != takes[b][a]
    ]
    if differing or any(row[:shared] != table[0][:shared] for row in table):
        raise MismatchError.of(
            "the ranks' states belong to different plans",
            op=call.verb,
            axis=str(call.axis),
            expected="states that were saved together",
            got="; ".join(differing[:3]) or "different partitions or numbers of hops",
            remedy="load the states of the same checkpoint on every rank",
        )


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@dataclass(frozen=True, eq=False)
class GraphInput:
    """Edges in global node indices, at least those that end at this rank's nodes, and their numbers in the list."""

    pairs: Tensor
    numbers: Tensor
    whole: bool
    """True if these are all edges of the graph."""

    def ending_at(self, nodes: Tensor, rows: Rows) -> GraphInput:
        """The edges that end at some nodes; a collective, unless every rank has all edges."""
        if self.whole:
            return self._picked(nodes, rows)
        owners = rows.owner[nodes]
        order = owners.argsort(stable=True)
        requests = nodes[order].split(torch.bincount(owners, minlength=rows.axis.size).tolist())
        wanted = exchange(list(requests), rows.axis)
        found = [self._picked(each, rows) for each in wanted]
        received = exchange([torch.cat((one.pairs, one.numbers[None])) for one in found], rows.axis)
        joined = torch.cat(received, dim=1)
        return GraphInput(joined[:2], joined[2], whole=False)

    def _picked(self, nodes: Tensor, rows: Rows) -> GraphInput:
        marked = torch.zeros(rows.nodes, dtype=torch.bool, device=nodes.device)
        marked[nodes] = True
        here = marked[self.pairs[1]].nonzero().squeeze(1)
        return GraphInput(self.pairs[:, here], self.numbers[here], whole=False)


def checked_owner(owner: object, ranks: int, fail: Fail) -> Tensor:
    """The rank of each node as int64."""
    if not is_table(owner, 1, INDEX):
        fail(
            "owner is not a 1-d integer tensor",
            expected="the rank of each node, int64",
            got=shown(owner),
            remedy=f"pass e.g. owner=gm.nn.graph.by_count(nodes, {ranks}), by_space(...) or a custom assignment",
        )
    if wrong := outside(owner, ranks):
        fail(
            "owner has ranks out of range",
            expected=f"0 <= rank < {ranks}",
            got=f"ranks {wrong}",
            remedy=f"partition the graph into {ranks} parts, gm.world_size(axis)",
        )
    return owner.to(torch.int64, copy=True)  # the caller may overwrite the argument


def hops_of(hops: object, fail: Fail) -> int:
    """`hops` as an int >= 1."""
    depth = integer(hops)
    if depth is None or depth < 1:
        fail(
            "hops must be a positive int",
            expected="the number of layers that an exchange serves, e.g. hops=2",
            got=f"hops={hops!r}",
            remedy="omit it for one layer",
        )
    return depth


def checked_own(own: object, fail: Fail) -> Tensor:
    """The indices of this rank's nodes as int64."""
    if not is_table(own, 1, INDEX):
        fail(
            "own is not a 1-d integer tensor",
            expected="the global indices of this rank's nodes, int64",
            got=shown(own),
            remedy="pass e.g. own=torch.tensor([0, 1, 5])",
        )
    return own.long()


def check_own_matches(
    own: Tensor, owner: Tensor, rank: int, fail: Fail, names: tuple[str, str] = ("own", "owner")
) -> None:
    """Raise if `own` does not have exactly the nodes of this rank; `names` are the arguments' names."""
    local = (owner == rank).nonzero().squeeze(1)
    if not torch.equal(own.to(owner.device).sort().values, local):
        fail(
            f"{names[0]} does not match {names[1]}",
            expected=f"the {len(local)} nodes that rank {rank} owns, each once",
            got=f"{len(own)} nodes, which differ from these",
            remedy=f"pass ({names[1]} == {rank}).nonzero().squeeze(1), in any order",
        )


def owner_of_parts(own: Tensor, axis: Axis, verb: str) -> Tensor:
    """The rank of each node, from each rank's nodes."""
    ids = all_gather(own, axis, sizes="auto")
    counts = all_gather(torch.tensor([len(own)], device=own.device), axis)
    # All ranks have the same data from here on, and raise the same error.
    nodes = len(ids)
    if nodes and (int(ids.min()) < 0 or int(ids.max()) >= nodes or len(ids.unique()) < nodes):
        held = torch.bincount(ids.clamp(0, nodes - 1), minlength=nodes)
        wrong = (held != 1).nonzero().squeeze(1)
        raise MismatchError.of(
            "the ranks' own= do not contain every node exactly once",
            op=verb,
            axis=str(axis),
            expected=f"the global indices 0 to {nodes - 1}, each on exactly one rank",
            got=f"indices from {int(ids.min())} to {int(ids.max())}; missing or repeated: {wrong[:5].tolist()}",
            remedy="use global node indices, and assign each node to one rank",
        )
    owner = torch.empty(nodes, dtype=torch.int64, device=ids.device)
    owner[ids] = torch.arange(axis.size, device=ids.device).repeat_interleave(counts)
    return owner


def edges_of_rank(edges: object, owner: Tensor, rank: int, fail: Fail) -> Tensor:
    """Checked edges that all end at a rank's nodes, on the device of `owner`."""
    pairs = checked_edges(edges, len(owner), fail).to(owner.device)
    foreign = (owner[pairs[1]] != rank).nonzero().squeeze(1)
    if len(foreign):
        fail(
            "an edge ends at a node of another rank",
            expected=f"targets that rank {rank} owns",
            got=f"{len(foreign)} of {pairs.shape[1]} edges with other targets, e.g. {pairs[:, foreign[0]].tolist()}",
            remedy="pass each edge on the rank that owns its target",
        )
    return pairs


def edges_of_parts(edges: object, rows: Rows, hops: int, call: Call) -> GraphInput:
    """The graph from each rank's edges."""
    pairs = edges_of_rank(edges, rows.owner, rows.axis.rank, call.fail)
    first = 0
    if hops > 1:
        each = all_gather(torch.tensor([pairs.shape[1]], device=pairs.device), rows.axis)
        first = int(each[: rows.axis.rank].sum())
    return GraphInput(pairs, torch.arange(first, first + pairs.shape[1], device=pairs.device), whole=False)


class GraphPlan(Rows):
    """A partitioned graph, and the exchange of rows between its ranks. Constructing it is a collective.

    An edge belongs to the rank that owns its target. Each rank has all edges that end at its nodes, in the given order,
    and receives the rows of their source nodes on other ranks: its remote rows.

    There are three ways to pass the graph:

    * on every rank: `GraphPlan(edges, owner)`;
    * on one rank: `GraphPlan(edges, owner, root=0)` there, `GraphPlan(root=0)` on the others;
    * in parts: `GraphPlan(edges, own=own)`, with the indices of the rank's nodes and the edges that end at them. If
      every rank has `owner` too, `GraphPlan(edges, owner, own=own)` saves the exchange of the owners.

    On a device the host waits for it in the constructor, for checks and numbers of rows, some tens of times. Using the
    plan does not make it wait.

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
        fail = call.fail
        depth = hops_of(hops, fail)
        if own is not None and root is not None:
            fail(
                "own= and root= cannot be combined",
                expected="own= if every rank passes its part, or root= if one rank passes the full graph",
                got=f"own=... and root={root!r}",
                remedy="omit root if every rank passes its part, else omit own",
            )
        self._kind: Kind = "parts" if own is not None else "whole" if root is None else "root"
        self._root = -1 if root is None else call.rank(root)
        here, options = call.axis, [KINDS.index(self._kind), depth, self._root]
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
        fail = call.fail
        if call.axis.rank == self._root:
            owner = checked_owner(owner, call.axis.size, fail)
            edges = checked_edges(edges, len(owner), fail)
            owner = owner.to(edges.device)
        elif edges is not None or owner is not None:
            fail(
                "edges or owner passed on a rank that is not the root",
                expected=f"edges=None and owner=None: rank {self._root} is the root",
                got=f"edges={type(edges).__name__}, owner={type(owner).__name__}",
                remedy=f"pass GraphPlan(root={self._root}) on this rank, or omit root if every rank has the graph",
            )
        agree(call.axis, self.verb, "root and hops", options)
        device = device_of_root(call.axis, self._root, edges)
        if edges is None or owner is None:
            empty = torch.empty(0, dtype=torch.int64, device=device)
            owners = exchange([empty] * call.axis.size, call.axis)[self._root]
            found = exchange([empty] * call.axis.size, call.axis)[self._root]
        else:
            edges, owner = (x if x.device.type == device.type else x.to(device) for x in (edges, owner))
            exchange([owner] * call.axis.size, call.axis)
            owners, targets = owner, owner[edges[1]]
            order = targets.argsort(stable=True)
            listed = torch.cat((edges[:, order], order[None]))
            parts = listed.split(torch.bincount(targets, minlength=call.axis.size).tolist(), dim=1)
            found = exchange(list(parts), call.axis)[self._root]
        return GraphInput(found[:2], found[2], whole=False), owners

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
        local = local_edges(row[torch.cat(pairs, dim=1)[:, order]], which[order], (own, own))
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
        options, given = [KINDS.index(self._kind), self.hops, self._root], None
        if self._kind == "whole":
            pairs = checked_edges(edges, self.nodes, call.fail)
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
        fields = vars(self)
        return {
            **_header(self.axis.rank, self.axis.size, fields["hops"]),
            "kind": KINDS.index(fields["_kind"]),
            "root": fields["_root"],
            **_put_rows(self),
            **_put_edges(self),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the state, in hexadecimal; differs between plans and between ranks."""
        return digest(self.state())

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
        numbers = _numbers(stored, _ROWS.union(_EDGES), ("kind", "root"), call)
        rows, edges = ({name: cast("Tensor", stored[name]) for name in names} for names in (_ROWS, _EDGES))
        if (
            not _are_rows(rows, numbers["ranks"])
            or not _are_edges(edges, (len(rows["hop"]),) * 2)
            or numbers["kind"] not in range(len(KINDS))
        ):
            _refuse(stored, call)
        _check_rank(numbers, call)
        made = object.__new__(cls)
        made.__dict__ |= _take_rows(rows, call, [numbers[name] for name in ("kind", "root", "hops")])
        made.__dict__ |= {name: _plain(each) for name, each in edges.items()}
        made.hops, made._kind, made._root = numbers["hops"], KINDS[numbers["kind"]], numbers["root"]
        return made


def _full(edges: Tensor) -> GraphInput:
    return GraphInput(edges, torch.arange(edges.shape[1], device=edges.device), whole=True)


def _operand(edges: object) -> Tensor:
    """A tensor on the plan's device, for `Call`."""
    return edges if is_table(edges, 2, INDEX) else torch.empty(0)
