"""The rendezvous of thread ranks: each posts its contribution to a call, and the last one does the work for all.

Every rank posts its n-th call on a group into the group's n-th `Rendezvous`. If the contributions do not match, every
rank raises an error that lists all calls with their lines. Point-to-point messages are copied and stored until they are
received. A rank waits for one thing at a time. If no rank runs and nothing can complete, that is a deadlock, and every
waiting rank raises an error that lists all pending calls.

The collectives are functions of the contributions of all ranks, processed in rank order, so that sums are bitwise
reproducible.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh import _torch
from gradmesh._util.call_sites import Site, origin, seen_from
from gradmesh.backends.own_group import (
    DIFFERENT_BRANCH,
    REDUCTIONS,
    RETURNED_REMEDY,
    SAME_CALLS,
    CallCheck,
    averaged,
    mismatched_message,
    show_call,
    timed_out_text,
)
from gradmesh.errors import AbortedError, DeadlockError, GradmeshError, MismatchError, message


class Observer:
    """Intercepts the calls of a world's ranks; each method is called in the rank's thread.

    A simulator's may let other ranks run first, record the call, and delay its result. This class does none of these.
    """

    @property
    def lives(self) -> bool:
        """Whether results are delayed in wall-clock time, so that creating a future must not wait."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether only the ranks' threads may communicate, one at a time, so that background threads cannot be used."""
        return False

    def async_axis(self, group: Group, run: Callable[[], None]) -> Callable[[], None]:
        """Run an asynchronous call if ranks take turns, as if it overlapped with computation; returns its wait."""
        raise NotImplementedError

    def meet(
        self, group: Group, place: int, part: Contribution, kernel: Callable[[list[Contribution]], None]
    ) -> Rendezvous:
        """A rank, at `place` in a group, makes its next call on it."""
        return group.meet(place, part, kernel, observed=True)

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:
        """A rank sends a message to group rank `to`."""
        group.hand(place, to, tag, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """A rank receives a message from group rank `source`, or from any rank (None)."""
        return group.take(place, source, tag, part)

    def wait(self, waits_for: Waitable, seconds: float) -> None:
        """A rank waits until something is complete, with a timeout."""
        if not waits_for.done:
            waits_for.sleep(seconds)

    def over(self, waits_for: Waitable) -> bool:
        """A rank polls whether something is complete."""
        return waits_for.done


GRACE = 0.25
"""Seconds between two checks; two consecutive checks without progress in between report a deadlock."""

_SHOWN_ONE_BY_ONE = 32


class World:
    """The ranks of one launch: which of them run, wait, or have ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Ranks start with different seeds, as processes do, derived from the launching thread's generator.
        self.seed = int(torch.randint(2**62, ()))
        self.lock = threading.Lock()
        self.waiting: dict[int, Waitable] = {}  # by rank, for the ranks' own threads
        self.ended: dict[int, str] = {}  # how a rank ended
        self.gates: set[threading.Lock] = set()
        self.stopped: Callable[[], GradmeshError] | None = None
        self.events = 0
        self.shared: dict[object, Any] = {}  # objects that ranks share, such as groups
        self.rank_of_thread: dict[int, int] = {}
        self.task_of_thread: dict[int, BackgroundTask] = {}
        self.observer: Observer | None = None

    def begin(self) -> None:
        """Mark every rank as running."""
        with self.lock:
            self.ended.clear()
            self.events += 1

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Mark a rank's function as ended; an error aborts all waits immediately."""
        with self.lock:
            self.ended[rank] = "returned" if error is None else f"failed with {type(error).__name__}"
            self.events += 1
        if error is not None:
            text = f"rank {rank} failed with {type(error).__name__}: {error}"
            self.stop(lambda: AbortedError(message(text, remedy="fix the error of that rank"), rank=rank))

    def stop(self, error: Callable[[], GradmeshError]) -> None:
        """Abort all waits, current and future, with this error; only the first call counts."""
        with self.lock:
            self.stop_now(error)

    def stop_now(self, error: Callable[[], GradmeshError]) -> None:
        """As `stop`, for a caller that holds the lock."""
        if self.stopped is None:
            self.stopped = error
            for gate in self.gates:
                gate.release()
            self.gates.clear()

    def check(self) -> None:
        """Raise when the world has been stopped."""
        if self.stopped is not None:
            raise self.stopped()

    def runs(self, rank: int) -> bool:
        """Whether a rank is in its function and does not wait for an incomplete call."""
        if rank in self.ended:
            return False
        waits_for = self.waiting.get(rank)
        return waits_for is None or waits_for.done or waits_for.moves

    def hopeless(self, waits_for: Waitable) -> bool:
        """Whether it can no longer complete: a rank that it needs has ended, or no rank runs."""
        return bool(self.lost(waits_for)) or not any(map(self.runs, range(self.size)))

    def lost(self, waits_for: Waitable) -> list[int]:
        """The ended ranks that it needs."""
        return sorted(self.ended.keys() & set(waits_for.needs()))

    def deadlock(self, problem: str) -> DeadlockError:
        """Create the error that lists the state of every rank. The caller holds the lock."""
        lines = _folded([self._doing(rank) for rank in range(self.size)])
        return DeadlockError.of(
            problem,
            got="\n".join(lines),
            remedy=RETURNED_REMEDY if self.ended else f"make sure that {SAME_CALLS}",
        )

    def _doing(self, rank: int) -> str:
        if rank in self.ended:
            return f"has {self.ended[rank]}"
        return "runs" if self.runs(rank) else f"waits in {self.waiting[rank].show(rank)}"


def _folded(doing: list[str]) -> list[str]:
    """A line for each rank; if there are many, one line for consecutive ranks in the same state.

    >>> _folded(["runs"] * 2)
    ['rank 0  runs', 'rank 1  runs']
    >>> _folded(["runs"] * 39 + ["has returned"])
    ['ranks 0 to 38  each runs', 'rank 39  has returned']
    """
    if len(doing) <= _SHOWN_ONE_BY_ONE:
        return [f"rank {rank}  {what}" for rank, what in enumerate(doing)]
    lines, first = [], 0
    for what, alike in itertools.groupby(doing):
        last = first + len(list(alike)) - 1
        lines.append(f"rank {first}  {what}" if first == last else f"ranks {first} to {last}  each {what}")
        first = last + 1
    return lines


class Waitable:
    """Something that a rank waits for; complete when `done`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done = False
        self.error: BaseException | None = None
        self.gates: list[threading.Lock] = []

    def needs(self) -> Iterable[int]:
        """The ranks, in the world, without which it cannot complete."""
        raise NotImplementedError

    def show(self, rank: int) -> str:
        """The call of a rank, with its group and line."""
        raise NotImplementedError

    def withdraw(self) -> bool:
        """Whether it can be aborted, because no thread works on it. The caller holds the lock."""
        raise NotImplementedError

    def hopeless(self) -> str:
        """Why it can no longer complete, for the error."""
        lost = self.world.lost(self)
        if not lost:
            return "deadlock: every rank waits for another one"
        names = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        return f"{names} ha{'ve' if len(lost) > 1 else 's'} {self.world.ended[lost[0]]}, and the others wait for it"

    def _complete(self, error: BaseException | None = None) -> None:
        """Wake all waiters. The caller holds the lock."""
        self.error = error
        self.done = True
        self.world.events += 1
        for gate in self.gates:
            if gate in self.world.gates:
                self.world.gates.remove(gate)
                gate.release()
        self.gates.clear()

    def wait(self, seconds: float) -> None:
        """Wait until it is complete, or raise its error."""
        observer = self.world.observer
        if observer is not None:
            observer.wait(self, seconds)
        elif not self.done:
            self.sleep(seconds)
        if self.error is not None:
            raise _fresh(self.error)

    @property
    def moves(self) -> bool:
        """Whether a background thread is about to complete it."""
        return False

    def over(self) -> bool:
        """Whether it is complete from the calling rank's view (the observer may delay it)."""
        observer = self.world.observer
        return self.done if observer is None else observer.over(self)

    def sleep(self, seconds: float) -> None:
        """Wait until it has completed or failed; raises if the world has been stopped."""
        world = self.world
        thread = threading.get_ident()
        rank = world.rank_of_thread.get(thread)  # None in a thread that a rank started
        task = world.task_of_thread.get(thread)
        deadline = time.monotonic() + seconds
        gate = threading.Lock()
        gate.acquire()
        with world.lock:
            if self.done:
                return
            if world.stopped is not None:
                raise world.stopped()
            self.gates.append(gate)
            world.gates.add(gate)
            if rank is not None:
                world.waiting[rank] = self
                world.events += 1
            if task is not None:
                task.runner.waits_for = self
                world.events += 1
        hopeless_since = -1  # the event count at the last check, if that was hopeless
        try:
            while not gate.acquire(timeout=max(0.001, min(GRACE, deadline - time.monotonic()))):
                with world.lock:
                    if self.done or world.stopped is not None:
                        break
                    if time.monotonic() >= deadline and self.withdraw():
                        self._complete(world.deadlock(timed_out_text(self.needs(), seconds)))
                    elif not world.hopeless(self):
                        hopeless_since = -1
                    elif hopeless_since == world.events or (hopeless_since >= 0 and world.lost(self)):
                        error = world.deadlock(self.hopeless())
                        world.stop_now(functools.partial(DeadlockError, str(error)))
                    else:
                        hopeless_since = world.events
        finally:
            with world.lock:
                world.gates.discard(gate)
                if rank is not None:
                    world.waiting.pop(rank, None)
                if task is not None:
                    task.runner.waits_for = None
        if not self.done:
            world.check()


class BackgroundThread:
    """A thread that runs tasks for a rank, one after another, and what it currently waits for."""

    def __init__(self) -> None:
        self.waits_for: Waitable | None = None


class BackgroundTask(Waitable):
    """A task of a background thread, which a rank may wait for; deadlock detection looks through it."""

    def __init__(self, world: World, runner: BackgroundThread) -> None:
        super().__init__(world)
        self.runner = runner

    @property
    def moves(self) -> bool:
        """Whether the thread runs."""
        waits_for = self.runner.waits_for
        return waits_for is None or waits_for.done

    def needs(self) -> Iterable[int]:
        """The ranks that the thread waits for."""
        waits_for = self.runner.waits_for
        return [] if waits_for is None else waits_for.needs()

    def show(self, rank: int) -> str:
        """The call of the thread, with its group and line."""
        waits_for = self.runner.waits_for
        return "an asynchronous call" if waits_for is None else waits_for.show(rank)

    def withdraw(self) -> bool:
        """Never: the call itself has a time limit."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Run the task in the background thread."""
        thread = threading.get_ident()
        self.world.task_of_thread[thread] = self
        try:
            work()
        finally:
            del self.world.task_of_thread[thread]
            with self.world.lock:
                self._complete()


def _fresh(error: BaseException) -> BaseException:
    """A separate exception for every rank, since threads must not share a traceback."""
    if isinstance(error, GradmeshError):
        return type(error)(str(error))
    new = RuntimeError(str(error))
    new.__cause__ = error
    return new


class Misfit(Exception):  # noqa: N818 - converted to a MismatchError with every rank's call
    """The contributions of the ranks do not match."""


@dataclasses.dataclass(slots=True)
class Contribution:
    """One rank's contribution to a call: its name with root and reduce op, its tensors, and its call site."""

    call: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    site: Site
    pieces: object = None  # the tensors that the rank sends and receives, as the call's kernel needs them
    call_check: CallCheck | None = None  # the signature that the ranks compare
    # describes the forward call, if this is its backward
    origin: Callable[[], str] | None = dataclasses.field(default_factory=origin)
    direct: bool = False  # whether the call comes from gradmesh's data path, not from torch.distributed

    def __str__(self) -> str:
        return show_call(self.call, self.inputs, self.outputs, self.site, self.origin)


class Rendezvous(Waitable):
    """One call of a group: the contributions that have arrived, and the missing ranks."""

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.world)
        self.group = group
        self.number = number
        self.parts: dict[int, Contribution] = {}
        # the descriptions of all ranks' calls after a mismatch, if all have a call check
        self.words: list[str] | None = None

    def needs(self) -> Iterable[int]:
        """The ranks that have not arrived."""
        return [rank for place, rank in enumerate(self.group.ranks) if place not in self.parts]

    def show(self, rank: int) -> str:
        """The call of a rank, with its group and line."""
        part = self.parts.get(self.group.ranks.index(rank))
        made = part or "a call on behalf of another rank (the ranks share a module or a graph)"
        return f"{made}  (call {self.number + 1} of {self.group})"

    def withdraw(self) -> bool:
        """Whether a rank is missing, so that the call can be aborted."""
        return len(self.parts) < len(self.group.ranks)

    def work(self, kernel: Callable[[list[Contribution]], None]) -> None:
        """Do the work for all ranks, in the thread of the last one."""
        parts = [self.parts[place] for place in range(len(self.group.ranks))]
        error: BaseException | None = None
        try:
            self._compare([part.call_check for part in parts])
            if any(part.call != parts[0].call for part in parts):
                raise Misfit("the ranks made different calls")
            _torch.in_plain_mode(lambda: kernel(parts))
        except Misfit as misfit:
            self._say(parts)
            error = self._mismatch(str(misfit))
        except Exception as other:
            # A torch kernel raised, such as a bitwise op on floats: every rank must raise.
            error = other
        with self.world.lock:
            self.parts.clear()  # release the tensors
            self._complete(error)

    def _compare(self, call_checks: Sequence[CallCheck | None]) -> None:
        if len({None if call_check is None else call_check.digest for call_check in call_checks}) == 1:
            flags = [call_check.flags for call_check in call_checks if call_check is not None]
            if len(set(flags)) > 1:
                for call_check in call_checks:
                    call_check.peer_flags = flags  # type: ignore[union-attr]  # flags exist, so call checks exist
            return
        raise Misfit("the ranks made different calls")

    def _say(self, parts: Sequence[Contribution]) -> None:
        """Store the description of every rank's call, if all have a call check."""
        if all(part.call_check is not None for part in parts):
            self.words = []
            for part in parts:
                with seen_from(part.site):
                    self.words.append(part.call_check.said() if part.call_check else str(part))

    def _mismatch(self, problem: str) -> MismatchError:
        got = [f"rank {self.group.ranks[place]}  {part}" for place, part in sorted(self.parts.items())]
        return MismatchError.of(
            problem,
            axis=f"{self.group}, its call {self.number + 1}",
            expected="the same call with matching tensors on every rank",
            got="\n".join(got),
            remedy=DIFFERENT_BRANCH,
        )


class Receive(Waitable):
    """A tensor that waits for a message from a peer, or from any rank (`source` None)."""

    def __init__(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> None:
        super().__init__(group.world)
        self.group, self.place, self.source, self.tag, self.part = group, place, source, tag, part
        self.came_from = -1
        self.sent: Contribution | None = None  # the sender's call, once the message has arrived

    def needs(self) -> Iterable[int]:
        """The sender."""
        return [] if self.source is None else [self.group.ranks[self.source]]

    def show(self, rank: int) -> str:  # noqa: ARG002 - only one rank waits for it
        """The call, with its group and line."""
        return f"{self.part}  ({self.group})"

    def withdraw(self) -> bool:
        """Remove it from the posted receives, if no message has arrived."""
        posted = self.group.posted[self.place]
        if self not in posted:
            return False
        posted.remove(self)
        return True

    def fill(self, sent: Message) -> None:
        """Copy the message, and wake the receiver."""
        (tensor,) = self.part.inputs
        error: BaseException | None = None
        if tensor.dtype != sent.tensor.dtype or tensor.numel() != sent.tensor.numel():
            error = mismatched_message(
                str(self.group),
                f"rank {self.group.ranks[sent.source]}  {sent.part}",
                f"rank {self.group.ranks[self.place]}  {self.part}",
            )
        else:
            try:
                _torch.in_plain_mode(lambda: tensor.detach().copy_(sent.tensor.reshape(tensor.shape)))
            except Exception as other:
                error = other
        self.came_from, self.sent = sent.source, sent.part
        with self.world.lock:
            self._complete(error)


@dataclasses.dataclass(slots=True, eq=False)
class Message:
    """A tensor in flight; a copy, since the sender may change the original after `send` returns."""

    source: int
    tag: int
    tensor: Tensor
    part: Contribution


class Group:
    """The shared state of a process group. `place` is a group rank, `rank` a global rank."""

    @classmethod
    def of(cls, world: World, key: object, name: str, ranks: Sequence[int]) -> Group:
        """The group of this key, created by the first rank."""
        with world.lock:
            group: Group = world.shared.setdefault(key, cls(world, name, ranks))
        return group

    def __init__(self, world: World, name: str, ranks: Sequence[int]) -> None:
        self.world = world
        self.name = name
        self.purpose = ""
        self.ranks = list(ranks)
        self.calls = [0] * len(self.ranks)
        self.meetings: dict[int, Rendezvous] = {}
        self.arrived: list[list[Message]] = [[] for _ in self.ranks]
        self.posted: list[list[Receive]] = [[] for _ in self.ranks]

    def __str__(self) -> str:
        ranks = (
            ", ".join(map(str, self.ranks))
            if len(self.ranks) <= 16
            else f"{self.ranks[0]} ... {self.ranks[-1]}"
        )
        return f"group '{self.name}' of ranks {ranks}"

    def meet(
        self,
        place: int,
        part: Contribution,
        kernel: Callable[[list[Contribution]], None],
        *,
        observed: bool = False,
    ) -> Rendezvous:
        """Post a rank's contribution to its next call; the last rank runs the kernel on those of all ranks."""
        world = self.world
        if world.observer is not None and not observed:
            return world.observer.meet(self, place, part, kernel)
        with world.lock:
            if world.stopped is not None:
                raise world.stopped()
            number = self.calls[place]
            self.calls[place] += 1
            meeting = self.meetings.get(number)
            if meeting is None:
                meeting = self.meetings[number] = Rendezvous(self, number)
            meeting.parts[place] = part
            world.events += 1
            complete = len(meeting.parts) == len(self.ranks)
            if complete:
                del self.meetings[number]
        # After a timeout the call is done with an error, which later ranks get too.
        if complete and not meeting.done:
            meeting.work(kernel)
        return meeting

    def send(self, place: int, to: int, tag: int, part: Contribution) -> None:
        """Deliver a message to a waiting receive, or store it."""
        observer = self.world.observer
        if observer is not None:
            observer.send(self, place, to, tag, part)
        else:
            self.hand(place, to, tag, part)

    def hand(self, place: int, to: int, tag: int, part: Contribution) -> None:
        """`send` without the observer."""
        sent = Message(place, tag, _torch.in_plain_mode(part.inputs[0].clone), part)
        with self.world.lock:
            self.world.check()
            self.world.events += 1
            for receive in self.posted[to]:
                if receive.tag == tag and receive.source in (None, place):
                    self.posted[to].remove(receive)
                    break
            else:
                self.arrived[to].append(sent)
                return
        receive.fill(sent)

    def receive(self, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """Receive the first matching message, or wait for it."""
        observer = self.world.observer
        if observer is not None:
            return observer.receive(self, place, source, tag, part)
        return self.take(place, source, tag, part)

    def take(self, place: int, source: int | None, tag: int, part: Contribution) -> Receive:
        """`receive` without the observer."""
        receive = Receive(self, place, source, tag, part)
        with self.world.lock:
            self.world.check()
            self.world.events += 1
            for sent in self.arrived[place]:
                if sent.tag == tag and source in (None, sent.source):
                    self.arrived[place].remove(sent)
                    break
            else:
                self.posted[place].append(receive)
                return receive
        receive.fill(sent)
        return receive


Pieces = Sequence[Tensor | None]


@dataclasses.dataclass(slots=True)
class Exchange:
    """The pieces that a rank sends to and receives from each rank; None: nothing."""

    give: Pieces
    take: Pieces


def _fit(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype


def write(output: Tensor, value: Tensor) -> None:
    """Write a value into a user's tensor, for any layout and mode."""
    if output.layout is torch.sparse_coo:
        output.copy_(value.coalesce())  # without detach(), which would not change the original
        return
    # detach, since autograd forbids writing to some views
    output = output.detach()
    if output.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            output.copy_(value)
    else:
        output.copy_(value)


def exchange(parts: list[Contribution]) -> None:
    """Move every piece to its target rank: implements gather, scatter, broadcast and all_to_all."""
    rounds = {len(part.pieces) for part in parts}  # type: ignore[arg-type]
    if len(rounds) > 1:
        raise Misfit("the ranks passed different numbers of tensors")
    for batch in zip(*(part.pieces for part in parts), strict=True):
        moves = [
            (source, target, batch[source].give[target], batch[target].take[source])
            for target in range(len(parts))
            for source in range(len(parts))
        ]
        # Compare everything before writing anything.
        for source, target, given, taken in moves:
            if not _fit(given, taken):
                raise Misfit(
                    f"group rank {source} sends {_show(given)} to group rank {target}, which expects {_show(taken)}"
                )
        for _, _, given, taken in moves:
            if taken is not None and given is not taken:
                write(taken, given)


def reduce(parts: list[Contribution], *, op: str, root: int | None) -> None:
    """Reduce the inputs over the ranks into the outputs of the root or of all ranks; outputs may be the inputs."""
    tensors = [part.inputs for part in parts]
    _same(tensors)
    targets = parts if root is None else parts[root : root + 1]
    for part in targets:
        if not all(map(_fit, part.inputs, part.outputs)):
            raise Misfit("the output of a rank has a different shape or dtype than the sum")
    for number, of_ranks in enumerate(zip(*tensors, strict=True)):
        value = _reduced(op, list(of_ranks))
        for part in targets:
            write(part.outputs[number], value)


def relay(parts: list[Contribution]) -> None:
    """Copy to each rank the tensor of the rank that its `pieces` name, if any."""
    moves = [(part.outputs[0], parts[part.pieces].inputs[0]) for part in parts if part.pieces is not None]  # type: ignore[call-overload]
    if len({part.inputs[0].dtype for part in parts}) > 1 or not all(_fit(*move) for move in moves):
        raise Misfit("the tensor of a sender and of its receiver differ in shape or dtype")
    for out, given in moves:
        write(out, given)


def reduce_scatter(parts: list[Contribution], *, op: str) -> None:
    """Reduce the pieces for each rank into its output."""
    for number in range(len(parts[0].pieces)):  # type: ignore[arg-type]
        given = [part.pieces[number].give for part in parts]  # type: ignore[index]
        _same(given)
        values = []
        for target, part in enumerate(parts):
            if not _fit(given[0][target], part.outputs[number]):
                raise Misfit("the output of a rank has a different shape or dtype than the pieces for it")
            values.append(_reduced(op, [give[target] for give in given]))
        for part, value in zip(parts, values, strict=True):
            write(part.outputs[number], value)


def _same(of_ranks: Sequence[Sequence[Tensor]]) -> None:
    if len({len(tensors) for tensors in of_ranks}) > 1:
        raise Misfit("the ranks passed different numbers of tensors")
    for tensors in zip(*of_ranks, strict=True):
        if not all(_fit(tensors[0], tensor) for tensor in tensors):
            raise Misfit("the ranks passed tensors of different shapes or dtypes")


def _reduced(op: str, tensors: list[Tensor]) -> Tensor:
    total = functools.reduce(REDUCTIONS[op], tensors)
    if op != "AVG":
        return total
    return averaged(total.clone() if len(tensors) == 1 else total, len(tensors))


def _show(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
