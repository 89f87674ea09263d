# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The threads process group: implements torch's interface."""

from __future__ import annotations

import contextlib
import datetime
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gradmesh._torch.threads import of_thread
from gradmesh._util.call_sites import call_site, origin
from gradmesh.backends.own_group import CallCheck, Done, OwnGroup, OwnWork, Tensors, promised, reduction
from gradmesh.backends.threads import rendezvous
from gradmesh.backends.threads.rendezvous import Contribution, Exchange, Group, Receive, Waitable
from gradmesh.errors import MismatchError

_Kernel = Callable[[list[Contribution]], None]


class _Work(OwnWork):
    """A pending call of one rank; complete when every rank has made it."""

    def __init__(self, waits_for: Waitable, group: ThreadsGroup, tensors: object) -> None:
        super().__init__(tensors)
        self._waits_for = waits_for
        self._group = group

    @override
    def finish(self, seconds: float | None) -> None:
        self._waits_for.wait(self._group.timeout if seconds is None else seconds)

    @override
    def is_over(self) -> bool:
        return self._waits_for.over()

    @override
    def exception(self) -> BaseException | None:
        return self._waits_for.error

    @override
    def late(self) -> list[int]:
        ranks = self._group.shared.ranks
        return [ranks.index(rank) for rank in self._waits_for.needs()]

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future with the result; a pending one if an observer delays results."""
        observer = self._group.shared.world.observer
        return super().get_future() if observer is None or not observer.lives else promised(self)

    @override
    def source_rank(self) -> int:
        """The sender of the received message, -1 before that."""
        return self._waits_for.came_from if isinstance(self._waits_for, Receive) else -1

    _source_rank = source_rank


def _only_at(place: int, tensor: Tensor, size: int) -> list[Tensor | None]:
    return [tensor if i == place else None for i in range(size)]


class ThreadsGroup(OwnGroup):
    """A process group whose ranks are threads.

    A call posts this rank's contribution and returns; the rank waits in `wait()` of the work, as with Gloo.
    """

    backend = "threads"

    def __init__(self, shared: Group, place: int, timeout: datetime.timedelta) -> None:
        super().__init__(shared.name, place, len(shared.ranks), timeout)
        self.shared = shared
        self.made_in = getattr(of_thread, "world", None)
        """The torch.distributed world of the rank that has made it, if that is a rank's thread."""

    # -- torch's interface

    @override
    def setGroupName(self, name: str) -> None:
        super().setGroupName(name)
        self.shared.name = name

    @override
    def setGroupDesc(self, desc: str) -> None:
        super().setGroupDesc(desc)
        self.shared.purpose = desc

    def _get_sequence_number_for_group(self) -> int:
        return self.shared.calls[self.place]

    @override
    def shown(self) -> str:
        return str(self.shared)

    def __repr__(self) -> str:
        return f"ThreadsGroup({self.shared}, place {self.place})"

    # -- posting

    def _post(
        self,
        call: str,
        kernel: _Kernel,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        pieces: object = None,
        result: object = None,
    ) -> OwnWork:
        part = Contribution(call, inputs, outputs, call_site(), pieces)
        return self._work(self.shared.meet(self.place, part, kernel), outputs if result is None else result)

    def _work(self, waits_for: Waitable, result: object) -> OwnWork:
        return self._collected(_Work(waits_for, self, result))

    def _exchange(
        self,
        call: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        pieces: list[Exchange],
        result: object = None,
    ) -> OwnWork:
        return self._post(call, rendezvous.exchange, inputs, outputs, pieces=pieces, result=result)

    # -- gradmesh's data path

    @override
    def all_gather_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        pieces = [Exchange([given] * self.count, self._equal(out))]
        self._direct("all_gather_single", rendezvous.exchange, out, given, pieces, call_check)

    @override
    def reduce_scatter_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        kernel = functools.partial(rendezvous.reduce_scatter, op="SUM")
        pieces = [Exchange(self._equal(given), ())]
        self._direct("reduce_scatter_single(sum)", kernel, out, given, pieces, call_check)

    @override
    def all_reduce_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        kernel = functools.partial(rendezvous.reduce, op="SUM", root=None)
        self._direct("all_reduce(sum)", kernel, out, given, None, call_check)

    @override
    def reduce_flat(self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None) -> None:
        kernel = functools.partial(rendezvous.reduce, op="SUM", root=root)
        self._direct(f"reduce(sum, root {root})", kernel, out, given, None, call_check)

    @override
    def broadcast_flat(
        self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        gives = [given if self.place == root else None] * self.count
        pieces = [Exchange(gives, _only_at(root, out, self.count))]
        self._direct(f"broadcast(root {root})", rendezvous.exchange, out, given, pieces, call_check)

    @override
    def exchange_flat(
        self,
        out: Tensor,
        given: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        gives = self._equal(given) if send is None else list(given.split(list(send)))
        takes = self._equal(out) if receive is None else list(out.split(list(receive)))
        pieces = [Exchange(gives, takes)]
        self._direct("all_to_all_single", rendezvous.exchange, out, given, pieces, call_check)

    @override
    def relay_flat(
        self, out: Tensor, given: Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        self._direct("relay", rendezvous.relay, out, given, source, call_check)

    @override
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        if call_check is not None:
            call_check = CallCheck(secrets.randbits(64), lambda: said, call_check.refusal)
        with contextlib.suppress(Exception):  # the caller raises its own error
            part = Contribution(said, [], [], call_site(), None, call_check)
            self.shared.meet(self.place, part, lambda _parts: None).wait(self.timeout)

    def _direct(
        self,
        call: str,
        kernel: _Kernel,
        out: Tensor,
        given: Tensor,
        pieces: object,
        call_check: CallCheck | None,
    ) -> None:
        back = origin()
        part = Contribution(call, [given], [out], call_site(), pieces, call_check, back, True)
        meeting = self.shared.meet(self.place, part, kernel)
        try:
            meeting.wait(self.timeout)
        except MismatchError:
            if part.call_check is None or meeting.words is None:
                raise
            raise part.call_check.refusal(list(meeting.words)) from None

    def _equal(self, flat: Tensor) -> Tensors:
        return list(flat.view(self.count, flat.numel() // self.count).unbind(0))

    # -- reductions

    @override
    def allreduce(self, tensors: Tensors, opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        kernel = functools.partial(rendezvous.reduce, op=op, root=None)
        return self._post(f"all_reduce({op.lower()})", kernel, tensors, tensors)

    @override
    def reduce(self, tensors: Tensors, opts: Any) -> OwnWork:
        op, root = reduction(opts, self.backend), self._root(opts)
        kernel = functools.partial(rendezvous.reduce, op=op, root=root)
        return self._post(f"reduce({op.lower()}, root {root})", kernel, tensors, tensors)

    @override
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        for given in inputs:
            self._one_per_rank("reduce_scatter", given)
        return self._post(
            f"reduce_scatter({op.lower()})",
            functools.partial(rendezvous.reduce_scatter, op=op),
            [tensor for given in inputs for tensor in given],
            outputs,
            pieces=[Exchange(given, ()) for given in inputs],
        )

    @override
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        return self._post(
            f"reduce_scatter_single({op.lower()})",
            functools.partial(rendezvous.reduce_scatter, op=op),
            inputs,
            outputs,
            pieces=[Exchange(self._slots(i, o), ()) for o, i in zip(outputs, inputs, strict=True)],
        )

    # -- exchanges

    @override
    def broadcast(self, tensors: Tensors, opts: Any) -> OwnWork:
        root = self._root(opts)
        at_root = self.place == root
        pieces = [
            Exchange(
                [tensor if at_root and i != root else None for i in range(self.count)],
                _only_at(root, tensor, self.count) if not at_root else [None] * self.count,
            )
            for tensor in tensors
        ]
        return self._exchange(f"broadcast(root {root})", tensors, tensors, pieces)

    @override
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> OwnWork:
        for taken in outputs:
            self._one_per_rank("all_gather", taken)
        pieces = [Exchange([i] * self.count, o) for o, i in zip(outputs, inputs, strict=True)]
        return self._exchange("all_gather", inputs, [t for o in outputs for t in o], pieces, outputs)

    @override
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        pieces = [Exchange([i] * self.count, self._slots(o, i)) for o, i in zip(outputs, inputs, strict=True)]
        return self._exchange("all_gather_single", inputs, outputs, pieces)

    @override
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OwnWork:
        root = self._root(opts)
        taken: Sequence[Tensor | None] = [None] * self.count
        if self.place == root:
            taken = self._one_per_rank("gather", outputs[0])
        pieces = [Exchange(_only_at(root, inputs[0], self.count), taken)]
        return self._exchange(
            f"gather(root {root})", inputs, [t for o in outputs for t in o], pieces, outputs
        )

    @override
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OwnWork:
        root = self._root(opts)
        given: Sequence[Tensor | None] = [None] * self.count
        if self.place == root:
            given = self._one_per_rank("scatter", inputs[0])
        pieces = [Exchange(given, _only_at(root, outputs[0], self.count))]
        return self._exchange(f"scatter(root {root})", [t for i in inputs for t in i], outputs, pieces)

    @override
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        give, take = self._one_per_rank("all_to_all", inputs), self._one_per_rank("all_to_all", outputs)
        return self._exchange("all_to_all", inputs, outputs, [Exchange(give, take)])

    @override
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> OwnWork:
        pieces = [Exchange(self._cut(input, input_splits), self._cut(output, output_splits))]
        return self._exchange("all_to_all_single", [input], [output], pieces)

    @override
    def barrier(self, opts: Any = None) -> OwnWork:
        return self._post("barrier", lambda _parts: None, [], [])

    # -- point to point

    @override
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        part = Contribution(f"send(to place {to}, tag {tag})", tensors, tensors, call_site())
        self.shared.send(self.place, to, tag, part)
        return self._collected(Done(tensors))

    @override
    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> OwnWork:
        sender = "any rank" if source is None else f"place {source}"
        part = Contribution(f"recv(from {sender}, tag {tag})", tensors, tensors, call_site())
        return self._work(self.shared.receive(self.place, source, tag, part), tensors)

    # -- splitting tensors

    def _slots(self, whole: Tensor, piece: Tensor) -> Tensors:
        """Split a tensor (concatenated along dim 0, or stacked) into one view per rank with the shape of `piece`."""
        if whole.shape == (self.count, *piece.shape):
            return list(whole.unbind(0))
        if piece.dim() and whole.shape == (self.count * piece.shape[0], *piece.shape[1:]):
            return list(whole.split(piece.shape[0])) if piece.shape[0] else [whole] * self.count
        if whole.numel() == self.count * piece.numel() and whole.is_contiguous():
            return [slot.view(piece.shape) for slot in whole.view(self.count, -1)]
        raise self._not_one_piece_per_rank(whole, piece)

    def _cut(self, tensor: Tensor, splits: list[int]) -> Tensors:
        return list(tensor.split(self._split_sizes(tensor, splits)))
