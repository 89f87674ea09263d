"""The engine of a group: starts, advances and completes calls, and shuts the group down.

A call starts when it is made, and advances while the rank waits for anything: calls of a group in order, those of
different groups and messages concurrently. Otherwise a thread advances pending calls (`progress.in_background`). All
state is protected by the engine's lock.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gradmesh import _torch
from gradmesh.backends.shm import progress, waiting
from gradmesh.backends.shm.epochs import Lockstep, RefusedError
from gradmesh.backends.shm.p2p import P2PChannel, Receive, Send
from gradmesh.backends.shm.runs import run
from gradmesh.backends.shm.segment import BROKE, FAILED, LEFT, Segment
from gradmesh.backends.shm.works import AsyncWork, CallWork, MessageWork
from gradmesh.errors import AbortedError, GradmeshError, NotInitializedError, message

__all__ = ["Engine"]

_DRAIN = 5.0
"""Seconds that a rank which leaves the group waits for its pending calls."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """The pending calls and messages of one rank in one group.

    Args:
        segment: the memory of the group.
        name: the group's name, for errors.
        timeout: seconds that a call may wait.

    Attributes:
        queue: the pending calls, in order.
        closed: creates the error for calls on a closed group; None while it is open.
    """

    def __init__(self, segment: Segment, name: str, timeout: float) -> None:
        self.segment = segment
        self.name, self.timeout = name, timeout
        self.spins = waiting.spins(segment.size)
        self.lockstep = Lockstep(segment)
        self.p2p_channel = P2PChannel(segment)
        self.lock = threading.RLock()
        self.queue: deque[CallWork] = deque()
        self.closed: Callable[[], GradmeshError] | None = None
        self._messages: set[MessageWork] = set()
        self._promises: list[AsyncWork] = []
        self._looked = 0.0
        _engines.add(self)
        run.members.add(self)

    def shown(self) -> str:
        """The group and the rank, for errors."""
        return f"group '{self.name}', rank {self.segment.rank} of {self.segment.size}"

    def check(self) -> None:
        """Raise if the group is closed.

        Raises:
            GradmeshError: the group is closed.
        """
        if self.closed is not None:
            raise self.closed()

    # -- starting

    def post(self, work: CallWork, *, opened: bool = False, background: bool = False) -> None:
        """Start a call and advance it as far as possible.

        Args:
            work: the call.
            opened: whether its first epoch is already published.
            background: whether the progress thread should advance it, because the caller may not wait soon.
        """
        with self.lock:
            self.check()
            self.queue.append(work)
            if (len(self.queue) == 1 and not opened) or self.lockstep.arrived():
                self._advance()
            if self.queue:
                progress.busy(self)
                work.shown.started()  # only now, since the call site costs time
                if background:
                    progress.in_background(self)

    def send(self, work: MessageWork, send: Send) -> None:
        """Start to send."""
        self._message(work, partial(self.p2p_channel.send, send))

    def receive(self, work: MessageWork, receive: Receive) -> None:
        """Start to receive."""
        self._message(work, partial(self.p2p_channel.receive, receive))

    def _message(self, work: MessageWork, begin: Callable[[], None]) -> None:
        with self.lock:
            self.check()
            work.under_way.ended = work.settle
            _torch.in_plain_mode(begin)
            if not work.over:
                self._messages.add(work)
                progress.busy(self)
                work.shown.started()
                progress.in_background(self)

    def settled(self, work: MessageWork) -> None:
        """Remove a completed message."""
        self._messages.discard(work)

    def promised(self, work: AsyncWork) -> None:
        """Advance a call in the background, because its future was requested. The caller holds the lock."""
        self._promises.append(work)
        progress.busy(self)
        progress.in_background(self)

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

        Args:
            in_call: the caller waits for the first call of this group, and advances it itself.
            in_message: the caller waits for a message of this group.
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
            progress.idle(self)
            if run.over:
                self.segment.publish_returned()

    def sleep_on(self) -> tuple[int, int] | None:
        """The address and value of the word whose change allows progress; None if there are several."""
        if self.p2p_channel.busy:
            return self.p2p_channel.only_word() if not self.queue else None
        return self.lockstep.late_word() or (
            self.segment.word(0),
            -1,
        )  # differs from the actual value, so that futex.wait returns immediately

    # -- waiting

    def finish(self, work: CallWork, seconds: float | None) -> None:
        """Wait until a call has completed."""
        seconds = self.timeout if seconds is None else seconds
        lockstep = self.lockstep
        with progress.waiting(self):
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

        with progress.waiting(self):
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
        try:
            waiting.until(ready, word, needs, self, seconds, call, in_call=in_call)
        except BaseException as error:
            self.abort_group(error)
            raise

    # -- failure detection for calls that no thread waits for

    def _time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < progress.LOOK:
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
                self.abort_group(waiting.late(self.segment, ranks, self.timeout, work.shown()))
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
            progress.idle(self)

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
    progress.reset_after_fork()
    for engine in list(_engines):
        engine.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
