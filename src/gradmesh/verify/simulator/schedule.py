"""A schedule that comes back: one rank runs at a time, and a seeded generator says who goes on.

The ranks hand on one turn. A rank gives it away at every call to other ranks, where it waits for one, and where its
function is over; the generator picks the next among the ranks that can go on. What happens in between is the program's
own, so that with one seed the ranks do the same things in the same order each time.

Where no rank can go on, that is a deadlock, and it is known at once.
"""

from __future__ import annotations

import functools
import random
import threading

from gradmesh.backends.threads.waiting import Waitable, World
from gradmesh.errors import ArgumentError, DeadlockError, message

__all__ = ["Schedule"]

_LOOK = 0.2
"""Seconds after which a rank that has no turn looks whether the world was stopped from outside."""


class Schedule:
    """Who has the turn.

    Args:
        world: the ranks.
        seed: another number, another order.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._turns = [threading.Lock() for _ in range(world.size)]
        for turn in self._turns:
            turn.acquire()

    def rank_here(self) -> int:
        """The rank of the calling thread.

        Raises:
            ArgumentError: it is none.
        """
        rank = self._world.rank_of_thread.get(threading.get_ident())
        if rank is None:
            raise ArgumentError(
                message(
                    "a thread that is no rank has no turn in a schedule",
                    op="simulate",
                    expected="calls from the threads of the ranks",
                    got=f"a call from thread {threading.current_thread().name!r}",
                    remedy="make the call in the rank's own thread, or simulate without seed=",
                )
            )
        return rank

    def enter(self, rank: int) -> None:
        """Wait until all ranks are here, and for the first turn."""
        with self._lock:
            self._inside.append(rank)
            if len(self._inside) == self._world.size:
                self._inside.sort()
                self._hand_on()
        self._await_turn(rank)

    def turn(self, rank: int) -> None:
        """Let another rank go on, or the same.

        Raises:
            GradmeshError: the world has been stopped.
        """
        self._world.check()
        self._hand_on()
        self._await_turn(rank)

    def block(self, rank: int, waits_for: Waitable) -> None:
        """Let others go on until something is complete.

        Raises:
            DeadlockError: no rank can go on.
            AbortedError: another rank failed.
        """
        self._world.check()
        self._world.waiting[rank] = waits_for
        try:
            self._hand_on()
            self._await_turn(rank)
        finally:
            self._world.waiting.pop(rank, None)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """The rank's function is over."""
        self._world.leave(rank, error)
        with self._lock:
            if rank in self._inside:
                self._inside.remove(rank)
        if self._world.stopped is not None:
            self._wake()
        elif self._inside:
            self._hand_on()

    def _hand_on(self) -> None:
        """Give the turn to a rank that can go on."""
        waiting = self._world.waiting
        ready = [rank for rank in self._inside if rank not in waiting or waiting[rank].done]
        if ready:
            self._turns[self._random.choice(ready)].release()
        else:
            self._give_up()

    def _await_turn(self, rank: int) -> None:
        while not self._turns[rank].acquire(timeout=_LOOK):
            if self._world.stopped is not None:
                break
        self._world.check()

    def _give_up(self) -> None:
        world = self._world
        with world.lock:
            stuck = list(world.waiting.values())
            first = next((waits_for for waits_for in stuck if world.lost(waits_for)), stuck[0])
            world.stop_now(functools.partial(DeadlockError, str(world.deadlock(first.hopeless()))))
        self._wake()

    def _wake(self) -> None:
        """Let everybody see that the world has been stopped."""
        with self._lock:
            for turn in self._turns:
                if turn.locked():
                    turn.release()
