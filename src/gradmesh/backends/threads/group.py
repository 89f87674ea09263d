# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The process group that torch.distributed sees, of ranks that are threads."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradmesh.backends.process_group import PythonGroup, Tensors, reduction
from gradmesh.backends.threads import collectives
from gradmesh.backends.threads.collectives import Exchange
from gradmesh.backends.threads.rendezvous import Group, Part, Receive
from gradmesh.backends.threads.waiting import Waitable, World
from gradmesh.call_sites import call_site

__all__ = ["ThreadsGroup"]

_Kernel = Callable[[list[Part]], None]


class _Work(dist.Work):
    """A call of one rank: started, and complete when every rank has brought its part."""

    def __init__(self, waits_for: Waitable, group: ThreadsGroup, tensors: object) -> None:
        super().__init__()
        self._waits_for = waits_for
        self._group = group
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        self._waits_for.wait(seconds if seconds > 0 else self._group.timeout)
        return True

    def is_completed(self) -> bool:
        return self._waits_for.done

    def is_success(self) -> bool:
        return self._waits_for.done and self._waits_for.error is None

    def exception(self) -> BaseException | None:
        return self._waits_for.error

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        # Complete before it is handed out: a callback would run in the thread of whichever rank came last.
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def giving(self, result: object) -> _Work:
        """Have `result()` and the future hand this out."""
        self._tensors = result
        return self

    def late(self) -> list[int]:
        """The places of the ranks that have not made this call."""
        return [self._group.shared.ranks.index(rank) for rank in self._waits_for.needs()]

    def source_rank(self) -> int:
        return self._waits_for.came_from if isinstance(self._waits_for, Receive) else -1

    _source_rank = source_rank


class _All(Waitable):
    """Several works as one, for `_end_coalescing`."""

    def __init__(self, world: World, works: Sequence[_Work]) -> None:
        super().__init__(world)
        self.works = works

    def wait(self, seconds: float) -> None:
        for work in self.works:
            work._waits_for.wait(seconds)
        self.done = True


def _same_for_all(tensor: torch.Tensor | None, size: int) -> list[torch.Tensor | None]:
    return [tensor] * size


def _only_at(place: int, tensor: torch.Tensor, size: int) -> list[torch.Tensor | None]:
    return [tensor if i == place else None for i in range(size)]


class ThreadsGroup(PythonGroup):
    """A process group whose ranks are threads.

    A call posts this rank's part and returns; the rank waits in the `wait()` of the work, as with gloo.
    """

    backend = "threads"

    def __init__(self, shared: Group, place: int, timeout: datetime.timedelta) -> None:
        super().__init__(shared.name, place, len(shared.ranks), timeout)
        self.shared = shared
        self._coalesced: list[_Work] | None = None

    # -- what torch asks of a group

    def setGroupName(self, name: str) -> None:  # noqa: N802
        super().setGroupName(name)
        self.shared.name = name

    def _get_sequence_number_for_group(self) -> int:
        return self.shared.calls[self.place]

    def _shown(self) -> str:
        return str(self.shared)

    def __repr__(self) -> str:
        return f"ThreadsGroup({self.shared}, place {self.place})"

    # -- posting

    def _post(
        self,
        call: str,
        kernel: _Kernel,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        pieces: object = None,
        result: object = None,
    ) -> _Work:
        part = Part(call, inputs, outputs, call_site(), pieces)
        return self._work(self.shared.meet(self.place, part, kernel), outputs if result is None else result)

    def _work(self, waits_for: Waitable, result: object) -> _Work:
        work = _Work(waits_for, self, result)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _exchange(
        self,
        call: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        pieces: list[Exchange],
        result: object = None,
    ) -> _Work:
        return self._post(call, collectives.exchange, inputs, outputs, pieces=pieces, result=result)

    # -- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Work:
        op = reduction(opts, self.backend)
        kernel = functools.partial(collectives.reduce, op=op, root=None)
        return self._post(f"all_reduce({op.lower()})", kernel, tensors, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        op = reduction(opts, self.backend)
        kernel = functools.partial(collectives.reduce, op=op, root=opts.rootRank)
        return self._post(f"reduce({op.lower()}, root {opts.rootRank})", kernel, tensors, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> _Work:
        op = reduction(opts, self.backend)
        for given in inputs:
            self._one_per_rank("reduce_scatter", given)
        return self._post(
            f"reduce_scatter({op.lower()})",
            functools.partial(collectives.reduce_scatter, op=op),
            [tensor for given in inputs for tensor in given],
            outputs,
            pieces=[Exchange(given, ()) for given in inputs],
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        op = reduction(opts, self.backend)
        return self._post(
            f"reduce_scatter_single({op.lower()})",
            functools.partial(collectives.reduce_scatter, op=op),
            inputs,
            outputs,
            pieces=[Exchange(self._slots(i, o), ()) for o, i in zip(outputs, inputs, strict=True)],
        )

    # -- exchanges

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        root = opts.rootRank
        at_root = self.place == root
        pieces = [
            Exchange(
                [tensor if at_root and i != root else None for i in range(self.count)],
                _only_at(root, tensor, self.count) if not at_root else _same_for_all(None, self.count),
            )
            for tensor in tensors
        ]
        return self._exchange(f"broadcast(root {root})", tensors, tensors, pieces)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> _Work:  # noqa: ARG002
        for taken in outputs:
            self._one_per_rank("all_gather", taken)
        pieces = [Exchange(_same_for_all(i, self.count), o) for o, i in zip(outputs, inputs, strict=True)]
        return self._exchange("all_gather", inputs, [t for o in outputs for t in o], pieces, outputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:  # noqa: ARG002
        pieces = [
            Exchange(_same_for_all(i, self.count), self._slots(o, i))
            for o, i in zip(outputs, inputs, strict=True)
        ]
        return self._exchange("all_gather_single", inputs, outputs, pieces)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> _Work:
        root = opts.rootRank
        taken: Sequence[torch.Tensor | None] = _same_for_all(None, self.count)
        if self.place == root:
            taken = self._one_per_rank("gather", outputs[0])
        pieces = [Exchange(_only_at(root, inputs[0], self.count), taken)]
        return self._exchange(
            f"gather(root {root})", inputs, [t for o in outputs for t in o], pieces, outputs
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> _Work:
        root = opts.rootRank
        given: Sequence[torch.Tensor | None] = _same_for_all(None, self.count)
        if self.place == root:
            given = self._one_per_rank("scatter", inputs[0])
        pieces = [Exchange(given, _only_at(root, outputs[0], self.count))]
        return self._exchange(f"scatter(root {root})", [t for i in inputs for t in i], outputs, pieces)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:  # noqa: ARG002
        give, take = self._one_per_rank("all_to_all", inputs), self._one_per_rank("all_to_all", outputs)
        return self._exchange("all_to_all", inputs, outputs, [Exchange(give, take)])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,  # noqa: ARG002
    ) -> _Work:
        pieces = [Exchange(self._cut(input, input_splits), self._cut(output, output_splits))]
        return self._exchange("all_to_all_single", [input], [output], pieces)

    def barrier(self, opts: Any = None) -> _Work:  # noqa: ARG002
        return self._post("barrier", lambda _parts: None, [], [])

    # -- point to point

    def send(self, tensors: Tensors, to: int, tag: int) -> _Work:
        part = Part(f"send(to place {to}, tag {tag})", tensors, tensors, call_site())
        self.shared.send(self.place, to, tag, part)
        sent = _All(self.shared.world, ())
        sent.done = True
        return self._work(sent, tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> _Work:
        return self._receive(tensors, source, tag, f"recv(from place {source}, tag {tag})")

    def recv_anysource(self, tensors: Tensors, tag: int) -> _Work:
        return self._receive(tensors, None, tag, f"recv(from anybody, tag {tag})")

    def _receive(self, tensors: Tensors, source: int | None, tag: int, call: str) -> _Work:
        part = Part(call, tensors, tensors, call_site())
        return self._work(self.shared.receive(self.place, source, tag, part), tensors)

    # -- coalescing

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> _Work:  # noqa: ARG002
        works, self._coalesced = self._coalesced or [], None
        return _Work(_All(self.shared.world, works), self, [])

    # -- cutting tensors up

    def _slots(self, whole: torch.Tensor, piece: torch.Tensor) -> Tensors:
        """Cut a tensor into one slot per rank, shaped as the piece: joined along dim 0, or stacked."""
        if whole.shape == (self.count, *piece.shape):
            return list(whole.unbind(0))
        if piece.dim() and whole.shape == (self.count * piece.shape[0], *piece.shape[1:]):
            return list(whole.split(piece.shape[0])) if piece.shape[0] else [whole] * self.count
        if whole.numel() == self.count * piece.numel() and whole.is_contiguous():
            return [slot.view(piece.shape) for slot in whole.view(self.count, -1)]
        raise self._not_one_piece_per_rank(whole, piece)

    def _cut(self, tensor: torch.Tensor, splits: list[int]) -> Tensors:
        return list(tensor.split(self._split_sizes(tensor, splits)))
