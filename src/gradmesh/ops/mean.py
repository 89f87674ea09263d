"""The mean over the ranks: a sum, scaled."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh.errors import DTypeError
from gradmesh.ops.all_gather import AllGather, ReduceScatter, parts, wholes
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.base import LinearOp
from gradmesh.ops.row import Example, Examples, Row, on_axis
from gradmesh.ops.transport import Axis, Transport
from gradmesh.types import Type


@dataclass(frozen=True, init=False)
class Mean(LinearOp):
    """An op whose result is divided by the number of ranks, and so is that of its adjoint."""

    # Dynamo of torch 2.11 would pass the default of each field to __init__, so these have init=False.
    axis: Any = field(init=False)
    comm_dtype: torch.dtype | None = field(init=False)
    backward_dtype: torch.dtype | None = field(init=False)
    operand_desc: str | None = field(init=False)
    op: LinearOp  # the op that is scaled

    def __init__(self, op: LinearOp) -> None:
        for name in ("axis", "comm_dtype", "backward_dtype", "operand_desc"):
            object.__setattr__(self, name, getattr(op, name))
        object.__setattr__(self, "op", op)

    @property
    def identity(self) -> tuple[Hashable, ...]:
        """That of the op."""
        inner = self.op.identity
        return (Mean, *inner) if inner and type(self) is Mean else ()

    @property
    def verb(self) -> str:  # type: ignore[override]
        """The verb of the op."""
        return self.op.verb

    @property
    def src(self) -> Type:  # type: ignore[override]
        """The type of the op's operand."""
        return self.op.src

    @property
    def dst(self) -> Type:  # type: ignore[override]
        """The type of the op's result."""
        return self.op.dst

    @property
    def sends(self) -> bool:  # type: ignore[override]
        """As the op."""
        return self.op.sends

    def accepts(self, dtype: torch.dtype) -> None:
        """Raise for integers too."""
        self.op.accepts(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            self.fail(
                "integer tensors have no mean",
                expected="a floating-point or complex dtype",
                got=str(dtype),
                remedy="cast the tensor first, for example x.to(torch.float32)",
                kind=DTypeError,
            )

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Run the op and divide."""
        return self.op.transfer(x, wire).div_(self.axis.size)

    def in_comm_dtype(self, x: Tensor, wire: Transport) -> Tensor:
        """Divide in the operand's dtype, which is more exact than the dtype that is sent."""
        return self.op.in_comm_dtype(x, wire).div_(self.axis.size)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """That of the op."""
        return self.op.out_shape(shape)

    @property
    def public(self) -> bool:  # type: ignore[override]
        """Whether a verb has op="mean"."""
        return self.op.sums

    @property
    def rank_local_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the op."""
        return self.op.rank_local_fields

    def params(self) -> dict[str, object]:
        """The verb's arguments, with op="mean"."""
        return {**self.op.params(), "op": "mean"}

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """As the op."""
        return self.op.symmetric

    def rank_local_desc(self) -> str:
        """Those of the op."""
        return self.op.rank_local_desc()

    def ragged_dims(self) -> tuple[int, ...]:
        """As the op."""
        return self.op.ragged_dims()

    def batched(self) -> Mean:
        """The mean of the batched op."""
        return Mean(self.op.batched())

    @property
    def adjoint(self) -> LinearOp:
        """The op's adjoint, divided too."""
        return Mean(self.op.adjoint)


def _mean(examples: Examples) -> Examples:
    def of(axis: Axis) -> list[Example]:
        return [(Mean(op), shape) for op, shape in examples(axis)]

    return of


ROWS = (
    Row("all_reduce(op='mean', dst=R)", "mean", _mean(on_axis(AllReduce))),
    Row("all_reduce(op='mean', dst=I)", "mean", _mean(on_axis(AllReduceInvariant))),
    Row("reduce_scatter(op='mean')", "mean, keep own slice", _mean(wholes(ReduceScatter))),
    Row("replicate / W", "identity, divided by W", _mean(on_axis(Replicate)), public=False),
    Row("all_gather(dst=R) / W", "concatenate, divided by W", _mean(parts(AllGather)), public=False),
)
