"""The engine of a group: starts, advances and completes calls, and shuts the group down.

A call starts when it is made, and advances while the rank waits for anything: calls of a group in order, those of
different groups and messages concurrently. Otherwise a thread advances pending calls (`in_background`). All state is
protected by the engine's lock.

While a rank waits for one group, it advances pending calls of its other groups: otherwise two ranks could each wait for
a call that the other has started but not finished.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import sched_yield
from typing import Any

import torch
from typing_extensions import override

from gradmesh import _torch
from gradmesh.backends.own_group import (
    FLAGS,
    SAME_CALLS,
    CallCheck,
    OwnWork,
    Promise,
    Shown,
    Steps,
    completed,
    timed_out_text,
)
from gradmesh.backends.shm import shared_memory
from gradmesh.backends.shm.p2p import P2PChannel, Receive, Send, misfit
from gradmesh.backends.shm.shared_memory import BROKE, FAILED, LEFT, Segment, Slots, run
from gradmesh.errors import AbortedError, DeadlockError, GradmeshError, NotInitializedError, message

LOOK = 0.05
"""Seconds between two checks of the other processes."""
PAUSE = 0.002
"""Seconds between two polls if there is no single word to sleep on."""

_lock = threading.Lock()
UNFINISHED: weakref.WeakSet[Engine] = weakref.WeakSet()
"""The groups with pending calls."""
_waited_for: list[Engine] = []


def busy(engine: Engine) -> None:
    """Register a group with pending calls."""
    with _lock:
        UNFINISHED.add(engine)


def idle(engine: Engine) -> None:
    """Unregister a group without pending calls."""
    with _lock:
        UNFINISHED.discard(engine)


def unfinished() -> list[Engine]:
    """The groups with pending calls."""
    with _lock:
        return list(UNFINISHED)


def progress(waiting: Engine | None = None, in_call: bool = False) -> bool:
    """Advance the pending calls of all groups; returns whether there are any besides the awaited one."""
    others = False
    for engine in unfinished():
        mine = engine is waiting
        others |= engine.poll(in_call=mine and in_call, in_message=mine and not in_call)
    return others


@contextlib.contextmanager
def waiting(engine: Engine) -> Iterator[None]:
    """The calling thread waits for this group within the block, and advances its calls."""
    with _lock:
        _waited_for.append(engine)
    try:
        yield
    finally:
        with _lock:
            _waited_for.remove(engine)
            left = engine in UNFINISHED
        if left:
            _helper.resume()


def _unattended() -> list[Engine]:
    """The groups with pending calls that no thread waits for."""
    with _lock:
        return [engine for engine in UNFINISHED if engine not in _waited_for]


def _poll_unattended() -> None:
    # A function of its own: the variables of the progress thread's loop would keep the last group.
    for engine in _unattended():
        with contextlib.suppress(Exception):  # the waiter of the call gets the error
            engine.poll()


class _Helper:
    """The progress thread, which takes over if no thread waits; started on first use.

    It sleeps on the word of the next call, so that it wakes when the other ranks have published, and periodically to
    check whether they are alive. It sleeps indefinitely if other threads wait for all pending calls.
    """

    def __init__(self) -> None:
        self.needed = threading.Event()
        self.over = False
        self.starting = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="gradmesh shm", daemon=True)
        self.version = 0
        self.asleep_on: int | None = None

    def need(self, asleep_on: int | None = None) -> None:
        """Take over a new pending call, whose word to sleep on is given."""
        self.version += 1
        if not self.needed.is_set():
            self.needed.set()
        elif self.asleep_on not in (None, asleep_on):
            self._wake()
        if self.thread.ident is None:
            with self.starting:
                if self.thread.ident is None:
                    self.thread.start()
                    atexit.register(self.end)

    def resume(self) -> None:
        """Take over again, if the thread has been started."""
        if self.thread.ident is not None:
            self.needed.set()

    def end(self) -> None:
        """Stop at process exit."""
        self.over = True
        self.needed.set()
        self._wake()
        self.thread.join(1)

    def _wake(self) -> None:
        address = self.asleep_on
        if address is not None:
            shared_memory.wake(address)

    def _run(self) -> None:
        while True:
            self.needed.wait()
            if self.over:
                return
            version = self.version
            _poll_unattended()
            engines = _unattended()
            if engines:
                self._sleep(engines, version)
                continue
            self.needed.clear()
            # A call may have been started, or abandoned by its waiter, since the last check.
            if version != self.version or _unattended():
                self.needed.set()

    def _sleep(self, engines: list[Engine], version: int) -> None:
        word = engines[0].sleep_on() if len(engines) == 1 else None
        if word is None:
            time.sleep(PAUSE)
            return
        try:
            self.asleep_on = word[0]
            if version == self.version and not self.over:
                shared_memory.wait(*word, LOOK)
        finally:
            self.asleep_on = None


_helper = _Helper()


def in_background(engine: Engine) -> None:
    """Advance the pending calls of this group in the progress thread."""
    word = engine.sleep_on()
    _helper.need(None if word is None else word[0])


_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_WORDS = 4096
"""Maximum bytes of a rank's description of a mismatched call."""


class Lockstep:
    """The epochs of a group on one rank: all ranks publish data, then read that of the others.

    A rank has a line and a chunk of shared memory for odd epochs, and others for even ones. It writes one, publishes,
    waits until all ranks have published, and reads those of all. Before it writes a line or a chunk again it has waited
    for a later epoch, which no rank publishes before having read the earlier one, so that a second barrier is not
    needed. What is in them belongs to one epoch alone, so that the paths in Python and C may alternate in any way.

    In the first epoch of a call each rank also publishes the call's hash, and all compare. So mismatched calls raise on
    every rank before a result is written.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rank, self.size = segment.rank, segment.size
        self.epoch = 0

    def publish(self) -> bool:
        """Publish what was written; returns whether all ranks have published."""
        self.epoch += 1
        shared_memory.fence()
        self.segment.published[self.epoch & 1][self.rank] = self.epoch
        shared_memory.wake(self.segment.word(self.rank, self.epoch))
        return self.arrived()

    def look(self, looks: int) -> bool:
        """Poll up to `looks` times; returns whether all ranks have published this epoch."""
        for _ in range(looks):
            if self.arrived():
                return True
            sched_yield()
        return False

    def counts(self) -> memoryview:
        """The counts of the last published epoch: one row of 2 * size per rank."""
        return self.segment.counts[self.epoch & 1]

    def agree(self, call_hash: int, call_check: CallCheck | None) -> bool:
        """Whether all ranks published this hash; flags that differ are passed to the call check."""
        hashes = self.segment.hashes[self.epoch & 1].tolist()
        if hashes.count(call_hash) == self.size:
            return True
        if call_check is None or any((other ^ call_hash) & ~FLAGS for other in hashes):
            return False
        call_check.peer_flags = [other & FLAGS for other in hashes]
        return True

    def arrived(self) -> bool:
        """Whether all ranks have published this epoch."""
        if min(self.segment.published[self.epoch & 1].tolist()) < self.epoch:
            return False
        shared_memory.fence()
        return True

    def late(self) -> list[int]:
        """The ranks that have not published this epoch."""
        published = self.segment.published[self.epoch & 1].tolist()
        return [rank for rank, epoch in enumerate(published) if epoch < self.epoch]

    def late_word(self) -> tuple[int, int] | None:
        """The word of such a rank, and its value."""
        for rank, epoch in enumerate(self.segment.published[self.epoch & 1].tolist()):
            if epoch < self.epoch:
                return self.segment.word(rank, self.epoch), epoch
        return None


class Call:
    """One call of this rank, by its hash; `opened`: its first epoch is already written and published."""

    def __init__(
        self, lockstep: Lockstep, call_hash: int, call_check: CallCheck, *, opened: bool = False
    ) -> None:
        self.lockstep = lockstep
        self.call_hash = call_hash & _64_BITS
        self.call_check = call_check
        self.agreed = False
        self.opened = opened

    def slots(self, dtype: torch.dtype, count: int, even: bool = True) -> Slots:
        """Where the next epoch's data is, for `count` elements of each rank; `even`: all have the same count."""
        return self.lockstep.segment.slots(dtype, count, even)[(self.lockstep.epoch + (not self.opened)) & 1]

    def counts(self, counts: Sequence[int]) -> None:
        """Publish counts with the first epoch."""
        if not self.opened:
            lockstep = self.lockstep
            row, table = 2 * lockstep.size * lockstep.rank, lockstep.segment.counts[(lockstep.epoch + 1) & 1]
            table[row : row + len(counts)] = memoryview(array("Q", counts))

    def meet(self) -> Steps:
        """Publish an epoch, the first one with the call's hash; continue when all ranks have, if they agree."""
        lockstep = self.lockstep
        if self.agreed:
            if not lockstep.publish():
                yield
            return
        if self.opened:
            self.opened = False
            if not lockstep.arrived():
                yield
        else:
            lockstep.segment.hashes[(lockstep.epoch + 1) & 1][lockstep.rank] = self.call_hash
            if not lockstep.publish():
                yield
        self.agreed = True
        if not lockstep.agree(self.call_hash, self.call_check):
            yield from self.refuse()

    def refuse(self) -> Steps:
        """Exchange descriptions of the call, and raise RefusedError with those of all ranks."""
        lockstep = self.lockstep
        buffer = (lockstep.epoch + 1) & 1
        chunks = [lockstep.segment.raw_slot(rank, buffer) for rank in range(lockstep.size)]
        said = self.call_check.said().encode()[:_WORDS]
        chunks[lockstep.rank][:_WORDS] = said.ljust(_WORDS)
        if not lockstep.publish():
            yield
        words = [bytes(chunk[:_WORDS]).decode(errors="replace").rstrip() for chunk in chunks]
        raise RefusedError(self.call_check.refusal(words))


class RefusedError(Exception):
    """All ranks reject a mismatched call; the group remains usable. The argument is the error to raise."""


class AsyncWork(OwnWork):
    """The base class of calls and messages; the engine completes them."""

    def __init__(
        self, engine: Engine, result: object, shown: Shown, complete: Callable[[Any, float | None], None]
    ) -> None:
        super().__init__(result)
        self.engine, self.shown, self._complete = engine, shown, complete
        self.over = False  # has completed or failed; set last
        self.promise: Promise | None = None  # of the future that was requested at the time `asked`
        self.asked = 0.0

    def end(self, error: BaseException | None = None) -> None:
        """Mark it as completed or failed. The caller holds the engine's lock."""
        self.error = error
        self.over = True
        promise, self.promise = self.promise, None
        if promise is not None:
            if error is None:
                promise.keep(self.given)
            else:
                promise.fail(error)

    @override
    def is_over(self) -> bool:
        if not self.over:
            progress()
        return self.over

    @override
    def finish(self, seconds: float | None) -> None:
        if not self.over:
            self._complete(self, seconds)
        if self.error is not None:
            raise self.error

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is completed with the call, which the progress thread advances."""
        with self.engine.lock:
            if not self.over:
                if self.promise is None:
                    self.promise, self.asked = Promise(), time.monotonic()
                    self.future = self.promise.future
                    self.engine.promised(self)
                return self.promise.future
        if self.error is None:
            return completed(self.given)
        failed = Promise()
        failed.fail(self.error)
        return failed.future


class CallWork(AsyncWork):
    """A pending collective of one rank."""

    def __init__(self, engine: Engine, steps: Steps, result: object, inference: bool, shown: Shown) -> None:
        super().__init__(engine, result, shown, engine.finish)
        self.steps = steps
        self.inference = inference

    @override
    def late(self) -> list[int]:
        return self.engine.lockstep.late()


class MessageWork(AsyncWork):
    """A pending message of one rank."""

    def __init__(self, engine: Engine, under_way: Send | Receive, result: object, shown: Shown) -> None:
        super().__init__(engine, result, shown, engine.deliver)
        self.under_way = under_way

    def settle(self) -> None:
        """Complete it if the message has been sent or received. The caller holds the engine's lock."""
        if self.under_way.done and not self.over:
            unfit = isinstance(self.under_way, Receive) and self.under_way.misfit is not None
            self.end(misfit(self.under_way, self.engine.name) if unfit else None)  # type: ignore[arg-type]
            self.engine.settled(self)

    @override
    def is_over(self) -> bool:
        if not super().is_over():
            self.engine.check_peer(self)
        return self.over

    @override
    def late(self) -> list[int]:
        return list(self.engine.p2p_channel.needs(self.under_way))

    @override
    def source_rank(self) -> int:
        """The sender of the received message, -1 before that."""
        return self.under_way.came_from if isinstance(self.under_way, Receive) else -1

    _source_rank = source_rank


_SLICE = 0.0005
"""Maximum seconds per sleep while the rank has pending calls on other groups."""
_PAUSES = 200
"""How often native.c looks before it yields its core, where each rank has one."""
_SPINS = 300
_SPINS_OVERSUBSCRIBED = 50

_most_ranks = 1


def spins(ranks: int) -> int:
    """The number of spins before sleeping; depends on the size of the process's largest group."""
    global _most_ranks
    _most_ranks = max(_most_ranks, ranks)
    return _SPINS if _most_ranks <= len(os.sched_getaffinity(0)) else _SPINS_OVERSUBSCRIBED


def late(segment: Segment, needs: Sequence[int], seconds: float, call: str) -> DeadlockError:
    """The error of a call that timed out."""
    peers = segment.peers
    segment.blame = needs[0]
    names = ", ".join(peers.name(rank) for rank in needs).rstrip(",")
    return DeadlockError.of(
        timed_out_text([peers.names[rank] for rank in needs], seconds),
        axis=peers.shown,
        expected=f"the same call on rank {names}",
        got=call,
        remedy=f"check what that rank does instead: {SAME_CALLS}; or set a longer timeout for the group",
    )


_DRAIN = 5.0
"""Seconds that a rank which leaves the group waits for its pending calls."""


class Engine:
    """The pending calls and messages of one rank in one group; a call may wait for `timeout` seconds."""

    def __init__(self, segment: Segment, name: str, timeout: float) -> None:
        self.segment = segment
        self.name, self.timeout = name, timeout
        self.spins = spins(segment.size)
        self.pauses = _PAUSES if self.spins == _SPINS else 0
        self.lockstep = Lockstep(segment)
        self.p2p_channel = P2PChannel(segment)
        self.lock = threading.RLock()
        self.queue: deque[CallWork] = deque()
        # creates the error for calls on a closed group
        self.closed: Callable[[], GradmeshError] | None = None
        self._messages: set[MessageWork] = set()
        self._promises: list[AsyncWork] = []
        self._looked = 0.0
        run.engines.add(self)

    def shown(self) -> str:
        """The group and the rank, for errors."""
        return f"group '{self.name}', rank {self.segment.rank} of {self.segment.size}"

    def check(self) -> None:
        """Raise if the group is closed."""
        if self.closed is not None:
            raise self.closed()

    # -- starting

    def complete(self, steps: Steps) -> bool:
        """Make a call while no other is pending; returns whether it is complete, or the other ranks are late."""
        try:
            for _ in steps:
                if not self.lockstep.look(self.spins):
                    return False
        except RefusedError as refused:
            raise refused.args[0] from None
        except BaseException as error:
            self.abort_group(error)
            raise
        return True

    def post(self, work: CallWork, *, opened: bool = False, background: bool = False) -> None:
        """Start a call and advance it as far as possible; in the background too if the caller may not wait soon."""
        with self.lock:
            self.check()
            self.queue.append(work)
            if (len(self.queue) == 1 and not opened) or self.lockstep.arrived():
                self._advance()
            if self.queue:
                busy(self)
                work.shown.started()  # only now, since the call site costs time
                if background:
                    in_background(self)

    def post_message(self, work: MessageWork) -> None:
        """Start to send or receive."""
        under_way = work.under_way
        begin = self.p2p_channel.send if isinstance(under_way, Send) else self.p2p_channel.receive
        with self.lock:
            self.check()
            under_way.ended = work.settle
            _torch.in_plain_mode(partial(begin, under_way))  # type: ignore[arg-type]  # one of the two
            if not work.over:
                self._messages.add(work)
                busy(self)
                work.shown.started()
                in_background(self)

    def settled(self, work: MessageWork) -> None:
        """Remove a completed message."""
        self._messages.discard(work)

    def promised(self, work: AsyncWork) -> None:
        """Advance a call in the background, because its future was requested. The caller holds the lock."""
        self._promises.append(work)
        busy(self)
        in_background(self)

    # -- progress

    def _advance(self) -> None:
        """Advance the calls in order as far as possible. The caller holds the lock."""
        queue = self.queue
        while queue:
            work = queue[0]
            if torch.is_inference_mode_enabled() == work.inference:
                over = self._step(work)
            else:  # the current thread may be in a different inference mode than the call
                with torch.inference_mode(work.inference):
                    over = self._step(work)
            if not over:
                return
            queue.popleft()

    def _step(self, work: CallWork) -> bool:
        """Run a call until it must wait; returns whether it has completed."""
        try:
            over: bool = _torch.in_plain_mode(partial(next, work.steps, True))
        except RefusedError as refused:
            work.end(refused.args[0])
            return True
        except BaseException as error:
            self.abort_group(error)
            raise
        if over:
            work.end()
        return over

    def _progress_mail(self) -> None:
        inference = self.p2p_channel.inference
        if torch.is_inference_mode_enabled() == inference:
            _torch.in_plain_mode(self.p2p_channel.progress)
        else:
            with torch.inference_mode(inference):
                _torch.in_plain_mode(self.p2p_channel.progress)

    def poll(self, in_call: bool = False, in_message: bool = False) -> bool:
        """Advance calls and messages; returns whether something is pending besides what the caller waits for.

        It may wait for the first call of this group, which it advances itself (`in_call`), or for a message.
        """
        if not self.lock.acquire(blocking=False):
            return False  # another thread advances them
        try:
            if self.closed is not None:
                return False
            if self.p2p_channel.busy:
                self._progress_mail()
            if in_call:
                return self.p2p_channel.busy
            self._look()
            if self.queue and self.lockstep.arrived():
                self._advance()
            self._rest()
            return bool(self.queue) or self.p2p_channel.under_way > int(in_message)
        except Exception as error:
            self.abort_group(error)  # surface the error to waiters of this group only
            return False
        finally:
            self.lock.release()

    def _rest(self) -> None:
        if not self.queue and not self.p2p_channel.busy:
            idle(self)
            if run.over:
                self.segment.publish_returned()

    def sleep_on(self) -> tuple[int, int] | None:
        """The address and value of the word whose change allows progress; None if there are several."""
        if self.p2p_channel.busy:
            return self.p2p_channel.only_word() if not self.queue else None
        # -1 differs from the actual value, so that `wait` returns immediately.
        return self.lockstep.late_word() or (self.segment.word(0, 0), -1)

    # -- waiting

    def finish(self, work: CallWork, seconds: float | None) -> None:
        """Wait until a call has completed."""
        seconds = self.timeout if seconds is None else seconds
        lockstep = self.lockstep
        with waiting(self):
            while not work.over:
                with self.lock:
                    if work.over:
                        return
                    self.check()
                    first = self.queue[0]
                # Another thread of the rank may advance the call.
                self._wait(
                    lambda: work.over or lockstep.arrived(),
                    lockstep.late_word,
                    lockstep.late,
                    seconds,
                    first.shown,
                    True,
                )
                with self.lock:
                    if self.queue and lockstep.arrived():
                        self._advance()
                    self._rest()

    def deliver(self, work: MessageWork, seconds: float | None) -> None:
        """Wait until a message has been sent or received."""
        seconds = self.timeout if seconds is None else seconds
        p2p_channel, under_way = self.p2p_channel, work.under_way

        def ready() -> bool:
            with self.lock:
                if not work.over:
                    self.check()
                    self._progress_mail()
            return work.over

        with waiting(self):
            word, needs = partial(p2p_channel.sleep_on, under_way), partial(p2p_channel.needs, under_way)
            self._wait(ready, word, needs, seconds, work.shown, False)
            with self.lock:
                self._rest()

    def _wait(
        self,
        ready: Callable[[], bool],
        word: Callable[[], tuple[int, int] | None],
        needs: Callable[[], Sequence[int]],
        seconds: float,
        call: Callable[[], str],
        in_call: bool,
    ) -> None:
        """Wait until `ready`, for a collective or a message; any error aborts the group.

        Before, the `word` at an address changes from its current value, if there is one; `needs` are the ranks that it
        depends on, and `call` describes it.

        The rank spins for a short time, then sleeps in the kernel. While spinning it yields its core to its peers: with
        four ranks on two cores that halves the time of a barrier, compared with sleeping immediately. While sleeping it
        wakes every 50 ms to check whether the others are alive and whether it has timed out; the awaited event wakes it
        immediately. (Spinning before sleeping is competitive: if the spin takes as long as a sleep costs, it takes at
        most twice the time of the better of the two. Karlin, Li, Manasse, Owicki 1991, "Empirical studies of
        competitive spinning for a shared-memory multiprocessor".)
        """
        try:
            for _ in range(self.spins):
                if ready():
                    return
                sched_yield()
            segment = self.segment
            start = looked = time.monotonic()
            while True:
                others = bool(unfinished()) and progress(self, in_call)
                sleep = word()
                if ready():
                    return
                if sleep is None or others:
                    time.sleep(_SLICE) if sleep is None else shared_memory.wait(*sleep, _SLICE)
                else:
                    shared_memory.wait(*sleep, min(LOOK, max(0.0, start + seconds - time.monotonic())))
                if ready():
                    return
                now = time.monotonic()
                if now - looked >= LOOK or segment.has_failures(needs()):
                    looked = now
                    gone_error = segment.missing(needs(), call)
                    # The rank may have published and left between the two checks.
                    if gone_error is not None and not ready():
                        raise gone_error
                if now - start > seconds and not ready():
                    timeout = late(segment, needs() or segment.peers.others, seconds, call())
                    segment.publish_state(BROKE)
                    raise timeout
        except BaseException as error:
            self.abort_group(error)
            raise

    # -- failure detection for calls that no thread waits for

    def _time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        return True

    def _look(self) -> None:
        """Periodically check whether pending calls can still complete, since polling never waits. Under the lock."""
        if not self._time_to_look():
            return
        if self.queue:
            gone_error = self.segment.missing(self.lockstep.late(), self.queue[0].shown)
            if gone_error is not None and not self.lockstep.arrived():
                self.abort_group(gone_error)
                return
        self._promises = [work for work in self._promises if not work.over]
        for work in self._promises:
            if isinstance(work, MessageWork):
                self._check_peer(work)
            if not work.over and self._looked - work.asked > self.timeout:
                ranks = work.late() or self.segment.peers.others
                self.abort_group(late(self.segment, ranks, self.timeout, work.shown()))
                return

    def check_peer(self, work: MessageWork) -> None:
        """Periodically check whether a polled message can still complete."""
        with self.lock:
            if not work.over and self._time_to_look():
                self._check_peer(work)

    def _check_peer(self, work: MessageWork) -> None:
        gone_error = self.segment.missing(self.p2p_channel.needs(work.under_way), work.shown)
        if gone_error is not None:
            self._progress_mail()  # it may have arrived before its sender exited
            if not work.over:
                work.end(gone_error)
                self._messages.discard(work)

    # -- shutdown

    def abort_group(self, error: BaseException) -> None:
        """Abort the group: after an error inside a call the ranks are out of sync."""
        text = f"{type(error).__name__}: {error}"
        self.segment.publish_state(BROKE)
        over = message("the group was aborted by an earlier error", axis=self.shown(), got=text)
        self._end(partial(AbortedError, over), error if isinstance(error, GradmeshError) else None)

    def _over(self, why: str, remedy: str) -> Callable[[], GradmeshError]:
        over = message(f"the group is closed: {why}", axis=self.shown(), remedy=remedy)
        return partial(NotInitializedError, over)

    def _end(self, closed: Callable[[], GradmeshError], error: GradmeshError | None = None) -> None:
        with self.lock:
            if self.closed is None:
                self.closed = closed
            for work in (*self.queue, *self._messages):
                work.end(error or closed())
            self.queue.clear()
            self._messages.clear()
            self._promises.clear()
            idle(self)

    def leave(self) -> None:
        """Leave the group after pending calls have completed."""
        with self.lock:
            if self.closed is None:
                try:
                    for work in list(self.queue):
                        self.finish(work, min(_DRAIN, self.timeout))
                except GradmeshError:
                    pass  # a peer is gone, and the results are not needed
                self.segment.publish_state(LEFT)
                self._end(
                    self._over("this rank has left it", "create a new group with torch.distributed.new_group")
                )
                self.segment.close()

    def abort(self) -> None:
        """Leave the group immediately; calls of other ranks fail."""
        self.segment.publish_state(BROKE)
        self.leave()

    def run_over(self, failed: bool) -> None:
        """Publish that this rank's function has returned or failed; after pending calls have completed."""
        if failed:
            self.segment.publish_state(FAILED)
            return
        with self.lock:
            if self.closed is None:
                self._rest()

    def reset_after_fork(self) -> None:
        """Reset inherited state after fork: the group belongs to the parent."""
        self.lock = threading.RLock()
        self.segment.reset_after_fork()
        self.closed = self._over(
            "it belongs to the parent of this forked process",
            "start ranks with gradmesh.launch or torchrun instead of fork",
        )
        self.queue.clear()
        self._messages.clear()
        self._promises.clear()


def _reset_after_fork() -> None:
    global _lock, _helper
    _lock, _helper = threading.Lock(), _Helper()
    UNFINISHED.clear()
    _waited_for.clear()
    for engine in list(run.engines):
        engine.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
