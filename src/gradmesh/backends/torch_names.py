"""The method names that torch.distributed uses in torch 2.11 to 2.15, delegated to a common set.

Up to torch 2.12 these are `_allgather_base` and similar, from 2.13 `all_gather_single` and similar; 2.14 adds others.
"""

from __future__ import annotations

import datetime
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from gradmesh._torch import never_compiled
from gradmesh._util.caches import BoundedCache
from gradmesh.errors import AbortedError, ArgumentError, DeadlockError, message


def pass_monitored(
    work: Any, place: int, timeout: datetime.timedelta, wait_all_ranks: bool, group: str
) -> None:
    """Wait for a pending barrier; the error names the missing ranks.

    The first line has Gloo's text, because programs and torch's tests search for it.

    Args:
        work: the barrier's work; its `late()` returns the missing ranks of the group.
        place: this rank in the group. Rank 0 waits for `timeout`; others wait for rank 0, up to the group's timeout.
        timeout: how long rank 0 waits; zero: not at all.
        wait_all_ranks: name all missing ranks in the first line instead of the first one.
        group: the group's description.

    Raises:
        DeadlockError: a rank did not reach the barrier in time.
        AbortedError: a rank has failed or left, or rank 0 timed out.
    """
    try:
        # A timeout of zero would mean the group's timeout.
        work.wait(max(timeout, datetime.timedelta.resolution) if place == 0 else None)
    except (AbortedError, DeadlockError) as error:
        late: list[int] = work.late()
        missing = ", ".join(f"rank {rank}" for rank in late)
        raise type(error)(
            message(
                _problem(place, late if wait_all_ranks else late[:1], timeout, wait_all_ranks),
                axis=group,
                expected="this barrier on every rank of the group",
                got=f"missing: {missing}\n{error}" if late else str(error),
                remedy="check the missing ranks for an exception, an early return or a different collective",
            )
        ) from error


def _problem(place: int, missing: list[int], timeout: datetime.timedelta, several: bool) -> str:
    if place or not missing:
        return (
            f"Rank {place} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0"
        )
    time = f"{round(timeout.total_seconds() * 1000)} ms"
    ranks = f"Rank{'s' * several} {', '.join(map(str, missing))}"
    return f"Rank 0 timed out in monitoredBarrier after {time}: {ranks} failed to pass monitoredBarrier in {time}"


# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.


Tensors = list[torch.Tensor]


class TorchNames(dist.ProcessGroup):
    """The identity of a group, and the calls that delegate to others.

    Args:
        name: the initial name of the group.
        place: this rank in the group.
        count: the number of ranks.
        timeout: how long a call may wait for the other ranks.

    Attributes:
        backend: the name of the backend.
        timeout: seconds that a call may wait.
    """

    backend: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_compiled(cls)

    def __init__(self, name: str, place: int, count: int, timeout: datetime.timedelta) -> None:
        super().__init__(place, count)  # type: ignore[call-arg]
        self.place = place
        self.count = count
        self.timeout = timeout.total_seconds()
        self._name = name
        self._desc = "undefined"
        self.kept = BoundedCache()
        """The group's cache; see `group_cache`."""

    # -- identity

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return self.backend

    @override
    def name(self) -> str:
        return self.backend

    def getRank(self) -> int:  # noqa: N802
        """This rank in the group."""
        return self.place

    def getSize(self) -> int:  # noqa: N802
        """The number of ranks."""
        return self.count

    rank, size = getRank, getSize

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name under which torch registers the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name under which torch registers the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description of the group, if any."""
        return self._desc

    @property
    @override
    def group_name(self) -> str:
        return self._name

    @property
    @override
    def group_desc(self) -> str:
        return self._desc

    @override
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _shown(self) -> str:
        """The group and the rank, for errors."""
        return f"group '{self._name}', rank {self.place} of {self.count}"

    # -- torch's interface of a group's backend, which is the group itself

    supports_coalescing = False
    supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        """The backend for tensors on a device.

        Raises:
            RuntimeError: it is not the CPU.
        """
        return self if torch.device(device).type == "cpu" else super()._get_backend(device)

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        """The supported devices; empty before torch has registered the group.

        Until then, torch 2.15 would attach its flight recorder to a group with devices, which requires a C++ backend.
        """
        try:
            dist.get_process_group_ranks(self)
        except KeyError:
            return []
        return [torch.device("cpu")]

    # -- delegated calls

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name the missing ones.

        As with Gloo, the timeout of the group's rank 0 counts, and the others wait for it. The errors contain Gloo's
        text, since programs search for it.

        Args:
            timeout: how long rank 0 waits; defaults to the timeout of the group.
            wait_all_ranks: name all missing ranks in the first line instead of the first one.

        Raises:
            DeadlockError: a rank did not reach the barrier in time.
            AbortedError: a rank has failed or left, or rank 0 timed out.
        """
        if timeout is None:
            timeout = datetime.timedelta(seconds=self.timeout)
        pass_monitored(self.barrier(), self.place, timeout, wait_all_ranks, self._shown())

    @override
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    @override
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors: `outputs[rank][number]`, where allgather has `outputs[number][rank]`."""
        if [len(of_rank) for of_rank in outputs] != [len(inputs)] * self.count:
            raise ArgumentError(
                message(
                    "all_gather_coalesced requires one list of outputs per rank",
                    axis=self._shown(),
                    expected=f"{self.count} lists of {len(inputs)} tensors",
                    got=f"lists of lengths {[len(of_rank) for of_rank in outputs]}",
                    remedy="pass one list per rank, each with as many output tensors as there are inputs",
                )
            )
        work: Any = self.allgather([list(of_ranks) for of_ranks in zip(*outputs, strict=True)], inputs, opts)
        gathered: dist.Work = work.giving(outputs)
        return gathered

    @override
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @override
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # -- the names up to torch 2.12

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_single(output, input, opts)

    @override
    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    @override
    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    @override
    def alltoall_base(self, *arguments: Any) -> dist.Work:
        return self.all_to_all_single(*arguments)

    # -- and from 2.14

    def recvAnysource(self, tensors: Tensors, tag: int) -> dist.Work:  # noqa: N802
        """`recv_anysource`."""
        return self.recv_anysource(tensors, tag)

    def start_coalescing(self, device: torch.device) -> None:
        """`_start_coalescing`."""
        self._start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """`_end_coalescing`."""
        return self._end_coalescing(device)


never_compiled(TorchNames)
