"""Checks of the verbs' arguments: each returns the argument in its plain form or raises the library's own error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from gradmesh._torch import functorch_active, is_fake, only_vmap_active, transforms_active
from gradmesh.arguments.naming import dim_number, refuse_stale, with_result_names
from gradmesh.arguments.plain import integer, kind_of
from gradmesh.autograd import apply
from gradmesh.axis import Axis, AxisLike, balanced, resolve
from gradmesh.call_sites import show_site
from gradmesh.checking import check_level
from gradmesh.dims import DimLike, Names, known_names, show_names, stale
from gradmesh.dtypes import NEVER_COPIED
from gradmesh.errors import ArgumentError, DTypeError, GradmeshError, OrderError, ShapeError, message
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import Op, Precision
from gradmesh.ops.pair import Receive
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.overlap.expected import receive
from gradmesh.overlap.pending import Pending, start_op
from gradmesh.state import rank_state
from gradmesh.structure import Packed
from gradmesh.transport import compiling, group_cache
from gradmesh.transport.comm_thread import async_axis
from gradmesh.withdrawal import on_cpu, withdraw

__all__ = ["Call", "SizesLike"]

_HEADER = 16
"""Numbers that tell a shape: how many dimensions, and their sizes."""

_CUTTING = ("reduce_scatter", "shard")
"""The verbs that cut an operand which is whole on every rank."""

_AS_IT_IS = Precision(comm_dtype=None, backward_dtype=None, operand_desc=None)

T = TypeVar("T")
OpT = TypeVar("OpT", bound=Op)
SizesLike = Sequence[int] | Literal["auto", "balanced"] | None


class Call:
    """One call of a verb: its operand and its axis, and the checks of what else it was given.

    Attributes:
        verb: the verb's name.
        axis: the axis, resolved now, so that a later recomputation cannot meet another mesh.
        x: the operand.
        precision: the keyword arguments of the op that say what travels.
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
            self._use_async_axis(x, async_op)
        self.x: Tensor = x  # type: ignore[assignment]  # for what is refused here
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or x.is_quantized:
            if not isinstance(x, Packed):
                self._refuse_operand(x)
            operand_desc, x = x.operand_desc, x.flat
        if type(x) is not Tensor and hasattr(x, "to_local"):
            self._refuse_dtensor(x)
        if x.dtype in NEVER_COPIED:
            self._refuse_dtype(x)
        self.x = x
        self.names = known_names(x) if names is None else names or None
        if self.names is not None:
            if names is None and stale(x):
                refuse_stale(self.names, x, self.fail)
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
        """Run the op, or begin it.

        Args:
            op: the op.
            x: what on; None: the operand.
            then: makes what the verb returns of the op's result.
        """
        if x is None:
            x = self.x
        if self.names is not None:
            then = self.naming(then)
        if self._async:
            return start_op(op, x, then)
        y = apply(op, x)
        return y if then is None else then(y)

    def run_in_steps(self, op: Op, x: Tensor, then: Callable[[Tensor], Any]) -> Any:
        """Run the op, or begin it, where `then` calls others."""
        then = self.naming(then)
        return start_op(op, x, then, steps=True) if self._async else then(apply(op, x))

    def received(self, op: Receive, x: Tensor) -> Any:
        """Receive a message, now or when it is waited for: those of one rank in the order of the calls."""
        return receive(op, x, self.naming(), later=self._async)

    def naming(self, then: Callable[[Tensor], Any] | None = None) -> Callable[[Tensor], Any]:
        """What makes of a result what the verb returns, with the operand's names."""
        return partial(with_result_names, self.names, then)

    def _use_async_axis(self, x: object, async_op: object) -> None:
        """Take the way of calls that are begun, where there is one."""
        # A message concerns two ranks alone, who could not make a group of all.
        if self._peer is None and self.axis.size > 1 and not compiling() and on_cpu(x, self.axis):
            self.axis = async_axis(self.axis)
        self.flag(async_op, "async_op")  # type: ignore[arg-type]

    def op(self, kind: Callable[..., OpT], *fields: Hashable) -> OpT:
        """The op of these fields on this axis: one that was made before, where the group keeps it."""
        kept = group_cache(self.axis.group)
        if kept is None:
            return kind(self.axis, *fields, **self.precision)
        key = (kind, self.axis.name, self._async, fields, *self.precision.values())
        try:
            found: OpT | None = kept.get(key)
        except TypeError:  # sizes that a tracer has no number for
            return kind(self.axis, *fields, **self.precision)
        if found is None:
            found = kept[key] = kind(self.axis, *fields, **self.precision)
        return found

    def _refuse_operand(self, x: object) -> NoReturn:
        self.fail(
            "the operand is not a dense tensor",
            expected="a strided torch.Tensor",
            got=kind_of(x),
            remedy=f"call .wait() on the Pending, made {show_site(x._site)}, and pass the result"
            if isinstance(x, Pending)
            else "pass a tensor; use torch.as_tensor, to_dense() or dequantize() first",
        )

    def _refuse_dtensor(self, x: Tensor) -> NoReturn:
        self.fail(
            "the operand is a DTensor",
            expected="this rank's own tensor",
            got=f"{type(x).__name__} with placements {getattr(x, 'placements', 'unknown')}",
            remedy="pass x.to_local(grad_placements=[...]), where the placement of the gradient is Shard(dim) for "
            "a\nshard, Partial() for a replicated tensor that each rank uses differently, Replicate() for one "
            "that every\nrank uses alike or for a pending sum; DTensor.from_local(y, mesh, [...]) leads back",
        )

    def _refuse_dtype(self, x: Tensor) -> NoReturn:
        self.fail(
            "torch has a name for this dtype, and nothing that copies it",
            expected="a dtype that torch copies",
            got=str(x.dtype),
            remedy="send its bytes: x.view(torch.uint8)",
            kind=DTypeError,
        )

    def fail(
        self, problem: str, *, expected: str, got: str, remedy: str, kind: type[GradmeshError] = ArgumentError
    ) -> NoReturn:
        """Raise an error that names the verb and the axis; the other ranks hear of it."""
        axis = str(self.axis)
        error = kind(message(problem, op=self.verb, axis=axis, expected=expected, got=got, remedy=remedy))
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
                f"{name} does not fit the operand",
                expected="a complex dtype for complex tensors, a floating-point dtype for real ones",
                got=f"{name}={dtype!r} for a tensor of {x.dtype}",
                remedy=f"leave {name} out, or cast the tensor",
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
                else "a tensor of 1 dimension or more",
                got=f"{name}={dim!r} for shape {tuple(self.x.shape)}",
                remedy="count dimensions of the local tensor from 0, or from -1 at the end",
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
                remedy="count ranks along the axis, not in the world",
            )
        return whole

    def choose(self, name: str, value: object, choices: Mapping[Any, T], why: str = "") -> T:
        """One of the op's few choices, such as a type or a reduction."""
        try:
            return choices[value]
        except (KeyError, TypeError):
            self.fail(
                f"{name} is not one that {self.verb} knows",
                expected=f"{name} one of {', '.join(map(repr, choices))}",
                got=f"{name}={value!r}",
                remedy=why or f"choose {name} among these",
            )

    def sizes(self, sizes: SizesLike, dim: int, name: str = "sizes") -> Sizes:
        """Each rank's size along a dim that was checked; "auto" and "balanced" ask the ranks for the operand's own."""
        if sizes is None:
            return EQUAL
        if isinstance(sizes, str) and sizes in ("auto", "balanced"):
            found = self.exchanged_sizes(self.x.shape[dim])
            if sizes == "balanced":
                self._check_balanced(found)
            return found
        # A set has no order that the ranks could go by.
        listed = isinstance(sizes, Iterable) and not isinstance(sizes, str | Set)
        given = [integer(n) for n in sizes] if listed else []
        whole = tuple(n for n in given if n is not None and n >= 0)
        if not listed or len(given) != self.axis.size or len(whole) != len(given):
            self.fail(
                f"{name} does not have one size for each rank",
                expected=f"{self.axis.size} ints of 0 or more, or None"
                + (', or "auto" or "balanced"' if name == "sizes" else ""),
                got=f"{name}={sizes!r}",
                remedy=f"give each rank's size along dim, in rank order, such as {name}="
                f"{self._example(dim, whole=name == 'split_sizes' or self.verb in _CUTTING)}",
            )
        return Sizes(whole)

    def _example(self, dim: int, *, whole: bool) -> tuple[int, ...]:
        """Sizes that fit the operand, which is whole along dim or the shard of this rank."""
        size, ranks = self.x.shape[dim], self.axis.size
        return balanced(size, ranks) if whole else (size,) * ranks

    def _check_balanced(self, found: Sizes) -> None:
        """Refuse shards of other sizes than those of the balanced split; every rank has the same sizes here."""
        split = Sizes.balanced(found.total, self.axis.size)
        if found != split:
            self.fail(
                "the shards are not the balanced split",
                expected=f"sizes={split}, the balanced split of {found.total} over {self.axis.size} ranks",
                got=f"sizes={found}, found by asking the ranks",
                remedy=f'pass sizes="auto" or sizes={found}, or cut with gradmesh.shard, which makes that split',
                kind=ShapeError,
            )

    def whole_sizes(self, sizes: SizesLike, dim: int) -> Sizes:
        """Each rank's size of a cut along a dim in which the operand is whole on every rank."""
        if not (isinstance(sizes, str) and sizes == "balanced"):
            return self.sizes(self.not_auto(sizes), dim)
        total, ranks = self.x.shape[dim], self.axis.size
        return Sizes.balanced(total, ranks) if total % ranks else EQUAL

    def explicit_sizes(self, sizes: SizesLike, dim: int) -> Sizes:
        """The same; the own size for all ranks where nothing is said."""
        given = self.sizes(sizes, dim)
        return Sizes((self.x.shape[dim],) * self.axis.size) if given.equal else given

    def not_auto(self, sizes: SizesLike, name: str = "sizes") -> SizesLike:
        """Sizes for a verb whose operand is whole on every rank, where there is nothing to ask the others."""
        if isinstance(sizes, str):
            cuts = self.verb in _CUTTING
            self.fail(
                f"{name} cannot be found by asking the ranks for what they hold",
                expected=f"{self.axis.size} ints" + (', "balanced" or None' if cuts else " or None"),
                got=f"{name}={sizes!r}",
                remedy=f'pass {name}="balanced", or the size of each rank\'s slice; gradmesh.sizes(shard) returns '
                "those of existing shards"
                if cuts
                else "give the size of each rank's slice; gradmesh.sizes(shard) returns those of existing shards",
            )
        return sizes

    def exchanged_sizes(self, own: int) -> Sizes:
        """Every rank's own number, by one small exchange."""
        if is_fake(self.x):
            self.fail(
                "sizes cannot be exchanged without values",
                expected=f"{self.axis.size} ints for a fake or meta tensor",
                got='sizes="auto", or sizes that the root alone knows',
                remedy="pass the sizes",
            )
        # An op as any other, so that it is compared, and that a torch.func transform does not see the numbers.
        mine = torch.tensor([own], dtype=torch.int64, device=self.x.device)
        found = apply(AllGather(self.axis, 0, EQUAL, operand_desc=self.precision["operand_desc"]), mine)
        return Sizes(tuple(found.tolist()))

    def halo(self, halo: int | tuple[int, int]) -> tuple[int, int]:
        """Rows from the left and from the right."""
        pair = tuple(halo) if isinstance(halo, Sequence) else (halo, halo)
        left, right = (integer(n) for n in pair) if len(pair) == 2 else (None, None)
        if left is None or right is None or left < 0 or right < 0:
            self.fail(
                "halo is not a number of rows",
                expected="an int of 0 or more, or two of them for left and right",
                got=f"halo={halo!r}",
                remedy="pass the rows that the stencil reaches to each side",
            )
        return left, right

    def pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """(source, target) ranks, none of either twice."""
        listed = tuple(pairs) if isinstance(pairs, Iterable) else (None,)
        if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in listed):
            self.fail(
                "pairs holds something else than pairs",
                expected="(source, target) tuples",
                got=f"pairs={pairs!r}",
                remedy="give each message its source rank and its target rank",
            )
        plain = tuple((self.rank(source, "source"), self.rank(target, "target")) for source, target in listed)
        for name, ranks in (("source", [s for s, _ in plain]), ("target", [t for _, t in plain])):
            if len(set(ranks)) != len(ranks):
                self.fail(
                    f"a {name} stands in two pairs",
                    expected=f"every rank at most once as {name}",
                    got=f"pairs={pairs!r}",
                    remedy="use all_gather or all_reduce to send one tensor to many or many to one",
                )
        return plain

    def other(self, rank: int, name: str) -> int:
        """A rank of the axis that is not this one."""
        peer = self.rank(rank, name)
        if peer == self.axis.rank:
            self.fail(
                f"{name} is this rank itself",
                expected="another rank of the axis",
                got=f"{name}={rank!r}",
                remedy="use the tensor as it is",
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
                "parts is not one tensor for each rank",
                expected=f"{self.axis.size} tensors of one dtype, with at most {_HEADER - 1} dimensions",
                got=f"{len(parts)}: {', '.join(shown)}",
                remedy="give each rank a tensor, an empty one where there is nothing to send",
            )
        return parts

    def exchange_shapes(self, parts: Sequence[Tensor]) -> list[list[int]]:
        """The shapes that the ranks have for this one, for the shapes that it has for them."""
        header = [[p.dim(), *p.shape, *[0] * (_HEADER - 1 - p.dim())] for p in parts]
        sent = torch.tensor(header, device=self.x.device)
        rows = apply(AllToAll(self.axis, 0, 0, EQUAL, EQUAL), sent).tolist()
        return [row[1 : 1 + row[0]] for row in rows]

    def refuse_compiled(self, why: str, instead: str) -> None:
        """Refuse a call that a compiler cannot take."""
        if compiling():
            self.fail(
                why,
                expected="a call outside of torch.compile",
                got="a call inside of it",
                remedy=f"use {instead}, or call it uncompiled",
            )

    def refuse_forward_mode(self, instead: str) -> None:
        """Refuse a tangent that the other end would not know of."""
        if transforms_active() and not (functorch_active() and only_vmap_active()):
            self.fail(
                "a message between two ranks has no forward mode",
                expected="reverse mode",
                got="a call inside a forward-mode level or a torch.func derivative",
                remedy=f"use gradmesh.{instead}, which all ranks call",
                kind=OrderError,
            )

    def refuse_unordered(self, instead: str, *, of_all: bool = False) -> None:
        """Refuse a gradient that not all ranks would join in.

        Args:
            instead: a verb that has it.
            of_all: every rank makes the call, so that a rank that does not join is found where calls are compared.
                Async calls are compared only with each other.
        """
        asked = torch.is_grad_enabled() and self.x.requires_grad and self.axis.size > 1
        if not asked or compiling() or functorch_active():
            return
        if of_all and self.x.is_cpu and not self._async and check_level():
            return
        if rank_state().chain is None:
            self.fail(
                "a gradient is asked for that not every rank would join in",
                expected="the call inside `with gradmesh.ordered():`",
                got="a tensor that requires grad, outside of it",
                remedy=f"open gradmesh.ordered() around the step, or use {instead}",
                kind=OrderError,
            )

    def flag(self, value: bool, name: str) -> bool:
        """A bool."""
        if not isinstance(value, bool):
            self.fail(
                f"{name} is not a bool",
                expected="True or False",
                got=f"{name}={value!r}",
                remedy="pass a bool",
            )
        return value
