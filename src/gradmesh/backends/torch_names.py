# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The names under which torch.distributed calls a group, in torch 2.11 to 2.15, where they come down to others.

Up to torch 2.12 it is `_allgather_base` and the like, from 2.13 `all_gather_single` and the like; 2.14 has new ones.
"""

from __future__ import annotations

import datetime
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from gradmesh._torch import never_compiled
from gradmesh.backends.monitored import pass_monitored
from gradmesh.bounded_cache import BoundedCache
from gradmesh.errors import ArgumentError, message

__all__ = ["Tensors", "TorchNames"]

Tensors = list[torch.Tensor]


class TorchNames(dist.ProcessGroup):
    """Who a group is, and the forms of its calls that come down to others.

    Args:
        name: the group's name, until torch gives it another.
        place: this rank's place in the group.
        count: the number of ranks.
        timeout: how long a call may wait for the other ranks.

    Attributes:
        backend: the name of the backend.
        timeout: the seconds that a call may wait.
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
        """What callers of the group work out once for it; see `group_cache`."""

    # -- who the group is

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return self.backend

    @override
    def name(self) -> str:
        return self.backend

    def getRank(self) -> int:  # noqa: N802
        """This rank's place in the group."""
        return self.place

    def getSize(self) -> int:  # noqa: N802
        """The number of ranks."""
        return self.count

    rank, size = getRank, getSize

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name by which torch finds the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name by which torch finds the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take a description."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, if its maker has said."""
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
        """The group and the rank, for error texts."""
        return f"group '{self._name}', rank {self.place} of {self.count}"

    # -- what torch asks of the backend of a group: this group is its own

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
        """The devices whose tensors the group takes; none before torch has entered the group in its list.

        Until then torch 2.15 takes a group that has devices for one with a backend in C++, to which it attaches its
        flight recorder.
        """
        try:
            dist.get_process_group_ranks(self)
        except KeyError:
            return []
        return [torch.device("cpu")]

    # -- the forms that come down to others

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name those that do not come.

        As with Gloo, the timeout of the group's rank 0 counts, and the others wait for it. The errors have the
        sentences that Gloo's have, since programs look for them.

        Args:
            timeout: how long rank 0 waits; by default the timeout of the group.
            wait_all_ranks: name all ranks that are missing in the first line, and not only the first of them.

        Raises:
            DeadlockError: a rank did not come in time.
            AbortedError: a rank has gone, or rank 0 gave up.
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
                    "all_gather_coalesced needs a list of tensors for each rank",
                    axis=self._shown(),
                    expected=f"{self.count} lists of {len(inputs)} tensors",
                    got=f"lists of {', '.join(str(len(of_rank)) for of_rank in outputs) or 'nothing'}",
                    remedy="pass for every rank of the group as many outputs as there are inputs",
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
