# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The interface of gradmesh's process groups, for torch.distributed and for gradmesh's data path."""

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
    """The cache of a group; None for other backends, and in compiled programs, which cannot access groups."""
    return group.kept if not compiling() and isinstance(group, OwnGroup) else None


class OwnGroup(TorchNames):
    """A process group in Python.

    Subclasses implement the abstract methods, which have the names of torch 2.13; other names of torch delegate to
    these. Each call starts immediately and returns a work. `opts` are torch's options: `rootRank`, `reduceOp`, and
    `asyncOp` (whether the caller waits later). Ranks are group ranks. All ranks must make the same calls in the same
    order; otherwise every rank gets an error.
    """

    # -- for torch: reductions

    @abc.abstractmethod
    def allreduce(self, tensors: Tensors, opts: Any = None) -> OwnWork:
        """Reduce each tensor over the ranks, in place, in rank order: the same bits everywhere."""

    @abc.abstractmethod
    def reduce(self, tensors: Tensors, opts: Any) -> OwnWork:
        """Reduce the tensor over the ranks, in place at the root; on other ranks it does not change."""

    @abc.abstractmethod
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> OwnWork:
        """Reduce `inputs[i][rank]` onto `outputs[i]` of that rank; the ranks' sizes may differ."""

    @abc.abstractmethod
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        """Reduce each input, and write this rank's equal part along dim 0 to the corresponding output."""

    # -- for torch: data movement

    @abc.abstractmethod
    def broadcast(self, tensors: Tensors, opts: Any) -> OwnWork:
        """Copy the root's tensors to the other ranks."""

    @abc.abstractmethod
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> OwnWork:
        """Copy every rank's `inputs[i]` to `outputs[i][rank]`; the ranks' sizes may differ."""

    @abc.abstractmethod
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        """Copy every rank's input to the corresponding output, concatenated along dim 0 or stacked."""

    @abc.abstractmethod
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OwnWork:
        """Copy every rank's tensor to `outputs[0][rank]` of the root; `outputs` is empty elsewhere."""

    @abc.abstractmethod
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OwnWork:
        """Copy `inputs[0][rank]` of the root to that rank's output; `inputs` is empty elsewhere."""

    @abc.abstractmethod
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        """Copy `inputs[r]` to rank r, into its `outputs[rank]` of this rank."""

    @abc.abstractmethod
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> OwnWork:
        """Send `input_splits[r]` rows to each rank r and receive `output_splits[r]`; empty lists: equal parts."""

    @abc.abstractmethod
    def barrier(self, opts: Any = None) -> OwnWork:
        """Wait until all ranks have made this call."""

    # -- for torch: point to point

    @abc.abstractmethod
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        """Send `tensors[0]` to a rank."""

    @abc.abstractmethod
    def recv(self, tensors: Tensors, source: int, tag: int) -> OwnWork:
        """Receive the first message from a rank with that tag."""

    @abc.abstractmethod
    def recv_anysource(self, tensors: Tensors, tag: int) -> OwnWork:
        """Receive the first message with that tag; the work's `_source_rank()` returns the sender."""

    # -- for torch: coalescing, shutdown

    @abc.abstractmethod
    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the calls from here on."""

    @abc.abstractmethod
    def _end_coalescing(self, device: torch.device) -> OwnWork:
        """All works since `_start_coalescing` as one."""

    @abc.abstractmethod
    def _get_sequence_number_for_group(self) -> int:
        """A number that increases with each call; equal on ranks that have made the same calls."""

    @override
    def shutdown(self) -> None:
        """Leave the group after all pending calls have completed."""

    @override
    def abort(self) -> None:
        """Leave the group immediately."""
        self.shutdown()

    # -- for gradmesh
    #
    # These calls block until the result is available. Tensors are flat, dense, on the CPU, detached, without tangents
    # and without lazy conjugation or negation; sizes are consistent on this rank; outputs do not share memory with
    # inputs. Data movement supports every dtype that torch stores, reductions every dtype that torch adds. The ranks
    # first compare the call and their call checks. On a mismatch every rank raises `call_check.refusal` with the
    # descriptions of all ranks, or a MismatchError without a call check; the group remains usable.

    @abc.abstractmethod
    def all_gather_flat(
        self, out: torch.Tensor, given: torch.Tensor, call_check: CallCheck | None = None
    ) -> None:
        """Concatenate every rank's tensor, all of the same size, into `out`."""

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
        """Write the sum at the root; on other ranks `out` does not change."""

    @abc.abstractmethod
    def broadcast_flat(
        self, out: torch.Tensor, given: torch.Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        """Write the root's `given` into every rank's `out`, including the root's; other ranks' `given` is not read."""

    @abc.abstractmethod
    def exchange_flat(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        """Send `send[r]` elements to each rank r and receive `receive[r]`, in rank order; None: equal parts."""

    @abc.abstractmethod
    def relay_flat(
        self, out: torch.Tensor, given: torch.Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        """Provide `given`, which may be empty, and receive that of rank `source`; None: receive nothing."""

    @abc.abstractmethod
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        """Abort a call on all ranks, because this rank failed before it could make it.

        Args:
            call_check: the call check that this rank would have used.
            said: the reason; shown for this rank in the error of the others.
        """

    # -- splitting tensors

    def _one_per_rank(self, call: str, tensors: Tensors) -> Tensors:
        if len(tensors) != self.count:
            raise ArgumentError(
                message(
                    f"{call} requires one tensor per rank",
                    axis=self._shown(),
                    expected=f"a list of {self.count} tensors",
                    got=f"{len(tensors)} tensors",
                    remedy="pass a list with one tensor per rank, e.g. list(x.chunk(dist.get_world_size(group)))",
                )
            )
        return tensors

    def _not_one_piece_per_rank(self, whole: torch.Tensor, piece: torch.Tensor) -> ShapeError:
        return ShapeError(
            message(
                "the shape of the full tensor does not match the shape of its parts",
                axis=self._shown(),
                expected=f"shape {[self.count * s for s in piece.shape[:1]] + list(piece.shape[1:])}",
                got=f"shape {list(whole.shape)} for parts of shape {list(piece.shape)}",
                remedy=f"allocate the full tensor with {self.count} times the rows of a part",
            )
        )

    def _split_sizes(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """The rows sent to or received from each rank; equal for an empty list."""
        rows = tensor.shape[0] if tensor.dim() else -1
        if not splits and rows >= 0 and rows % self.count == 0:
            splits = [rows // self.count] * self.count
        if len(splits) != self.count or sum(splits) != rows:
            raise ShapeError(
                message(
                    "the split sizes do not add up to the size of dim 0",
                    op="all_to_all_single",
                    axis=self._shown(),
                    expected=f"{self.count} sizes whose sum is {max(rows, 0)}",
                    got=f"{splits or 'an equal split'} for shape {list(tensor.shape)}",
                    remedy="pass one size per rank, e.g. [4, 3] for 7 rows on 2 ranks",
                )
            )
        return list(splits)
