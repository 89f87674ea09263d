"""The mean over the ranks: a sum, scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.errors import DTypeError
from gradmesh.ops.base import LinearOp
from gradmesh.types import Type

__all__ = ["Mean"]


@dataclass(frozen=True, init=False)
class Mean(LinearOp):
    """Another op, its result divided by the number of ranks; its adjoint is that op's, divided alike.

    Attributes:
        op: the op that is scaled; axis and precision are its own.
    """

    # Dynamo of torch 2.11 would hand __init__ the fields that it does not take, by their defaults.
    axis: Axis = field(init=False)
    comm_dtype: torch.dtype | None = field(init=False)
    backward_dtype: torch.dtype | None = field(init=False)
    op: LinearOp

    def __init__(self, op: LinearOp) -> None:
        fields = {"axis": op.axis, "comm_dtype": op.comm_dtype, "backward_dtype": op.backward_dtype, "op": op}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

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

    def apply(self, x: Tensor) -> Tensor:
        """Run the op and divide its result, which is fresh and has the operand's dtype again, in place."""
        if not (x.is_floating_point() or x.is_complex()):
            self.fail(
                "the mean of integers is not an integer",
                expected="a floating-point or complex dtype",
                got=str(x.dtype),
                remedy="cast the tensor first",
                kind=DTypeError,
            )
        return self.op.apply(x).div_(self.axis.size)

    def transfer(self, x: Tensor) -> Tensor:
        """Run the op in the dtype of `x`, divided."""
        return self.op.transfer(x).div_(self.axis.size)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """That of the op."""
        return self.op.out_shape(shape)

    def claim(self, x: Tensor) -> str:
        """That of the op, as a mean."""
        return f"mean {self.op.claim(x)}"

    def batched(self) -> Mean:
        """The mean of the batched op."""
        return Mean(self.op.batched())

    @property
    def adjoint(self) -> LinearOp:
        """The op's adjoint, divided alike."""
        return Mean(self.op.adjoint)
