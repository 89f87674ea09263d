# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""What the process groups of gradmesh's own backends have in common: torch's names, and how tensors are cut up.

torch.distributed takes a Python subclass of `ProcessGroup` for the whole group. Both families of names are here:
`_allgather_base` and the like up to torch 2.12, `all_gather_single` and the like from 2.13.
"""

from __future__ import annotations

import abc
import datetime
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from gradmesh.backends.claim import Claim
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.memo import Memo

__all__ = ["REDUCTIONS", "OwnGroup", "Tensors", "averaged", "reduction"]

Tensors = list[torch.Tensor]

REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""The reductions by torch's names: each folds two tensors. AVG is divided afterwards, by `averaged`."""


def averaged(total: torch.Tensor, count: int) -> torch.Tensor:
    """A sum divided by the number of ranks, in place; whole numbers are cut off towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(count)
    return total.copy_(torch.div(total, count, rounding_mode="trunc"))


def kept_by(group: dist.ProcessGroup) -> Memo | None:
    """What is kept for a group by those who call it, to work it out once; None for groups of other backends."""
    return group.kept if isinstance(group, OwnGroup) else None


class OwnGroup(dist.ProcessGroup):
    """A process group in Python. A subclass has the collectives, under the names of torch 2.13.

    Args:
        name: the group's name, until torch gives it another.
        place: this rank's place in the group.
        count: the number of ranks.
        timeout: how long a call may wait for the other ranks.
    """

    backend: ClassVar[str]

    def __init__(self, name: str, place: int, count: int, timeout: datetime.timedelta) -> None:
        super().__init__(place, count)  # type: ignore[call-arg]
        self.place = place
        self.count = count
        self.timeout = timeout.total_seconds()
        self._name = name
        self._desc = "undefined"
        self.kept = Memo()

    # -- what torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802
        return self.backend

    def name(self) -> str:
        return self.backend

    def getRank(self) -> int:  # noqa: N802
        return self.place

    def getSize(self) -> int:  # noqa: N802
        return self.count

    rank, size = getRank, getSize

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        self.shutdown()

    # -- the calls of gradmesh itself
    #
    # They return when the result is there. Their tensors are flat, dense and on the CPU, without history, tangent, or
    # pending conjugation or sign, in sizes that fit together on this rank; outputs share no memory with inputs. Where
    # tensors are moved the dtype is any that torch stores; where they are summed, any that torch adds. With the first
    # bytes the ranks compare the call and their claims. If these differ, every rank raises the claim's refusal with
    # every rank's words, or a MismatchError where there is no claim, and the group is as good as before.

    @abc.abstractmethod
    def all_gather_flat(self, out: torch.Tensor, given: torch.Tensor, claim: Claim | None = None) -> None:
        """Write every rank's tensor, all of one size, into `out`, one after another."""

    @abc.abstractmethod
    def reduce_scatter_flat(self, out: torch.Tensor, given: torch.Tensor, claim: Claim | None = None) -> None:
        """Sum the ranks' tensors in rank order, and write this rank's equal part of the sum."""

    @abc.abstractmethod
    def all_reduce_flat(self, out: torch.Tensor, given: torch.Tensor, claim: Claim | None = None) -> None:
        """Write the sum of the ranks' tensors, in rank order: the same bits everywhere."""

    @abc.abstractmethod
    def reduce_flat(
        self, out: torch.Tensor, given: torch.Tensor, root: int, claim: Claim | None = None
    ) -> None:
        """Write the sum at the root; the other ranks' `out` is left alone."""

    @abc.abstractmethod
    def broadcast_flat(
        self, out: torch.Tensor, given: torch.Tensor, root: int, claim: Claim | None = None
    ) -> None:
        """Write the root's `given` into every rank's `out`, the root's own too; the others' `given` is not read."""

    @abc.abstractmethod
    def exchange_flat(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        claim: Claim | None = None,
    ) -> None:
        """Give `send[r]` elements to each rank r and take `receive[r]` from it, in rank order; None: equal parts."""

    @abc.abstractmethod
    def relay_flat(
        self, out: torch.Tensor, given: torch.Tensor, source: int | None, claim: Claim | None = None
    ) -> None:
        """Hand on `given`, which may be empty, to whoever takes it, and take that of one rank or of none."""

    @abc.abstractmethod
    def withdraw(self, claim: Claim | None, said: str) -> None:
        """Make the call that this rank would have claimed an error on the others, as it fails before it can make it.

        Args:
            claim: what it would have claimed.
            said: why it cannot, in words; it stands for this rank in the others' error.
        """

    # -- the forms that come down to others

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # -- the names up to torch 2.12

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_single(output, input, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def alltoall_base(self, *arguments: Any) -> dist.Work:
        return self.all_to_all_single(*arguments)

    # -- and from 2.14

    def recvAnysource(self, tensors: Tensors, tag: int) -> dist.Work:  # noqa: N802
        return self.recv_anysource(tensors, tag)

    def start_coalescing(self, device: torch.device) -> None:
        self._start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> dist.Work:
        return self._end_coalescing(device)

    # -- cutting tensors up

    def _one_per_rank(self, call: str, tensors: Tensors) -> Tensors:
        if len(tensors) != self.count:
            raise ArgumentError(
                message(
                    f"{call} needs one tensor per rank",
                    axis=self._shown(),
                    expected=f"{self.count} tensors",
                    got=f"{len(tensors)}",
                    remedy="pass a list with one tensor for every rank of the group",
                )
            )
        return tensors

    def _not_one_piece_per_rank(self, whole: torch.Tensor, piece: torch.Tensor) -> ShapeError:
        return ShapeError(
            message(
                "the large tensor is not one piece per rank",
                axis=self._shown(),
                expected=f"shape {[self.count * s for s in piece.shape[:1]] + list(piece.shape[1:])}",
                got=f"shape {list(whole.shape)} for pieces of shape {list(piece.shape)}",
                remedy="make it the group's size times the piece, along dim 0",
            )
        )

    def _split_sizes(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """The rows that go to or come from each rank; no splits means equal ones."""
        rows = tensor.shape[0] if tensor.dim() else -1
        if not splits and rows >= 0 and rows % self.count == 0:
            splits = [rows // self.count] * self.count
        if len(splits) != self.count or sum(splits) != rows:
            raise ShapeError(
                message(
                    "the splits do not cover dim 0",
                    op="all_to_all_single",
                    axis=self._shown(),
                    expected=f"{self.count} sizes whose sum is the size of dim 0",
                    got=f"{splits or 'an equal split'} for shape {list(tensor.shape)}",
                    remedy="give one size per rank; they must add up",
                )
            )
        return list(splits)

    def _shown(self) -> str:
        """The group, for error texts."""
        return f"group '{self._name}'"


_names: dict[Any, str] = {}


def reduction(opts: Any, backend: str) -> str:
    """The name of the reduction that a call's options ask for."""
    if opts is None:
        return "SUM"
    kind = opts.reduceOp.op
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = kind.name
    if name not in REDUCTIONS:
        raise ArgumentError(
            message(
                f"the {backend} backend does not know this reduction",
                expected=", ".join(REDUCTIONS),
                got=name,
                remedy="multiply the tensor first and use SUM" if name == "PREMUL_SUM" else None,
            )
        )
    return name
