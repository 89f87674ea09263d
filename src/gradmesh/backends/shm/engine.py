"""The engine of a group: calls that were begun, going on with them, finishing them, and the end of the group.

A call is begun when it is made, and goes on while the rank waits for it or for anything else: the calls of a group in
order, those of different groups side by side, messages beside all of them. What the rank leaves unfinished is taken on
by a thread (`progress.in_background`). Everything is touched under the lock of the engine, by whichever thread goes on.
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
from gradmesh.backends.shm.p2p import P2PChannel, Receive, Send
from gradmesh.backends.shm.phases import Lockstep, RefusedError
from gradmesh.backends.shm.runs import run
from gradmesh.backends.shm.segment import BROKE, FAILED, LEFT, Segment
from gradmesh.backends.shm.works import AsyncWork, CallWork, MessageWork
from gradmesh.errors import AbortedError, GradmeshError, NotInitializedError, message

__all__ = ["Engine"]

_DRAIN = 5.0
"""Seconds that a rank which leaves gives to calls that it began and never waited for."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """What one rank has under way in one group.

    Args:
        segment: the memory of the group.
        name: the group's name, for error texts.
        timeout: the seconds that a call may wait.

    Attributes:
        queue: the calls that were begun and are not over, in order.
        closed: makes the error for calls on a group that is over; None while it is not.
    """

    def __init__(self, segment: Segment, name: str, timeout: float) -> None:
        self.segment = segment
        self.name, self.timeout = name, timeout
        self.spins = waiting.spins(segment.size)
        self.lockstep = Lockstep(segment)
        self.mail = P2PChannel(segment)
        self.lock = threading.RLock()
        self.queue: deque[CallWork] = deque()
        self.closed: Callable[[], GradmeshError] | None = None
        self._messages: set[MessageWork] = set()
        self._promises: list[AsyncWork] = []
        self._looked = 0.0
        _engines.add(self)
        run.members.add(self)

    def shown(self) -> str:
        """The group and the rank, for error texts."""
        return f"group '{self.name}', rank {self.segment.rank} of {self.segment.size}"

    def check(self) -> None:
        """Refuse calls on a group that is over.

        Raises:
            GradmeshError: it is.
        """
        if self.closed is not None:
            raise self.closed()

    # -- beginning

    def post(self, work: CallWork, *, opened: bool = False, background: bool = False) -> None:
        """Begin a call: it goes as far as it can at once.

        Args:
            work: the call.
            opened: its first phase has been published already.
            background: nobody may come to wait for it soon.
        """
        with self.lock:
            self.check()
            self.queue.append(work)
            if (len(self.queue) == 1 and not opened) or self.lockstep.arrived():
                self._go_on()
            if self.queue:
                progress.busy(self)
                work.shown.started()  # now that there is time
                if background:
                    progress.in_background(self)

    def send(self, work: MessageWork, send: Send) -> None:
        """Begin to send."""
        self._message(work, partial(self.mail.send, send))

    def receive(self, work: MessageWork, receive: Receive) -> None:
        """Begin to receive."""
        self._message(work, partial(self.mail.receive, receive))

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
        """Take note of a message that has gone, or come."""
        self._messages.discard(work)

    def promised(self, work: AsyncWork) -> None:
        """See to a call without being asked again: somebody has its future. The caller holds the lock."""
        self._promises.append(work)
        progress.busy(self)
        progress.in_background(self)

    # -- going on

    def _go_on(self) -> None:
        """Take the calls in order as far as they go, after what the first waited for. The caller holds the lock."""
        queue = self.queue
        while queue:
            work = queue[0]
            if torch.is_inference_mode_enabled() == work.inference:
                over = self._step(work)
            else:  # whatever the caller's mode is, who may have begun another call
                with torch.inference_mode(work.inference):
                    over = self._step(work)
            if not over:
                return
            queue.popleft()

    def _step(self, work: CallWork) -> bool:
        """Run a call until it has to wait; whether it is over."""
        try:
            over: bool = _torch.in_plain_mode(partial(next, work.steps, True))
        except RefusedError as refused:
            work.end(refused.args[0])
            return True
        except BaseException as error:
            self.give_up(error)
            raise
        if over:
            work.end()
        return over

    def _progress_mail(self) -> None:
        inference = self.mail.inference
        if torch.is_inference_mode_enabled() == inference:
            _torch.in_plain_mode(self.mail.progress)
        else:
            with torch.inference_mode(inference):
                _torch.in_plain_mode(self.mail.progress)

    def poll(self, in_call: bool = False, in_message: bool = False) -> bool:
        """Go on with what can go on; whether something is unfinished besides what the caller waits for.

        Args:
            in_call: the caller waits for the first call of this group, and goes on with it itself.
            in_message: the caller waits for a message of this group.
        """
        if not self.lock.acquire(blocking=False):
            return False  # another thread is at it
        try:
            if self.closed is not None:
                return False
            if self.mail.busy:
                self._progress_mail()
            if in_call:
                return self.mail.busy
            self._look()
            if self.queue and self.lockstep.arrived():
                self._go_on()
            self._rest()
            return bool(self.queue) or self.mail.under_way > int(in_message)
        except Exception as error:
            self.give_up(error)  # whoever waits for this group hears of it, and not who waits for another one
            return False
        finally:
            self.lock.release()

    def _rest(self) -> None:
        if not self.queue and not self.mail.busy:
            progress.idle(self)
            if run.over:
                self.segment.say_returned()

    def sleep_on(self) -> tuple[int, int] | None:
        """The word that changes when something can go on, and its value; None if there is no single one."""
        if self.mail.busy:
            return self.mail.only_word() if not self.queue else None
        return self.lockstep.late_word() or (
            self.segment.word(0),
            -1,
        )  # which it is not, so that nobody sleeps

    # -- waiting

    def finish(self, work: CallWork, seconds: float | None) -> None:
        """Wait until a call is over."""
        seconds = self.timeout if seconds is None else seconds
        lockstep = self.lockstep
        with progress.waiting(self):
            while not work.over:
                with self.lock:
                    if work.over:
                        return
                    self.check()
                    first = self.queue[0]
                # Another thread of the rank may be the one that goes on.
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
                        self._go_on()
                    self._rest()

    def deliver(self, work: MessageWork, seconds: float | None) -> None:
        """Wait until a message has gone, or come."""
        seconds = self.timeout if seconds is None else seconds
        mail, under_way = self.mail, work.under_way

        def ready() -> bool:
            with self.lock:
                if not work.over:
                    self.check()
                    self._progress_mail()
            return work.over

        with progress.waiting(self):
            word, needs = partial(mail.sleep_on, under_way), partial(mail.needs, under_way)
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
            self.give_up(error)
            raise

    # -- looking after calls for which nobody waits in here

    def _time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < progress.LOOK:
            return False
        self._looked = now
        return True

    def _look(self) -> None:
        """Now and then see whether what was begun can still end; who only polls never waits. Under the lock."""
        if not self._time_to_look():
            return
        if self.queue:
            gone = self.segment.missing(self.lockstep.late(), self.queue[0].shown)
            if gone is not None and not self.lockstep.arrived():
                self.give_up(gone)
                return
        self._promises = [work for work in self._promises if not work.over]
        for work in self._promises:
            if isinstance(work, MessageWork):
                self._lose(work)
            if not work.over and self._looked - work.asked > self.timeout:
                ranks = work.late() or self.segment.peers.others
                self.give_up(waiting.late(self.segment, ranks, self.timeout, work.shown()))
                return

    def look_after(self, work: MessageWork) -> None:
        """Now and then see whether a message that is only polled can still go, or come."""
        with self.lock:
            if not work.over and self._time_to_look():
                self._lose(work)

    def _lose(self, work: MessageWork) -> None:
        gone = self.segment.missing(self.mail.needs(work.under_way), work.shown)
        if gone is not None:
            self._progress_mail()  # it may have come before its sender went
            if not work.over:
                work.end(gone)
                self._messages.discard(work)

    # -- ending

    def give_up(self, error: BaseException) -> None:
        """After an error in the middle of a call the ranks are out of step: nothing works any more."""
        text = f"{type(error).__name__}: {error}"
        self.segment.say(BROKE)
        over = message("the group is over: an earlier call failed", axis=self.shown(), got=text)
        self._end(partial(AbortedError, over), error if isinstance(error, GradmeshError) else None)

    def _over(self, why: str, remedy: str) -> Callable[[], GradmeshError]:
        over = message(f"the group is over: {why}", axis=self.shown(), remedy=remedy)
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
        """Leave the group, when what was begun is over."""
        with self.lock:
            if self.closed is None:
                try:
                    for work in list(self.queue):
                        self.finish(work, min(_DRAIN, self.timeout))
                except GradmeshError:
                    pass  # whoever is missing has gone, and nobody waits for the result
                self.segment.say(LEFT)
                self._end(self._over("this rank has left it", "make a new group"))
                self.segment.close()

    def abort(self) -> None:
        """Leave the group at once; the others' calls fail."""
        self.segment.say(BROKE)
        self.leave()

    def run_over(self, failed: bool) -> None:
        """Say that this rank's function is over; if it left calls under way, as soon as these are."""
        if failed:
            self.segment.say(FAILED)
            return
        with self.lock:
            if self.closed is None:
                self._rest()

    def forget(self) -> None:
        """In a forked child: the group belongs to the parent."""
        self.lock = threading.RLock()
        self.segment.forget()
        self.closed = self._over(
            "it belongs to the process that this one was forked from",
            "start ranks with gradmesh.launch or torchrun, not by a fork",
        )
        self.queue.clear()
        self._messages.clear()
        self._promises.clear()


def _forget_all() -> None:
    progress.forget()
    for engine in list(_engines):
        engine.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
