# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""What a process group of gradmesh's own backends owes: to torch.distributed, and to gradmesh's data path.

torch.distributed takes a Python subclass of `ProcessGroup` for the whole group.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from gradmesh._torch import compiling
from gradmesh.backends.call_check import CallCheck
from gradmesh.backends.torch_names import Tensors, TorchNames
from gradmesh.backends.works import OwnWork
from gradmesh.bounded_cache import BoundedCache
from gradmesh.errors import ArgumentError, ShapeError, message

__all__ = ["OwnGroup", "Tensors", "group_cache"]


def group_cache(group: dist.ProcessGroup) -> BoundedCache | None:
    """What callers of a group have worked out for it, to do so once.

    None for groups of other backends, and in a program that is being compiled, which sees nothing of a group.
    """
    return group.kept if not compiling() and isinstance(group, OwnGroup) else None


class OwnGroup(TorchNames):
    """A process group in Python: what its subclasses share, and what each of them has to bring.

    A subclass owes the calls below, under the names of torch 2.13; the other names of torch come down to these. Each
    call is begun when it is made and returns a work, which is waited for, asked, or left. `opts` are torch's options of
    the call: `rootRank`, `reduceOp`, and `asyncOp`, whether the caller will wait later. Ranks are ranks of the group.
    All ranks make the same calls in one order; where they do not, each gets an error.
    """

    # -- owed to torch by a subclass: sums

    @abc.abstractmethod
    def allreduce(self, tensors: Tensors, opts: Any = None) -> OwnWork:
        """Reduce each tensor over the ranks, in place, in rank order: the same bits everywhere."""

    @abc.abstractmethod
    def reduce(self, tensors: Tensors, opts: Any) -> OwnWork:
        """Reduce the tensor over the ranks, in place at the root; the other ranks' stay as they are."""

    @abc.abstractmethod
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> OwnWork:
        """Reduce `inputs[i][rank]` onto `outputs[i]` of that rank; the ranks' sizes may differ."""

    @abc.abstractmethod
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        """Reduce each input, and write this rank's equal part, along dim 0, to the output beside it."""

    # -- owed to torch by a subclass: moves

    @abc.abstractmethod
    def broadcast(self, tensors: Tensors, opts: Any) -> OwnWork:
        """Copy the root's tensors to the other ranks'."""

    @abc.abstractmethod
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> OwnWork:
        """Copy every rank's `inputs[i]` to `outputs[i][rank]`; the ranks' sizes may differ."""

    @abc.abstractmethod
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        """Copy every rank's input to the output beside it, joined along dim 0 or stacked."""

    @abc.abstractmethod
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OwnWork:
        """Copy every rank's tensor to `outputs[0][rank]` of the root; `outputs` is empty elsewhere."""

    @abc.abstractmethod
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OwnWork:
        """Copy `inputs[0][rank]` of the root to that rank's output; `inputs` is empty elsewhere."""

    @abc.abstractmethod
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        """Copy `inputs[r]` to rank r, which has it in its `outputs` at this rank's place."""

    @abc.abstractmethod
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> OwnWork:
        """Give `input_splits[r]` rows to each rank r and take `output_splits[r]` from it; empty lists: equal parts."""

    @abc.abstractmethod
    def barrier(self, opts: Any = None) -> OwnWork:
        """Wait until all ranks are here."""

    # -- owed to torch by a subclass: messages

    @abc.abstractmethod
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        """Send `tensors[0]` to a rank."""

    @abc.abstractmethod
    def recv(self, tensors: Tensors, source: int, tag: int) -> OwnWork:
        """Receive the first message of that rank with that tag."""

    @abc.abstractmethod
    def recv_anysource(self, tensors: Tensors, tag: int) -> OwnWork:
        """Receive the first message with that tag; the work's `_source_rank()` says whose it is."""

    # -- owed to torch by a subclass: calls as one, and the end

    @abc.abstractmethod
    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the calls from here on."""

    @abc.abstractmethod
    def _end_coalescing(self, device: torch.device) -> OwnWork:
        """All works since `_start_coalescing` as one."""

    @abc.abstractmethod
    def _get_sequence_number_for_group(self) -> int:
        """A number that grows with the calls of the group, the same on ranks that are equally far."""

    @override
    def shutdown(self) -> None:
        """Leave the group, when what was begun is over."""

    @override
    def abort(self) -> None:
        """Leave the group at once."""
        self.shutdown()

    # -- owed to gradmesh by a subclass
    #
    # They return when the result is there. Their tensors are flat, dense and on the CPU, without history, tangent, or
    # pending conjugation or sign, in sizes that fit together on this rank; outputs share no memory with inputs. Where
    # tensors are moved the dtype is any that torch stores; where they are summed, any that torch adds. With the first
    # bytes the ranks compare the call and their claims. If these differ, every rank raises the claim's refusal with
    # every rank's words, or a MismatchError where there is no claim, and the group is as good as before.

    @abc.abstractmethod
    def all_gather_flat(
        self, out: torch.Tensor, given: torch.Tensor, call_check: CallCheck | None = None
    ) -> None:
        """Write every rank's tensor, all of one size, into `out`, one after another."""

    @abc.abstractmethod
    def reduce_scatter_flat(
        self, out: torch.Tensor, given: torch.Tensor, call_check: CallCheck | None = None
    ) -> None:
        """Sum the ranks' tensors in rank order, and write this rank's equal part of the sum."""

    @abc.abstractmethod
    def all_reduce_flat(
        self, out: torch.Tensor, given: torch.Tensor, call_check: CallCheck | None = None
    ) -> None:
        """Write the sum of the ranks' tensors, in rank order: the same bits everywhere."""

    @abc.abstractmethod
    def reduce_flat(
        self, out: torch.Tensor, given: torch.Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        """Write the sum at the root; the other ranks' `out` is left alone."""

    @abc.abstractmethod
    def broadcast_flat(
        self, out: torch.Tensor, given: torch.Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        """Write the root's `given` into every rank's `out`, the root's own too; the others' `given` is not read."""

    @abc.abstractmethod
    def exchange_flat(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        """Give `send[r]` elements to each rank r and take `receive[r]` from it, in rank order; None: equal parts."""

    @abc.abstractmethod
    def relay_flat(
        self, out: torch.Tensor, given: torch.Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        """Hand on `given`, which may be empty, to whoever takes it, and take that of one rank or of none."""

    @abc.abstractmethod
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        """Make the call that this rank would have claimed an error on the others, as it fails before it can make it.

        Args:
            call_check: what it would have claimed.
            said: why it cannot, in words; it stands for this rank in the others' error.
        """

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
