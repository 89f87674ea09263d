"""Argument checks of the verbs: each returns the normalised argument or raises an error of gradmesh."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, get_overloads

import torch
from torch import Tensor

from gradmesh._torch import (
    READS_NUMBERS,
    functorch_active,
    is_fake,
    only_vmap_active,
    to_list,
    transforms_active,
)
from gradmesh._util.call_sites import show_site
from gradmesh._util.dtypes import NEVER_COPIED
from gradmesh._util.structure import Packed
from gradmesh.autograd import rule
from gradmesh.autograd.pending import Pending, receive, start_op
from gradmesh.dims import RECORD, DimLike, Names, show_names, stale, with_names
from gradmesh.errors import ArgumentError, DTypeError, GradmeshError, OrderError, ShapeError
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp, Op, Precision
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.pair import Receive
from gradmesh.ops.sizes import EQUAL, Sizes, balanced
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.runtime.state import check_level, rank_state
from gradmesh.transport import compiling
from gradmesh.transport.comm_thread import async_axis
from gradmesh.transport.run import constants, exchange_device, on_cpu, withdraw
from gradmesh.types import Type

T = TypeVar("T")

Fail = Callable[..., NoReturn]
"""Raises an error of the verb: the problem, and as keyword arguments expected, got and remedy."""

RowsByRank = Mapping[int, Tensor]
"""For each receiving rank, the index of its rows."""

CountsByRank = Mapping[int, int]
"""For each sending rank, the number of rows."""


def dim_number(dim: str, name: str, names: Names | None, x: Tensor, fail: Callable[..., NoReturn]) -> int:
    """The number of the dimension that has a name, which was passed as the argument `name`."""
    given = f"{name}={dim!r} for shape {tuple(x.shape)}"
    if names is None:
        fail(
            f"{name} is a name, but the operand's dimensions have no names",
            expected=f"an int, such as {name}=0, or a tensor named with gradmesh.named",
            got=given,
            remedy='name them: x = gradmesh.named(x, "N", "C"); results of torch operators have no names, so name\n'
            "the tensor right before the call",
        )
    if dim not in names:
        fail(
            f"no dimension is named {dim!r}",
            expected=f"{name} one of {', '.join(repr(known) for known in names if known is not None)}",
            got=f"{given} with {show_names(names)}",
            remedy=f"pass one of its names, or an int such as {name}=0",
        )
    return names.index(dim)


def with_result_names(names: Names | None, then: Callable[[Tensor], Any] | None, y: Tensor) -> Any:
    """A verb's return value with the operand's dimension names."""
    made = y if then is None else then(y)
    if names is None:
        return made
    return [with_names(one, names) for one in made] if isinstance(made, list) else with_names(made, names)


def integer(value: object) -> int | None:
    """The value as an int, also of a NumPy integer or a tensor of one int; None for anything else."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def kind_of(x: object) -> str:
    """Describe an invalid operand for error messages."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"a {'nested' if x.is_nested else 'quantized' if x.is_quantized else x.layout} tensor"


def verb(*required: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The implementation of a verb, whose overloads declare the types.

    Required keyword arguments get a default of None at run time, so that the verb can raise its own error.
    """

    def declared(function: Callable[..., Any]) -> Callable[..., Any]:
        types = function.__annotations__  # those that help() shows: of all overloads together
        for name in types.keys() & {"x", "return"}:
            parts = [
                part for one in get_overloads(function) for part in one.__annotations__[name].split(" | ")
            ]
            types[name] = " | ".join(dict.fromkeys(parts))
        if required:
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(required)}
        return function

    return declared


_HEADER = 16
"""Length of an encoded shape: the number of dimensions, and their sizes."""

_CUTTING = ("reduce_scatter", "shard")
"""The verbs that split an operand that is whole on every rank."""

_AS_IT_IS = Precision(comm_dtype=None, backward_dtype=None, operand_desc=None)

OpT = TypeVar("OpT", bound=Op)
SizesLike = Sequence[int] | Literal["auto", "balanced"] | None


class Call:
    """One call of a verb: its operand, its axis, and the checks of its other arguments.

    Attributes:
        verb: the verb's name.
        axis: the axis, resolved now, so that a later recomputation uses the same mesh.
        x: the operand.
        precision: the keyword arguments of the op for the dtypes that are sent.
        names: the names of the operand's dimensions; None: it has none.
    """

    def __init__(
        self,
        verb: str,
        x: Tensor | Packed,
        axis: AxisLike,
        comm_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        *,
        async_op: object = False,
        peer: object = None,
        names: Names | None = None,
    ) -> None:
        self.verb = verb
        self._peer, self._async = peer, async_op is True
        operand_desc: str | None = None
        self.axis: Axis = resolve(axis, verb)
        if async_op is not False:
            # Point-to-point messages involve two ranks, which cannot create a group of all.
            if self._peer is None and self.axis.size > 1 and not compiling() and on_cpu(x, self.axis):
                self.axis = async_axis(self.axis)
            self.flag(async_op, "async_op")  # type: ignore[arg-type]
        self.x: Tensor = x  # type: ignore[assignment]  # used by the checks below
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or x.is_quantized:
            if not isinstance(x, Packed):
                self.fail(
                    "the operand must be a dense tensor",
                    expected="a strided torch.Tensor",
                    got=kind_of(x),
                    remedy=f"call y = pending.wait() on the Pending, created {show_site(x._site)}, and pass y"
                    if isinstance(x, Pending)
                    else "convert it first, for example with torch.as_tensor(x), x.to_dense() or x.dequantize()",
                )
            operand_desc, x = x.operand_desc, x.flat
        if type(x) is not Tensor and hasattr(x, "to_local"):
            self.fail(
                "DTensor operands are not supported",
                expected="this rank's local tensor",
                got=f"{type(x).__name__} with placements {getattr(x, 'placements', 'unknown')}",
                remedy="pass x.to_local(grad_placements=[...]) with Shard(dim) for a shard, Partial() for a\n"
                "replicated tensor that each rank uses differently, Replicate() for one that every rank uses alike or\n"
                "for a partial sum; DTensor.from_local(y, mesh, [...]) converts the result back",
            )
        if x.dtype in NEVER_COPIED:
            self.fail(
                "unsupported dtype: torch implements no copy kernel for it",
                expected="a dtype that torch can copy",
                got=str(x.dtype),
                remedy="send the bytes: x.view(torch.uint8)",
                kind=DTypeError,
            )
        self.x = x
        if names is None:
            names_of_x = getattr(x, RECORD, None)
            self.names = None if names_of_x is None else names_of_x[0]
        else:
            self.names = names or None
        if self.names is not None:
            if names is None and stale(x):
                self.fail(
                    "the tensor's shape or strides were changed in place after it was named",
                    expected=f"{show_names(self.names)} with the shape and strides that it had",
                    got=f"shape {tuple(x.shape)} and strides {x.stride()}",
                    remedy='name it again: x = gradmesh.named(x, "N", "C")',
                )
            operand_desc = show_names(self.names)
        self.precision = _AS_IT_IS
        if comm_dtype is not None or backward_dtype is not None or operand_desc is not None:
            self.precision = Precision(
                comm_dtype=comm_dtype, backward_dtype=backward_dtype, operand_desc=operand_desc
            )
            for name, dtype in (("comm_dtype", comm_dtype), ("backward_dtype", backward_dtype)):
                if dtype is not None:
                    self._precision(name, dtype)

    def run(self, op: Op, x: Tensor | None = None, then: Callable[[Tensor], Any] | None = None) -> Any:
        """Run the op, or start it with async_op=True; `then` computes the verb's return value from its result."""
        if x is None:
            x = self.x
        if self.names is not None:
            then = self.naming(then)
        if self._async:
            return start_op(op, x, then)
        y = rule.apply(op, x)
        return y if then is None else then(y)

    def run_in_steps(self, op: Op, x: Tensor, then: Callable[[Tensor], Any]) -> Any:
        """As `run`, where `then` makes further calls."""
        then = self.naming(then)
        return start_op(op, x, then, steps=True) if self._async else then(rule.apply(op, x))

    def received(self, op: Receive, x: Tensor) -> Any:
        """Receive a message, now or at `wait()`; messages of one rank arrive in order."""
        return receive(op, x, self.naming(), later=self._async)

    def naming(self, then: Callable[[Tensor], Any] | None = None) -> Callable[[Tensor], Any]:
        """A function that computes the verb's return value, with the operand's dimension names."""
        return partial(with_result_names, self.names, then)

    def op(self, kind: Callable[..., OpT], *fields: Hashable) -> OpT:
        """The op with these fields on this axis, cached per group."""
        kept = None if compiling() else getattr(self.axis.group, "kept", None)
        if kept is None:  # a group of another package keeps nothing
            return kind(self.axis, *fields, **self.precision)
        key = (kind, type(self.axis), self.axis.name, fields, *self.precision.values())
        try:
            found: OpT | None = kept.get(key)
        except TypeError:  # symbolic sizes are not hashable
            return kind(self.axis, *fields, **self.precision)
        if found is None:
            found = kept[key] = kind(self.axis, *fields, **self.precision)
        return found

    def fail(
        self, problem: str, *, expected: str, got: str, remedy: str, kind: type[GradmeshError] = ArgumentError
    ) -> NoReturn:
        """Raise an error that names the verb and the axis, and notify the other ranks."""
        axis = str(self.axis)
        error = kind.of(problem, op=self.verb, axis=axis, expected=expected, got=got, remedy=remedy)
        rank_state().started.abandon()
        withdraw(self.verb, self.axis, self.x, error, integer(self._peer))
        raise error

    def _precision(self, name: str, dtype: torch.dtype) -> None:
        x = self.x
        fits = isinstance(dtype, torch.dtype) and (
            (dtype.is_complex and x.is_complex()) or (dtype.is_floating_point and x.is_floating_point())
        )
        if not fits:
            self.fail(
                f"{name} does not match the operand's dtype",
                expected="a complex dtype for complex tensors, a floating-point dtype for real ones",
                got=f"{name}={dtype!r} for a tensor of {x.dtype}",
                remedy=f"omit {name}, or cast the tensor first",
                kind=DTypeError,
            )

    def dim(self, dim: DimLike, name: str = "dim") -> int:
        """A tensor dimension, counted from 0."""
        if isinstance(dim, str):
            return dim_number(dim, name, self.names, self.x, self.fail)
        n, whole = self.x.dim(), dim if type(dim) is int else integer(dim)
        if whole is None or not -n <= whole < n:
            self.fail(
                f"{name} is out of range",
                expected=f"an int with {-n} <= {name} < {n} for a {n}-d tensor"
                if n
                else "a tensor with at least 1 dimension",
                got=f"{name}={dim!r} for shape {tuple(self.x.shape)}",
                remedy=f"pass {name}=0 for the first or {name}=-1 for the last dimension of the local tensor",
            )
        return whole % n

    def rank(self, rank: int, name: str = "root") -> int:
        """A rank of the axis."""
        whole = integer(rank)
        if whole is None or not 0 <= whole < self.axis.size:
            self.fail(
                f"{name} is not a rank of the axis",
                expected=f"an int with 0 <= {name} < {self.axis.size}",
                got=f"{name}={rank!r}",
                remedy=f"pass a rank of this axis ({name}=0 is its first rank), not a global rank",
            )
        return whole

    def choose(
        self, name: str, value: object, choices: Mapping[Any, T], why: str | Callable[[], str] = ""
    ) -> T:
        """One of the verb's choices, such as a type or a reduction; `why` is the remedy for another value."""
        try:
            return choices[value]
        except (KeyError, TypeError):
            pass  # the error is raised below, so that a KeyError is not shown as its context
        return self.fail(
            f"{name} must be {' or '.join(map(_shown, choices))}",
            expected=f"{name} one of {', '.join(map(_shown, choices))}",
            got=f"{name}={value!r}",
            remedy=(why if isinstance(why, str) else why())
            or f"pass {name}={_shown(next(iter(choices)))}, for example",
        )

    def sizes(self, sizes: SizesLike, dim: int, name: str = "sizes") -> Sizes:
        """Each rank's size along `dim`; "auto" and "balanced" exchange the operands' sizes."""
        if sizes is None:
            return EQUAL
        if isinstance(sizes, str) and sizes in ("auto", "balanced"):
            # What is sent, or how the result lies in memory, would depend on numbers that a compiler does not know.
            if self.verb == "halo_exchange":
                self.refuse_compiled("the sizes of a halo exchange cannot be exchanged", "explicit sizes")
            elif not self.x.is_contiguous():
                self.refuse_compiled(
                    "the sizes of an operand with gaps cannot be exchanged", "x.contiguous()"
                )
            found = self.exchanged_sizes(self.x.shape[dim])
            if sizes == "balanced":
                split = Sizes.balanced(found.total, self.axis.size)
                if found != split:
                    self.fail(
                        "the shards are not a balanced split",
                        expected=f"sizes={split}, the balanced split of {found.total} over {self.axis.size} ranks",
                        got=f"sizes={found}",
                        remedy=f'pass sizes="auto" or sizes={found}, or split with gradmesh.shard, which is balanced',
                        kind=ShapeError,
                    )
            return found
        # A set has no order.
        listed = isinstance(sizes, Iterable) and not isinstance(sizes, (str, Set))
        given = [integer(n) for n in sizes] if listed else []
        whole = tuple(n for n in given if n is not None and n >= 0)
        if not listed or len(given) != self.axis.size or len(whole) != len(given):
            self.fail(
                f"{name} must have one size for each rank",
                expected=f"{self.axis.size} ints of 0 or more, or None"
                + (', or "auto" or "balanced"' if name == "sizes" else ""),
                got=f"{name}={sizes!r}",
                remedy=f"pass each rank's size along dim, in rank order, such as {name}="
                f"{self._example(dim, whole=name == 'split_sizes' or self.verb in _CUTTING)}",
            )
        return Sizes(whole)

    def _example(self, dim: int, *, whole: bool) -> tuple[int, ...]:
        """Valid sizes for the operand, which is whole along `dim` or this rank's shard."""
        size, ranks = self.x.shape[dim], self.axis.size
        return balanced(size, ranks) if whole else (size,) * ranks

    def whole_sizes(self, sizes: SizesLike, dim: int, name: str = "sizes") -> Sizes:
        """Each rank's slice of an operand that is whole along `dim` on every rank."""
        if not (isinstance(sizes, str) and sizes == "balanced"):
            return self.sizes(self.not_auto(sizes, dim, name), dim, name)
        total, ranks = self.x.shape[dim], self.axis.size
        return Sizes.balanced(total, ranks) if total % ranks else EQUAL

    def concat_sizes(self, sizes: SizesLike, split: int, dim: int) -> Sizes:
        """The sizes of the parts that an all-to-all joins; each rank has one of them if the dims differ."""
        if isinstance(sizes, str) and split == dim:
            self.fail(
                "concat_sizes are not exchanged where split_dim and concat_dim are one",
                expected=f"{self.axis.size} ints or None",
                got=f"concat_sizes={sizes!r}",
                remedy="pass the size of the part from each rank: what that rank passes for this one in split_sizes",
            )
        return self.sizes(sizes, dim, "concat_sizes")

    def explicit_sizes(self, sizes: SizesLike, dim: int) -> Sizes:
        """As `sizes`; None: this rank's size for all ranks."""
        given = self.sizes(sizes, dim)
        return Sizes((self.x.shape[dim],) * self.axis.size) if given.equal else given

    def not_auto(self, sizes: SizesLike, dim: int, name: str = "sizes") -> SizesLike:
        """Sizes for a verb whose operand is whole on every rank, so that "auto" has no meaning."""
        if isinstance(sizes, str):
            cuts = self.verb in _CUTTING or name == "split_sizes"
            example = f"the size of each rank's slice, such as {name}={self._example(dim, whole=True)}"
            self.fail(
                f"{self.verb} does not support {name}={sizes!r}, because every rank holds the whole operand",
                expected=f"{self.axis.size} ints" + (', "balanced" or None' if cuts else " or None"),
                got=f"{name}={sizes!r}",
                remedy=f'pass {name}="balanced", or {example}' if cuts else f"pass {example}",
            )
        return sizes

    def exchanged_sizes(self, own: int) -> Sizes:
        """Every rank's number, by one small all-gather."""
        if is_fake(self.x):
            self.fail(
                "sizes cannot be exchanged for a fake or meta tensor",
                expected=f"explicit sizes: {self.axis.size} ints",
                got='sizes="auto", or a scatter without sizes',
                remedy=f"pass each rank's size in rank order, such as sizes={(own,) * self.axis.size}",
            )
        if not READS_NUMBERS:
            self.refuse_compiled(
                "sizes cannot be exchanged in a program compiled before torch 2.11", "explicit sizes"
            )
        # A regular op, so that it is checked and torch.func transforms do not see the numbers.
        mine = constants([own], exchange_device(self.axis, self.x), torch.int64)
        found = rule.apply(AllGather(self.axis, 0, EQUAL, operand_desc=self.precision["operand_desc"]), mine)
        each = to_list(found)
        each[self.axis.rank] = own  # which a compiler knows, where it does not know the others' numbers
        return Sizes(tuple(each))

    def halo(self, halo: int | tuple[int, int]) -> tuple[int, int]:
        """Rows from the left and from the right."""
        pair = tuple(halo) if isinstance(halo, Sequence) else (halo, halo)
        left, right = (integer(n) for n in pair) if len(pair) == 2 else (None, None)
        if left is None or right is None or left < 0 or right < 0:
            self.fail(
                "halo must be one int or a pair of ints",
                expected="an int of 0 or more, or (left, right)",
                got=f"halo={halo!r}",
                remedy="pass the number of rows that the stencil reads on each side, such as halo=1 or halo=(2, 0)",
            )
        return left, right

    def pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """(source, target) ranks; no source and no target twice."""
        listed = tuple(pairs) if isinstance(pairs, Iterable) else (None,)
        if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in listed):
            self.fail(
                "pairs must be a list of (source, target) pairs",
                expected="(source, target) tuples of ranks",
                got=f"pairs={pairs!r}",
                remedy="pass a source rank and a target rank for each message, such as pairs=[(0, 1), (1, 0)]",
            )
        plain = tuple((self.rank(source, "source"), self.rank(target, "target")) for source, target in listed)
        for name, ranks in (("source", [s for s, _ in plain]), ("target", [t for _, t in plain])):
            if len(set(ranks)) != len(ranks):
                self.fail(
                    f"two pairs have the same {name}",
                    expected=f"every rank at most once as {name}",
                    got=f"pairs={pairs!r}",
                    remedy="to send one tensor to several ranks use gm.broadcast or gm.all_gather; to combine several "
                    "tensors on one rank use gm.reduce or gm.gather",
                )
        return plain

    def other(self, rank: int, name: str) -> int:
        """A rank of the axis that is not this one."""
        peer = self.rank(rank, name)
        if peer == self.axis.rank:
            self.fail(
                f"{name} is the calling rank",
                expected="another rank of the axis",
                got=f"{name}={rank!r}",
                remedy="use the tensor directly; send() and recv() connect two different ranks",
            )
        return peer

    def one_for_each(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors of one dtype and device, one for each rank."""
        alike = all(
            isinstance(p, Tensor) and (p.dtype, p.device) == (self.x.dtype, self.x.device) for p in parts
        )
        if len(parts) != self.axis.size or not alike or any(p.dim() >= _HEADER for p in parts):
            shown = [f"{p.dtype}{list(p.shape)}" if isinstance(p, Tensor) else repr(p) for p in parts]
            self.fail(
                "parts must have one tensor for each rank",
                expected=f"{self.axis.size} tensors of one dtype, with at most {_HEADER - 1} dimensions",
                got=f"{len(parts)}: {', '.join(shown)}",
                remedy="pass one tensor per rank, and x.new_empty(0) where there is nothing to send",
            )
        return parts

    def exchange_shapes(self, parts: Sequence[Tensor]) -> list[list[int]]:
        """Send each rank the shape of its part; returns the shapes of the parts to receive."""
        header = [[p.dim(), *p.shape, *[0] * (_HEADER - 1 - p.dim())] for p in parts]
        sent = constants(header, exchange_device(self.axis, self.x), torch.int64)
        rows = to_list(rule.apply(AllToAll(self.axis, 0, 0, EQUAL, EQUAL), sent))
        return [row[1 : 1 + row[0]] for row in rows]

    def refuse_compiled(self, why: str, instead: str) -> None:
        """Raise for a call that torch.compile does not support."""
        if compiling():
            self.fail(
                why,
                expected="a call outside of torch.compile",
                got="a call inside it",
                remedy=f"use {instead}, or call the verb outside of the compiled function",
            )

    def refuse_forward_mode(self, instead: str) -> None:
        """Raise in forward mode, where the other end would not receive the tangent."""
        if transforms_active() and not (functorch_active() and only_vmap_active()):
            self.fail(
                f"{self.verb} does not support forward mode or torch.func derivatives",
                expected="reverse-mode autograd",
                got="a call inside a forward-mode level or a torch.func derivative",
                remedy=f"use gradmesh.{instead}, which every rank of the axis calls",
                kind=OrderError,
            )

    def refuse_unordered(self, instead: str, *, of_all: bool = False) -> None:
        """Raise where the backward might not run on every rank.

        In a call `of_all` ranks, the call checks find a rank that skips its backward, if it is not async: async calls
        are compared only with each other.
        """
        asked = torch.is_grad_enabled() and self.x.requires_grad and self.axis.size > 1
        if not asked or compiling() or functorch_active():
            return
        if of_all and self.x.is_cpu and not self._async and check_level():
            return
        if rank_state().of_thread.chain is None:
            self.fail(
                f"the backward of {self.verb} might not run on every rank",
                expected="the call inside `with gradmesh.ordered():`",
                got="an operand that requires grad, outside of it",
                remedy=f"wrap the step in `with gradmesh.ordered():`, or use gradmesh.{instead}",
                kind=OrderError,
            )

    def flag(self, value: bool, name: str) -> bool:
        """A bool."""
        if not isinstance(value, bool):
            self.fail(
                f"{name} must be a bool",
                expected="True or False",
                got=f"{name}={value!r}",
                remedy=f"pass {name}=True or {name}=False",
            )
        return value


def _shown(value: object) -> str:
    return f"gm.{value}" if isinstance(value, Type) else repr(value)


def neighbors(
    x: Tensor, axis: Axis, dim: int, rows: RowsByRank, amounts: CountsByRank, fail: Fail, **precision: Any
) -> NeighborAllToAll:
    """The op for the index of the rows for each rank, and the number of rows from each rank."""
    if not isinstance(rows, Mapping) or not isinstance(amounts, Mapping):
        fail(
            "send_rows and receive_counts must be dicts with ranks as keys",
            expected="send_rows={rank: index} and receive_counts={rank: number}",
            got=f"send_rows={type(rows).__name__}, receive_counts={type(amounts).__name__}",
            remedy="pass for example send_rows={1: torch.tensor([0, 2])}, receive_counts={1: 3}",
        )
    rows = _by_rank(axis.size, "send_rows", rows, fail)
    amounts = _by_rank(axis.size, "receive_counts", amounts, fail)
    wrong = {rank: n for rank, n in amounts.items() if isinstance(n, bool) or not isinstance(n, int) or n < 0}
    if wrong:
        fail(
            "the values of receive_counts must be ints of 0 or more",
            expected="ints of 0 or more",
            got=f"receive_counts={wrong!r}",
            remedy="pass the number of rows that each rank sends to this one, for example receive_counts={1: 3}",
        )
    nothing = torch.empty(0, dtype=torch.int64, device=x.device)
    every = [_index(rank, rows[rank], x, dim, fail) if rank in rows else nothing for rank in range(axis.size)]
    sent = Sizes(tuple(index.shape[0] for index in every))
    received = Sizes(tuple(amounts.get(rank, 0) for rank in range(axis.size)))
    return NeighborAllToAll(axis, dim, Picked(torch.cat(every), sent, received, x.shape[dim]), **precision)


def _by_rank(size: int, name: str, params: Mapping[Any, T], fail: Fail) -> dict[int, T]:
    """The same dict with plain ints as keys."""
    found: dict[int, T] = {}
    for key, value in params.items():
        rank = operator.index(key) if hasattr(key, "__index__") and not isinstance(key, bool) else -1
        if rank not in range(size) or rank in found:
            fail(
                f"the keys of {name} must be ranks of the axis, each once",
                expected=f"ints with 0 <= rank < {size}",
                got=f"keys {', '.join(map(repr, params))}",
                remedy="use ranks of this axis, not global ranks",
            )
        found[rank] = value
    return found


def _index(rank: int, index: object, x: Tensor, dim: int, fail: Fail) -> Tensor:
    """Check an index into a dim of `x`; its values only on the CPU, to avoid a device synchronisation."""
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        got = f"{index.dtype}{list(index.shape)}" if isinstance(index, Tensor) else repr(index)
        fail(
            "the values of send_rows must be 1-d index tensors",
            expected="1-d tensors of int64 or int32",
            got=f"send_rows[{rank}]={got}",
            remedy="use torch.tensor([0, 2]), or mask.nonzero().squeeze(1) for a bool mask",
        )
    if index.device != x.device:
        fail(
            "the index and the rows are on different devices",
            expected=f"an index on {x.device}",
            got=f"send_rows[{rank}] on {index.device}",
            remedy="move the index to the tensor's device once, and keep it",
        )
    if index.is_cpu and index.numel() and not compiling() and not is_fake(index):
        first, last = int(index.min()), int(index.max())
        if first < 0 or last >= x.shape[dim]:
            fail(
                "an index in send_rows is out of range",
                expected=f"0 <= row < {x.shape[dim]}",
                got=f"send_rows[{rank}] with values from {first} to {last}",
                remedy="use row numbers of this rank's local tensor, not of the global one",
            )
    return index.long()


def apply(op: LinearOp, x: Tensor) -> Tensor:
    """Run a collective of your own on this rank's tensor, with its derivatives of every order.

    Every rank of the op's axis calls it. The ranks compare the call as they compare those of the verbs.

    Args:
        op: an object of a subclass of `gradmesh.ops.base.LinearOp`.
        x: the operand.

    Raises:
        ArgumentError: `op` is not a LinearOp, or `x` is not a dense tensor.
        MismatchError: the ranks' calls differ.

    Example:
        >>> from gradmesh.ops.permute import Shift
        >>> def on_each_rank():
        ...     return gm.apply(Shift(gm.axis(), offset=1), torch.tensor([1.0 + gm.rank()]))
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [tensor([2.]), tensor([1.])]
    """
    if not isinstance(op, LinearOp):
        raise ArgumentError.of(
            "the op is not a LinearOp",
            op="apply",
            expected="an object of a subclass of gradmesh.ops.base.LinearOp",
            got=f"{type(op).__name__}",
            remedy="pass the op first, made with its axis: gradmesh.apply(MyOp(gradmesh.axis()), x)",
        )
    call = Call(op.verb, x, op.axis)
    result: Tensor = call.run(op, call.x)
    return result
