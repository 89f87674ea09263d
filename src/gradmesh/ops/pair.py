"""Point-to-point messages: send, and its adjoint receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, MismatchError
from gradmesh.ops.base import LinearOp
from gradmesh.ops.transport import Transport
from gradmesh.types import V


@dataclass(frozen=True)
class _Pair(LinearOp):
    """One end of a message."""

    peer: int  # the rank at the other end
    shape: tuple[int, ...]  # the shape of the message

    src, dst = V, V
    # Not compared with the other ranks of the axis; the two ends compare `greeting`.
    sends = False

    def batched(self) -> LinearOp:
        """Raise: the other end would have to be batched too."""
        self.fail(
            "send() and recv() do not support torch.func.vmap",
            expected="a call outside of torch.func.vmap",
            got="a call inside it",
            remedy="use gradmesh.permute(x, pairs=[(0, 1)]), which every rank of the axis calls",
            kind=ArgumentError,
        )

    def greeting(self, x: Tensor) -> str:
        """Description of the message; it has to be the same on both ends."""
        said = f"{str(x.dtype).removeprefix('torch.')}{list(self.shape)}"
        return said if self.operand_desc is None else f"{said}, made of {self.operand_desc}"


class Send(_Pair):
    """V -> V: send a tensor to one rank; the result is an empty tensor, through which the gradient returns."""

    verb = "send"

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Send the message without waiting for the other end."""
        if tuple(x.shape) != self.shape:
            self.fail(
                "the message has another shape than the receiver expects",
                expected=f"shape {self.shape}",
                got=f"shape {tuple(x.shape)}",
                remedy=f"send a tensor of shape {self.shape}, or receive into one of shape {tuple(x.shape)}",
            )
        wire.post(x, self.peer, self.greeting(x))
        return x.new_empty(0)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002 - one shape alone is possible
        """The shape of an empty tensor."""
        return (0,)

    @property
    def adjoint(self) -> LinearOp:
        """Receive the gradient."""
        return Receive(self.axis, self.peer, self.shape, **self.swapped)


class Receive(_Pair):
    """V -> V: a tensor from one rank, in place of an empty one."""

    verb = "recv"

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Wait for the message."""
        out = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        heard = wire.fetch(out, self.peer, self.greeting(x))
        if heard is not None:
            self.fail(
                "received a message with another shape or dtype than expected",
                expected=f"{self.greeting(x)} from rank {self.peer}",
                got=heard,
                remedy="call send and recv in the same order on both ranks, with the same shape and dtype",
                kind=MismatchError,
            )
        return out

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002 - one shape alone is possible
        """The message's shape."""
        return self.shape

    @property
    def adjoint(self) -> LinearOp:
        """Send the gradient."""
        return Send(self.axis, self.peer, self.shape, **self.swapped)
