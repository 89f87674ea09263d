"""Ops: linear maps over the ranks of an axis, as frozen values.

A collective A of the library is linear, and its `adjoint` A* is again an op of the library, with

    <A x, y> = <x, A* y>        for all admissible x and y

where the pairing sums over the ranks, or counts once for an invariant operand (`gradmesh.types`). This gives reverse
mode (apply the adjoint to the cotangent), forward mode (apply the op to the tangent) and every higher order
(`op.adjoint.adjoint == op`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, Self, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gradmesh._util.caches import BoundedCache
from gradmesh._util.dtypes import BITS, NEVER_COPIED
from gradmesh.errors import DTypeError, GradmeshError, ShapeError
from gradmesh.ops.transport import Transport
from gradmesh.types import Type

T = TypeVar("T")
PLAIN = Tensor, Parameter  # the classes of operands that are not a tracer's
_NEVER_ADDED = frozenset({torch.uint16, torch.uint32, torch.uint64, torch.complex32, *NEVER_COPIED, *BITS})
"""Dtypes without arithmetic in torch, besides one-byte floating-point dtypes."""

_ADDED = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32})
"""The usual dtypes, all of which torch adds."""


def refuse_unless_added(dtype: torch.dtype, fail: Callable[..., NoReturn]) -> None:
    """Raise for a dtype without arithmetic in torch."""
    if dtype in _NEVER_ADDED or (dtype.is_floating_point and dtype.itemsize < 2):
        fail(
            "unsupported dtype: torch implements no addition for it",
            expected="a dtype that torch adds on every device",
            got=str(dtype),
            remedy="cast to a wider dtype first, for example x.to(torch.float32)",
            kind=DTypeError,
        )


class Precision(TypedDict):
    """The dtypes that are sent, and a description, as keyword arguments of an op."""

    comm_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    operand_desc: str | None


@cache
def _plain_values(kind: type[Op]) -> Callable[[Op], tuple[Hashable, ...]] | None:
    """Reads the fields of an op but its axis; None for a class of a program, whose fields may be anything."""
    names = [each.name for each in fields(kind) if each.name != "axis"]
    return attrgetter(*names) if kind.__module__.startswith("gradmesh.ops.") else None


@dataclass(frozen=True)
class Op(abc.ABC):
    """A map over the ranks of an axis, as a frozen value.

    A subclass defines `transfer` and `out_shape`; `batched` if it has a dimension; `ragged_dims` if sizes may differ
    between ranks; and the class attributes below where they are not as here.

    Attributes:
        axis: the ranks it runs over, an `Axis`; captured when the verb is called. To run, it needs a process group.
        comm_dtype: the dtype that is sent; the result has the operand's dtype. None: the operand's dtype.
        backward_dtype: the dtype that the adjoint sends.
        operand_desc: description of an operand that packs several tensors, which the ranks compare.
    """

    axis: Any
    comm_dtype: torch.dtype | None = field(default=None, kw_only=True)
    backward_dtype: torch.dtype | None = field(default=None, kw_only=True)
    operand_desc: str | None = field(default=None, kw_only=True)

    verb: ClassVar[str]
    """The public function it belongs to, for error texts."""
    sums: ClassVar[bool] = False
    """Whether it adds values of different ranks, which is undefined for bool."""
    sends: ClassVar[bool] = True
    """Whether it communicates, so that the ranks' calls have to match."""
    rank_local_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that may differ from rank to rank."""
    chosen: ClassVar[tuple[str, ...]] = ()
    """Which of "src" and "dst" the caller of the verb chooses, for error texts."""
    public: ClassVar[bool] = True
    """Whether it is the forward of a verb, not only the backward of one."""
    symmetric: ClassVar[bool] = False
    """Whether it is one collective with the same arguments on every rank, as functional collectives require."""
    rooted: ClassVar[bool] = False
    """Whether only one rank's operand counts, so that the others could skip the backward collective."""

    runner: ClassVar[Callable[[Any, Tensor], Tensor]]
    """Runs an op on this rank's tensor, over the transport of its axis; set by `gradmesh.transport.run`."""
    memo_of: ClassVar[Callable[[Any], BoundedCache]]
    """The `memo` of an op; set there too."""

    # -- abstract methods

    @abc.abstractmethod
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Run the op in the dtype of `x`.

        Args:
            x: this rank's plain tensor, of any strides. It is only read.
            wire: the transport of this call.

        Returns:
            Fresh memory, also where the op is the identity.
        """

    @abc.abstractmethod
    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's result shape for an operand shape; raises for an invalid shape, before anything is sent."""

    def batched(self) -> Op:
        """The same op on tensors with one more dimension in front, for vmap."""
        return self

    def ragged_dims(self) -> tuple[int, ...]:
        """The operand's dimensions whose sizes may differ from rank to rank."""
        return ()

    def accepts(self, dtype: torch.dtype) -> None:
        """Raise for a dtype that the op is not defined for."""
        if not self.sums or dtype in _ADDED:
            return
        if dtype is torch.bool:
            self.fail(
                "bool tensors cannot be summed",
                expected="a numeric dtype",
                got="torch.bool",
                remedy='cast to count, x.to(torch.int64), or use gm.all_reduce(x, op="max", dst=gm.R) for any and '
                'op="min" for all',
                kind=DTypeError,
            )
        refuse_unless_added(dtype, self.fail)

    # -- derived

    def apply(self, x: Tensor) -> Tensor:
        """Run the op on this rank's plain tensor. The result is fresh memory in the memory format of `x`."""
        return Op.runner(self, x)

    def in_comm_dtype(self, x: Tensor, wire: Transport) -> Tensor:
        """Run the op in the dtype that is sent, where it is not that of `x`."""
        assert self.comm_dtype is not None
        return self.transfer(x.to(self.comm_dtype), wire).to(x.dtype)

    @cached_property
    def memo(self) -> BoundedCache:
        """What is known of its calls: results of `once` by shape, signatures by operand, dtypes that it accepts.

        Calls look here before they call `once`. Where the group keeps no ops, nothing in it may refer to the op: it is
        freed with its call, and equal ones share what is known.
        """
        return Op.memo_of(self)

    @property
    def identity(self) -> tuple[Hashable, ...]:
        """The op without its axis, for caches that must not keep the group alive; empty: it is in none."""
        values = _plain_values(type(self))
        return () if values is None else (type(self), self.axis.name, *values(self))

    def once(self, x: Tensor, work: Callable[[Sequence[int]], T]) -> T:
        """Compute for a shape; kept for operands that are plain, as those of tracers may have symbolic sizes."""
        found = work(x.shape)
        if type(x) in PLAIN:
            self.memo[x.shape] = found
        return found

    @property
    def sends_back(self) -> bool:
        """Whether the backward of a call communicates."""
        return False

    def describe(self, x: Tensor) -> str:
        """The part of the call's description that has to be the same on every rank."""
        sizes = ["*" if dim in self.ragged_dims() else str(size) for dim, size in enumerate(x.shape)]
        said = f"{self.called} of {str(x.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
        return said if self.operand_desc is None else f"{said}, made of {self.operand_desc}"

    def rank_local_desc(self) -> str:
        """The arguments that may legitimately differ between ranks, as text."""
        named = [f"{name}={getattr(self, name)}" for name in self.rank_local_fields]
        return f" with {', '.join(named)}" if named else ""

    @property
    def called(self) -> str:
        """The call of the verb that creates this op, as a user writes it; different for different ops."""
        params = sorted((name, value) for name, value in self.params().items() if value is not None)
        return f"{self.verb}({', '.join(f'{name}={_shown(value)}' for name, value in params)})"

    def params(self) -> dict[str, object]:
        """The verb's arguments that are the same on every rank, by name."""
        names = [field_.name for field_ in fields(self)]
        return {
            name: getattr(self, name)
            for name in names
            if name not in ("axis", "operand_desc", *self.rank_local_fields)
        }

    def fail(
        self, problem: str, *, expected: str, got: str, remedy: str, kind: type[GradmeshError] = ShapeError
    ) -> NoReturn:
        """Raise an error that names the op and the axis."""
        raise kind.of(problem, op=self.verb, axis=str(self.axis), expected=expected, got=got, remedy=remedy)


class LinearOp(Op):
    """A linear collective. Subclasses implement Op's abstract methods, `src`, `dst` and `adjoint`."""

    src: ClassVar[Type]
    """The type of the operand."""
    dst: ClassVar[Type]
    """The type of the result."""

    @property
    def called(self) -> str:
        """The call of the verb that creates this op, or whose backward it is."""
        if self.public or not self.adjoint.public:
            return super().called
        return f"backward of {self.adjoint.called}"

    def params(self) -> dict[str, object]:
        """The verb's arguments, including the types that the caller chooses."""
        return {**super().params(), **{name: getattr(self, name) for name in self.chosen}}

    @property
    @abc.abstractmethod
    def adjoint(self) -> LinearOp:
        """The op A* with <A x, y> = <x, A* y>, with comm_dtype and backward_dtype swapped."""

    @cached_property
    def back(self) -> LinearOp:
        """The adjoint, cached."""
        return self.adjoint

    @property
    def sends_back(self) -> bool:
        """Whether the adjoint sends."""
        return self.back.sends

    def batched(self) -> LinearOp:
        """The same op on tensors with one more dimension in front, for vmap."""
        return self

    @property
    def swapped(self) -> Precision:
        """The precision of the adjoint."""
        return Precision(
            comm_dtype=self.backward_dtype, backward_dtype=self.comm_dtype, operand_desc=self.operand_desc
        )


class SameShape(LinearOp):
    """An elementwise op, so that several operands can be packed into one."""

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The operand's shape."""
        return tuple(shape)


@dataclass(frozen=True)
class Along(LinearOp):
    """An op on parts of the ranks along one tensor dimension."""

    dim: int  # the tensor dimension, counted from 0

    def batched(self) -> Self:
        """The same op one dimension further back."""
        return replace(self, dim=self.dim + 1)

    def ragged_dims(self) -> tuple[int, ...]:
        """`dim`, as the ranks' sizes may differ along it."""
        return (self.dim,)


def _shown(value: object) -> str:
    return f"gm.{value}" if isinstance(value, Type) else repr(value) if isinstance(value, str) else str(value)


def shifted(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with `size` along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])
