"""A process group for the simulated device: as NCCL's, it makes streams wait and never the host.

A collective of device tensors runs on a stream of the group, behind what was queued on the current stream, and
`work.wait()` makes the current stream wait for it. Nothing is kept alive: who calls keeps the tensors until then.
The bytes are sent by Gloo. CPU tensors go to another Gloo group at once.

Gloo ends the process where operands of different sizes meet. NCCL does not: its kernels wait, until the group is
aborted. So do these: the ranks first exchange the kind and the sizes of the collective. A message waits for its
receiver, behind those between the same two ranks in either direction.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from tests.simulated_device.device import NAME, core, is_simulated, launch, raw

__all__ = ["ALONE", "BACKEND", "SimulatedGroup", "register"]

BACKEND, ALONE = "simulated", "simulated_alone"
"""The backend for CPU tensors and device tensors, and the one for device tensors alone."""

_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}
"""Those of NCCL, which has no complex ones."""

_ABORTED = "the process group was aborted"
_Work: Any = dist.Work
_ProcessGroup: Any = dist.ProcessGroup  # whose stubs know none of what torch calls


class SimulatedWork(_Work):
    """A collective on a group's stream."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._end = core().mark(stream)

    def wait(self, timeout: object = None) -> bool:
        """Make the current stream wait."""
        core().block(core().current_stream(), self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.over


class SimulatedGroup(_ProcessGroup):
    """The group of one rank.

    Attributes:
        launched: how many calls of each kind were made with device tensors.
        seconds: what a collective takes in addition.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, *, with_cpu: bool) -> None:
        super().__init__(rank, size)
        self._device: Any = dist.ProcessGroupGloo(c10d.PrefixStore("device", store), rank, size, timeout)
        self._host: Any = (
            dist.ProcessGroupGloo(c10d.PrefixStore("host", store), rank, size, timeout) if with_cpu else None
        )
        self._names, self._store = {"name": "", "desc": ""}, store
        self._collectives = core().new_stream()
        self._messages: dict[int, int] = {}
        self._aborted = threading.Event()
        self._running: set[threading.Event] = set()
        self.launched: Counter[str] = Counter()
        self.seconds = 0.0

    def _made(self, name: str, tensors: list[Tensor], *others: Any, stream: int | None = None) -> dist.Work:
        """Make a call of Gloo's: now for CPU tensors, on a stream of the group for others.

        Args:
            name: its name in torch 2.13; others have another one for some.
            tensors: what it reads and writes, in the order of its arguments.
            others: its further arguments.
            stream: the stream; None: that of the collectives.
        """
        listed = name in ("allreduce", "broadcast", "reduce", "send", "recv", "allreduce_coalesced")
        if not all(map(is_simulated, tensors)):
            assert self._host is not None, f"the backend {ALONE} got a CPU tensor"
            assert not any(map(is_simulated, tensors))
            call = getattr(self._host, name)
            return call(tensors, *others) if listed else call(*tensors, *others)
        for x in tensors:
            if x.dtype not in _DTYPES:
                raise TypeError(f"a tensor's dtype is not supported by the process group: {x.dtype}")
        self.launched[name] += 1
        stream = self._collectives if stream is None else stream
        memory, seconds, gloo = [raw(x) for x in tensors], self.seconds, getattr(self._device, name)
        collective = name not in ("send", "recv")

        def kernel() -> None:
            if seconds:
                time.sleep(seconds)
            if self._aborted.is_set():
                raise RuntimeError(_ABORTED)
            if not (self._matches if collective else self._meets)(name, memory, others):
                self._aborted.wait()
                raise RuntimeError(_ABORTED)
            self._end_of(gloo(memory, *others) if listed else gloo(*memory, *others))

        core().block(stream, core().mark(core().current_stream()))
        launch(kernel, stream)
        return SimulatedWork(stream)

    def _matches(self, name: str, memory: list[Tensor], others: Any) -> bool:
        """Whether the ranks make the same collective with sizes that fit; called on the stream of the collectives."""
        size = self.size()
        root = getattr(others[0], "rootRank", 0) if others else 0
        kind = zlib.crc32(f"{name} {root} {len(memory)}".encode())
        if name == "alltoall_base":
            out, x = memory
            receive, send = (
                [n * t.itemsize * (t[0].numel() if t.numel() else 0) for n in counts]
                if counts
                else size * [t.nbytes // size]
                for t, counts in zip((out, x), others, strict=True)
            )
        else:
            receive = send = size * [sum(x.nbytes for x in memory)]
        own = torch.tensor([kind, *send, *receive], device="cpu")
        every = torch.empty(size * own.numel(), dtype=own.dtype, device="cpu")
        self._end_of(self._device._allgather_base(every, own))
        rows = every.view(size, -1)
        return bool((rows[:, 0] == kind).all()) and torch.equal(rows[:, 1 : 1 + size], rows[:, 1 + size :].T)

    def _end_of(self, work: dist.Work) -> None:
        """Wait for a call of Gloo's, or for the abort: Gloo does not always wake a send whose connection is closed."""
        over = threading.Event()
        self._running.add(over)
        failed: list[RuntimeError] = []

        def waits() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                failed.append(error)
            done.append(True)
            over.set()

        done: list[bool] = []
        threading.Thread(target=waits, daemon=True).start()
        if not self._aborted.is_set():
            over.wait()
        self._running.discard(over)
        if failed or not done:
            raise failed[0] if failed else RuntimeError(_ABORTED)

    def _meets(self, name: str, memory: list[Tensor], others: Any) -> bool:
        """Whether the other end of a message has as many bytes; called on the stream of the messages."""
        peer, tag = others
        size, answer = torch.tensor([memory[0].nbytes, 0], device="cpu").split(1)
        if name == "send":
            self._end_of(self._device.send([size], peer, tag + 1))
            self._end_of(self._device.recv([answer], peer, tag + 2))
        else:
            self._end_of(self._device.recv([size], peer, tag + 1))
            answer.fill_(int(size) == memory[0].nbytes)
            self._end_of(self._device.send([answer], peer, tag + 2))
        return bool(answer)

    def get_group_store(self) -> Any:
        """The store, as other groups have one."""
        return self._store

    def abort(self) -> None:
        """End the collectives that wait for others."""
        self._aborted.set()
        for over in tuple(self._running):
            over.set()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._made("allreduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._made("allreduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._made("broadcast", tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._made("reduce", tensors, opts)

    def _allgather_base(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        return self._made("_allgather_base", [out, x])

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        return self._made("_reduce_scatter_base", [out, x], opts or dist.ReduceScatterOptions())

    def alltoall_base(self, out: Tensor, x: Tensor, receive: Any, send: Any, opts: Any = None) -> dist.Work:
        return self._made("alltoall_base", [out, x], receive, send)

    # torch 2.13 renamed these.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._made("send", tensors, peer, tag, stream=self._stream_of(peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._made("recv", tensors, peer, tag, stream=self._stream_of(peer))

    def _stream_of(self, peer: int) -> int:
        """NCCL has one communicator for two ranks, which sends and receives in order."""
        if peer not in self._messages:
            self._messages[peer] = core().new_stream()
        return self._messages[peer]

    # -- of CPU tensors alone

    def _on_host(self, name: str, *args: Any) -> Any:
        assert self._host is not None, f"{name} of the backend {ALONE}"
        return getattr(self._host, name)(*args)

    def allgather(self, outs: Any, xs: Any, opts: Any = None) -> Any:
        return self._on_host("allgather", outs, xs)

    def gather(self, outs: Any, xs: Any, opts: Any) -> Any:
        return self._on_host("gather", outs, xs, opts)

    def scatter(self, outs: Any, xs: Any, opts: Any) -> Any:
        return self._on_host("scatter", outs, xs, opts)

    def barrier(self, opts: Any = None) -> Any:
        return (self._host or self._device).barrier()

    # -- names

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._names["desc"] = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["desc"]

    group_name, group_desc = property(getGroupName), property(getGroupDesc)


def register() -> None:
    """Register both backends with torch.distributed."""
    for name, devices in ((BACKEND, ["cpu", NAME]), (ALONE, [NAME])):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, _creator(with_cpu="cpu" in devices), devices=devices)


def _creator(*, with_cpu: bool) -> Callable[..., SimulatedGroup]:
    return lambda store, rank, size, timeout: SimulatedGroup(store, rank, size, timeout, with_cpu=with_cpu)
