"""Deterministic, seeded scheduler: one rank runs at a time.

A rank yields at every communication call, when it waits, and when its function returns; the generator then picks one of
the ranks that are ready. The same seed gives the same order.

If no rank is ready, that is a deadlock, which is reported immediately.
"""

from __future__ import annotations

import functools
import random
import threading

from gradmesh.backends.threads.waiting import Waitable, World
from gradmesh.errors import ArgumentError, DeadlockError, message

__all__ = ["Schedule"]

_LOOK = 0.2
"""Seconds after which a waiting rank checks whether the world was stopped."""


class Schedule:
    """The scheduler of a world.

    Args:
        world: the ranks.
        seed: different seeds give different orders.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._turns = [threading.Lock() for _ in range(world.size)]
        for turn in self._turns:
            turn.acquire()

    def current_rank(self) -> int:
        """The rank of the calling thread.

        Raises:
            ArgumentError: the thread does not belong to a rank.
        """
        rank = self._world.rank_of_thread.get(threading.get_ident())
        if rank is None:
            raise ArgumentError(
                message(
                    "with seed=, a rank may communicate only from its main thread",
                    op="simulate",
                    expected="a call from the thread of a rank",
                    got=f"a call from thread {threading.current_thread().name!r}",
                    remedy="make the call in the rank's main thread, or simulate without seed=",
                )
            )
        return rank

    def enter(self, rank: int) -> None:
        """Wait until all ranks have entered, and for the first turn."""
        with self._lock:
            self._inside.append(rank)
            if len(self._inside) == self._world.size:
                self._inside.sort()
                self._run_next()
        self._wait_for_turn(rank)

    def turn(self, rank: int) -> None:
        """Yield to another rank, or continue.

        Raises:
            GradmeshError: the world has been stopped.
        """
        self._world.check()
        self._run_next()
        self._wait_for_turn(rank)

    def block(self, rank: int, waits_for: Waitable) -> None:
        """Yield to other ranks until `waits_for` is complete.

        Raises:
            DeadlockError: no rank is ready.
            AbortedError: another rank failed.
        """
        self._world.check()
        self._world.waiting[rank] = waits_for
        try:
            self._run_next()
            self._wait_for_turn(rank)
        finally:
            self._world.waiting.pop(rank, None)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """The rank's function has returned or raised."""
        self._world.leave(rank, error)
        with self._lock:
            if rank in self._inside:
                self._inside.remove(rank)
        if self._world.stopped is not None:
            self._wake()
        elif self._inside:
            self._run_next()

    def _run_next(self) -> None:
        """Let a ready rank run."""
        waiting = self._world.waiting
        ready = [rank for rank in self._inside if rank not in waiting or waiting[rank].done]
        if ready:
            self._turns[self._random.choice(ready)].release()
        else:
            self._give_up()

    def _wait_for_turn(self, rank: int) -> None:
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
        """Wake all ranks, so that they see that the world has been stopped."""
        with self._lock:
            for turn in self._turns:
                if turn.locked():
                    turn.release()
