"""The transport of an axis of one rank: nothing is sent, and every primitive is a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradmesh.transport.base import Transport

__all__ = ["LocalTransport", "TracedLocalTransport"]


class LocalTransport(Transport):
    """An axis of one rank."""

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],  # noqa: ARG002 - there is one part, and it comes back
        receive: Sequence[int],  # noqa: ARG002
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """A copy."""
        return self.filled(flat, shape)

    def gather(
        self,
        flat: Tensor,
        counts: Sequence[int],  # noqa: ARG002
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """A copy."""
        return self.filled(flat, shape)

    def sum_and_scatter(
        self,
        flat: Tensor,
        counts: Sequence[int],  # noqa: ARG002
        shape: Sequence[int],
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """A copy."""
        return self.filled(flat, shape)

    def sum(self, x: Tensor) -> Tensor:
        """A copy."""
        return self.copy(x)

    def fold(self, x: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor:
        """The fold of one tensor."""
        return fold(self.copy(x).unsqueeze(0))

    def copy_from(self, x: Tensor, root: int) -> Tensor:  # noqa: ARG002
        """A copy."""
        return self.copy(x)


class TracedLocalTransport(LocalTransport):
    """The same inside a compiled program, where the compiler manages memory."""

    def room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Uninitialised memory, not recycled."""
        return like.new_empty(shape)

    def copy(self, x: Tensor) -> Tensor:
        """A clone."""
        return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
