# mypy: disable-error-code="override"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The `hosts` backend of torch.distributed: CPU tensors on several hosts, each with the same number of ranks.

Ranks of one host exchange tensors in shared memory (`shm`), and the ranks with the same number in each host are a
*rail*: a Gloo group of their own. A large sum is a reduce-scatter inside each host, a sum over each rail, and an
all-gather inside each host, so that a byte goes from one host to another once, and not once for each of its ranks
(hierarchical collectives, as in Open MPI's HAN). Up to `DIRECT` bytes, and for all other movements, a Gloo group of all
ranks sends directly from each rank to each.

Sums are taken in rank order inside a host, then in the order of hosts: the same bits on every rank.

A group whose ranks are on one host is a group of `shm`. One whose hosts have different numbers of ranks, or one each,
is a group of Gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo
from typing_extensions import override

from gradmesh._torch import in_plain_mode
from gradmesh._util.environment import HOST
from gradmesh.backends import shm
from gradmesh.backends.own_group import (
    FlatGroup,
    OwnWork,
    Results,
    Shown,
    Steps,
    Tensors,
    apart,
    averaged,
    first_line,
    fold,
    in_mode_of,
    introduced,
    joined,
    not_responding,
    operand,
    promised,
    spread,
    timed_out_text,
    timeout_of_group,
    unresponsive,
)
from gradmesh.backends.shm import data_path
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.shm.shared_memory import Segment, host_name
from gradmesh.errors import AbortedError, DeadlockError, GradmeshError
from gradmesh.ops.sizes import balanced
from gradmesh.ops.transport import bytes_of

__all__ = ["DIRECT", "HostsGroup", "Place", "create"]

DIRECT = 1 << 12
"""Bytes of a rank's operand up to which every rank sends directly to every other."""

_LOOK, _GRACE = 0.5, 1.5
"""Seconds between two looks whether a rank has failed, and seconds that the others then get to respond."""
_REASONS = 4
"""How many ranks an error quotes."""
_PIECE = 1 << 20
"""Bytes of an all-reduce that are added inside each host while the piece before is between hosts."""


@dataclass(frozen=True)
class Place:
    """Where the ranks of a group are.

    Attributes:
        names: of the hosts, in the order of their first ranks.
        ranks: of each host.
        host: of this rank, its position in `names`.
        lane: this rank's position in its host.
    """

    names: Sequence[str]
    ranks: Sequence[Sequence[int]]
    host: int
    lane: int

    @staticmethod
    def of(said: Sequence[str], rank: int) -> Place:
        """The place of a rank, from each rank's host."""
        names = list(dict.fromkeys(said))
        ranks = [[other for other, name in enumerate(said) if name == host] for host in names]
        host = names.index(said[rank])
        return Place([name.partition("\n")[0] for name in names], ranks, host, ranks[host].index(rank))

    @property
    def even(self) -> bool:
        """Whether each host has the same number of ranks, and more than one."""
        counts = {len(ranks) for ranks in self.ranks}
        return len(counts) == 1 and counts != {1}

    def find(self, rank: int) -> tuple[int, int]:
        """The host and the lane of a rank."""
        return next((at, ranks.index(rank)) for at, ranks in enumerate(self.ranks) if rank in ranks)


def create(options: Any, _backend_options: object) -> Any:
    """A group; torch.distributed calls this on its members."""
    timeout = timeout_of_group(options.timeout)
    own = HOST.read() or host_name()
    if not shm.available():
        own = f"{own} {options.group_rank}"  # a host of its own
    place = Place.of(introduced(options, "host of rank", own, timeout), options.group_rank)
    if len(place.ranks) == 1 and shm.available():
        return shm.create(options, None)
    # A store outlives a group, and a later one may have its name.
    store = PrefixStore(f"life {options.store.add(f'lives of {options.group_rank}', 1)}", options.store)
    if not place.even:
        return _gloo(store, "all", options.group_rank, options.group_size, timeout)
    names = list(options.global_ranks_in_group) or list(range(options.group_size))
    return HostsGroup(store, options.group_rank, names, place, timeout, options.group_id)


class _Call(NamedTuple):
    """What `FlatGroup` says of a call, for the ranks of a host, who compare it."""

    kind: str
    shown: Shown
    numbers: tuple[int, ...]


class _Work(OwnWork):
    """A call in the queue of its group."""

    def __init__(self, group: HostsGroup, result: object, shown: Shown) -> None:
        super().__init__(result)
        self.ended = threading.Event()
        self.group, self.shown = group, shown

    @override
    def is_over(self) -> bool:
        return self.ended.is_set()

    @override
    def finish(self, seconds: float | None) -> None:
        if not self.ended.wait(seconds):
            late = DeadlockError.of(
                timed_out_text((), seconds or 0),
                op=self.shown(),
                axis=self.group.shown(),
                expected="the same call on every rank of the group",
                remedy="check the other ranks for an exception, an early return or a different collective",
            )
            self.group.fail(late)
            raise late
        if self.error is not None:
            raise self.error

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        return promised(self)


class _Message(OwnWork):
    """A message of the Gloo group."""

    def __init__(self, work: dist.Work, result: object, end: Callable[[], object] = lambda: None) -> None:
        super().__init__(result)
        self._work, self._end = work, end
        self._ended = False

    @override
    def is_over(self) -> bool:
        return self._work.is_completed()

    @override
    def exception(self) -> BaseException | None:
        error: BaseException | None = self._work.exception()
        return error

    @override
    def finish(self, seconds: float | None) -> None:
        self._work.wait(*([] if seconds is None else [datetime.timedelta(seconds=seconds)]))
        if not self._ended:
            self._ended = True
            self._end()

    @override
    def source_rank(self) -> int:
        """The sender of the received message."""
        return self._work._source_rank()

    _source_rank = source_rank


class HostsGroup(FlatGroup):
    """A process group on several hosts.

    Args:
        store: for its members.
        rank: of this process in the group.
        names: the global ranks of its members.
        place: where they are.
        timeout: of a call.
        name: of the group.
    """

    backend = "hosts"
    inline = DIRECT  # the most bytes for each rank that are sent with the check of a verb's call

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[int],
        place: Place,
        timeout: datetime.timedelta,
        name: str,
    ) -> None:
        super().__init__(name, rank, len(names), timeout)
        self.where = place
        self._store, self._names = store, names
        self._flat = _gloo(store, "all", rank, len(names), timeout)
        self._rail = _gloo(store, f"rail {place.lane}", place.host, len(place.ranks), timeout)
        members = [names[member] for member in place.ranks[place.host]]
        inner = f"{name}, host {place.names[place.host]}"
        segment = Segment(
            PrefixStore(f"host {place.host}", store),
            place.lane,
            len(members),
            members,
            timeout.total_seconds(),
            inner,
        )
        self._inner = ShmGroup(segment, timeout, inner)
        self._thread = ThreadPoolExecutor(1, f"gradmesh group {name}")
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._pending = self._number = 0
        self._failed: BaseException | None = None
        self._looks = True

    def __repr__(self) -> str:
        return f"HostsGroup({self.shown()})"

    @override
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        for group in (self._flat, self._rail, self._inner):
            group.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    # -- calls, one after the other

    @override
    def _call(self, kind: str, shown: Shown, *numbers: int) -> _Call:
        return _Call(kind, shown, numbers)

    @override
    def _begin(
        self, shown: Shown, steps: Steps, result: object, outputs: Iterable[Tensor], opts: Any = None
    ) -> OwnWork:
        work = _Work(self, result, shown)
        run = partial(self._run, work, steps, any(map(Tensor.is_inference, outputs)))
        with self._lock:
            self._check_alive(shown)
            self._number += 1
            waits = not self._pending and not (opts is not None and getattr(opts, "asyncOp", True))
            self._pending += 1
            if waits:
                self._turn.acquire()
            else:
                shown.started()
                self._thread.submit(self._run_in_turn, run)
        if waits:
            try:
                run()
            finally:
                self._turn.release()
        return self._collected(work)

    def _run_in_turn(self, run: Callable[[], None]) -> None:
        with self._turn:
            run()

    def _run(self, work: _Work, steps: Steps, inference: bool) -> None:
        """Make a call, and wait for the other ranks."""

        def make() -> None:
            with torch.inference_mode(inference):
                for waited in steps:
                    self._wait(waited)

        error: BaseException | None = self._failed
        try:
            if error is None:
                in_plain_mode(make)
        except BaseException as raised:
            error = self._failed  # if a timeout or `abort` ended the call
            if error is None:
                error = self._named(raised, work) if isinstance(raised, RuntimeError) else raised
            self.fail(error)
        finally:
            with self._lock:
                self._pending -= 1
            work.error = error
            work.ended.set()

    def _wait(self, work: dist.Work) -> None:
        """Wait for a step, or until another rank has failed: what it does not send, Gloo would wait for."""
        while not isinstance(work, OwnWork):
            try:
                work.wait(datetime.timedelta(seconds=_LOOK))
                return
            except RuntimeError as error:
                if work.is_completed():
                    break
                if self._failed is not None or self._others_failed():
                    raise RuntimeError("another rank noticed a failure first") from error
        work.wait()

    def _others_failed(self) -> bool:
        """Whether a rank has failed. Without a store, which may end in order before this group, Gloo's errors tell."""
        try:
            return self._looks and self._store.check(["failed"])
        except RuntimeError:
            self._looks = False
            return False

    def _named(self, error: RuntimeError, work: _Work) -> BaseException:
        """The error with the ranks that did not respond, or why others failed, if it is none of gradmesh's."""
        if isinstance(error, GradmeshError) and not isinstance(error, AbortedError):
            return error
        self._inner.engine.abort_group(error)  # a rank of this host that waits for this one can respond then
        reasons = []
        with contextlib.suppress(RuntimeError):  # the store may be on the host that is gone
            self._store.set("failed", "")
            late = unresponsive(self._store, self.place, self.count, _GRACE)
            if late:
                hosts = zip(self.where.names, self.where.ranks, strict=True)
                gone = ", ".join(f"host {name}" for name, ranks in hosts if set(ranks) <= set(late))
                return not_responding(
                    [self._names[rank] for rank in late],
                    error,
                    self.shown(),
                    work.shown(),
                    f" ({gone}, with all of its ranks)" if gone else "",
                )
            for rank, name in enumerate(self._names):
                if self._store.check([key := f"why/{rank}"]):
                    reasons.append(f"rank {name}: {self._store.get(key).decode()}")
        if isinstance(error, GradmeshError) and not reasons:
            return error
        return AbortedError.of(
            "another rank has failed",
            op=work.shown(),
            axis=self.shown(),
            got="\n".join([*reasons[:_REASONS], first_line(error)]),
            remedy="check the first error of the other ranks",
        )

    def _check_alive(self, shown: Callable[[], str]) -> None:
        if self._failed is not None:
            raise AbortedError.of(
                "an earlier call on this group failed, or the group was destroyed",
                op=shown(),
                axis=self.shown(),
                got=first_line(self._failed),
                remedy="end the program, or destroy the process group and create another one",
            )

    def fail(self, error: BaseException) -> None:
        """End all calls, here and on the ranks that are connected."""
        with self._lock:
            if self._failed is not None:
                return
            self._failed = error
        with contextlib.suppress(RuntimeError):  # the store may be on the host that is gone
            if not isinstance(error, AbortedError):
                self._store.set(f"why/{self.place}", first_line(error))
            self._store.set(f"lost/{self.place}", "")
            self._store.set("failed", "")
        self._inner.engine.abort_group(error)

    @override
    def shutdown(self) -> None:
        self._thread.shutdown()
        with self._lock:
            self._failed = self._failed or AbortedError.of(
                "the process group was destroyed", axis=self.shown()
            )
        self._inner.shutdown()
        del self._rail, self._flat

    @override
    def abort(self) -> None:
        self.fail(AbortedError.of("the process group was aborted", axis=self.shown()))

    # -- movements

    def _inside(self, call: _Call, outs: Sequence[Tensor], *movements: Callable[[Any], Steps]) -> OwnWork:
        """Movements among the ranks of this host, one after the other."""
        inner: Any = self._inner
        steps = [
            movement(inner._call(call.kind, call.shown, *call.numbers, at))
            for at, movement in enumerate(movements)
        ]
        work: OwnWork = inner._begin(call.shown, itertools.chain.from_iterable(steps), None, outs)
        return work

    @override
    def _exchange(self, call: _Call, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Steps:
        return _exchange(self._flat, taken, given)

    @override
    def _all_gather(self, call: _Call, out: Tensor, given: Tensor) -> Steps:
        return self._all_gather_lists(call, out.unbind(0), given)

    @override
    def _all_gather_lists(self, call: _Call, taken: Sequence[Tensor], given: Tensor) -> Steps:
        if sum(map(_size, taken)) <= DIRECT * self.count:
            yield from self._exchange(call, taken, [given] * self.count)
            return
        lane = [ranks[self.where.lane] for ranks in self.where.ranks]
        of_rail = [torch.empty_like(taken[rank]) for rank in lane]
        yield from _exchange(self._rail, of_rail, [given] * len(lane))
        yield self._inside(
            call,
            taken,
            *(
                partial(data_path.all_gather_lists, taken=[taken[rank] for rank in ranks], given=mine)
                for ranks, mine in zip(self.where.ranks, of_rail, strict=True)
            ),
        )

    @override
    def _reduce_scatter(self, call: _Call, out: Tensor, given: Sequence[Tensor], op: str) -> Steps:
        if sum(map(_size, given)) <= DIRECT:
            rows = torch.empty(self.count, out.numel(), dtype=out.dtype)
            yield from self._exchange(call, rows.unbind(0), given)
            fold(op, rows.unbind(0), out)
            return
        inside = torch.empty(len(self.where.ranks), out.numel(), dtype=out.dtype)
        yield self._inside(
            call,
            [inside],
            *(
                partial(
                    data_path.reduce_scatter, out=row, given=[given[rank] for rank in ranks], op=_summed(op)
                )
                for ranks, row in zip(self.where.ranks, inside.unbind(0), strict=True)
            ),
        )
        rows = torch.empty_like(inside)
        yield from _exchange(self._rail, rows.unbind(0), inside.unbind(0))
        fold(_summed(op), rows.unbind(0), out)
        self._averaged(op, out)

    @override
    def _all_reduce(self, call: _Call, flat: Tensor, op: str) -> Steps:
        if _size(flat) <= DIRECT:
            rows = torch.empty(self.count, flat.numel(), dtype=flat.dtype)
            yield from self._all_gather(call, rows, flat)
            fold(op, rows.unbind(0), flat)
            return
        lanes = len(self.where.ranks[0])
        missing = -flat.numel() % lanes
        whole = torch.cat([flat, flat[:missing]]) if missing else flat
        pieces = whole.split(-(-_PIECE // (whole.element_size() * lanes)) * lanes)
        started = []
        for piece in pieces:
            parts = piece.view(lanes, -1).unbind(0)
            mine = torch.empty_like(parts[0])
            yield self._inside(
                call, [mine], partial(data_path.reduce_scatter, out=mine, given=parts, op=_summed(op))
            )
            rail = self._over_the_rail(mine, _summed(op))
            started.append((parts, mine, rail, next(rail)))  # goes on while the next piece is added
        for parts, mine, rail, sending in started:
            yield sending
            yield from rail
            self._averaged(op, mine)
            yield self._inside(call, parts, partial(data_path.all_gather_lists, taken=parts, given=mine))
        if missing:
            flat.copy_(whole[: flat.numel()])

    def _over_the_rail(self, flat: Tensor, op: str) -> Steps:
        """Reduce over the hosts."""
        hosts = len(self.where.ranks)
        pieces = flat.split(balanced(flat.numel(), hosts)) if hosts > 2 else [flat] * hosts
        mine = pieces[self.where.host]
        rows = torch.empty(hosts, mine.numel(), dtype=flat.dtype)
        yield from _exchange(self._rail, rows.unbind(0), pieces)
        total = torch.empty_like(mine)
        fold(op, rows.unbind(0), total)
        if hosts > 2:
            yield from _exchange(self._rail, pieces, [total] * hosts)
        else:  # each of the two has all rows, for the bytes of the two steps
            flat.copy_(total)

    @override
    def _reduce(self, call: _Call, out: Tensor, given: Tensor, op: str, root: int) -> Steps:
        host, lane = self.where.find(root)
        gloo, ranks, partial_sum, at = self._flat, self.count, given, root
        if _size(given) > DIRECT:
            partial_sum = torch.empty_like(given)
            yield self._inside(
                call,
                [partial_sum],
                partial(data_path.reduce, out=partial_sum, given=given, op=_summed(op), root=lane),
            )
            if lane != self.where.lane:
                return
            gloo, ranks, at = self._rail, len(self.where.ranks), host
        nothing = given[:0]
        rows = torch.empty(ranks if self.place == root else 0, given.numel(), dtype=given.dtype)
        taken = rows.unbind(0) if self.place == root else [nothing] * ranks
        yield from _exchange(gloo, taken, [partial_sum if rank == at else nothing for rank in range(ranks)])
        if self.place == root:
            fold(_summed(op), taken, out)
            self._averaged(op, out)

    @override
    def _broadcast(self, call: _Call, flat: Tensor, root: int) -> Steps:
        if _size(flat) <= DIRECT:
            yield _broadcast(self._flat, flat, root)
            return
        host, lane = self.where.find(root)
        if lane == self.where.lane:
            yield _broadcast(self._rail, flat, host)
        yield self._inside(call, [flat], partial(data_path.broadcast, out=flat, given=flat, root=lane))

    @override
    def _barrier(self, call: _Call) -> Steps:
        nothing = torch.zeros(self.count, dtype=torch.uint8)
        yield from _exchange(self._flat, torch.empty_like(nothing).split(1), nothing.split(1))

    def _averaged(self, op: str, total: Tensor) -> None:
        if op == "AVG":
            averaged(total, self.count)

    @override
    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._check_alive(lambda: "monitored_barrier")
        if timeout is None:
            timeout = datetime.timedelta(seconds=self.timeout)
        self._flat.monitored_barrier(timeout, wait_all_ranks)

    # -- point to point

    @override
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        self._check_alive(lambda: f"send(to rank {to}, tag {tag})")
        flat = operand(tensors[0], self)
        return self._collected(_Message(self._flat.send([bytes_of(flat)], to, tag), tensors))

    @override
    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> OwnWork:
        self._check_alive(lambda: f"recv(tag {tag})")
        results = Results(self)
        given = [bytes_of(results.flat(tensors[0]))]
        started = (
            self._flat.recv_anysource(given, tag) if source is None else self._flat.recv(given, source, tag)
        )
        return self._collected(_Message(started, tensors, partial(in_mode_of, tensors, results.copy)))


def _gloo(store: Any, name: str, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)


def _size(flat: Tensor) -> int:
    return flat.numel() * flat.element_size()


def _summed(op: str) -> str:
    """The reduction of a part of the ranks."""
    return "SUM" if op == "AVG" else op


def _broadcast(gloo: Any, flat: Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = root
    work: dist.Work = gloo.broadcast([bytes_of(flat)], options)
    return work


def _exchange(gloo: Any, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Steps:
    """Send to each rank of a group its tensor, and receive one from each."""
    whole = joined(taken)
    sent = apart(joined(given), whole)
    exchange = getattr(gloo, "alltoall_base", None) or gloo.all_to_all_single
    sizes = [list(map(_size, flats)) for flats in (taken, given)]
    if len({*sizes[0], *sizes[1]}) == 1:
        sizes = [[], []]  # equal ones
    yield exchange(bytes_of(whole), bytes_of(sent), *sizes, dist.AllToAllOptions())
    spread(whole, taken)
