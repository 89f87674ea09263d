"""A world of which one rank is there: its thread, its place in torch.distributed, and its error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from gradmesh import _torch
from gradmesh.backends import threads
from gradmesh.backends.threads.waiting import World
from gradmesh.errors import RankError, message
from gradmesh.state import RankState

__all__ = ["run_single_rank"]

T = TypeVar("T")


def run_single_rank(
    size: int,
    rank: int,
    prepare: Callable[[], object],
    watch: Callable[[World], None],
    fn: Callable[[], T],
    timeout: float | None,
) -> T:
    """Run a function as one rank of a world, in a thread of its own.

    Args:
        size: the number of ranks of the world.
        rank: the rank that is there.
        prepare: called first, unwatched.
        watch: puts an observer into the world.
        fn: the function.
        timeout: seconds that it may take; None: any time. A function that takes longer is left behind.

    Raises:
        RankError: the function failed, and its cause is the function's exception; or it took too long.
    """
    threads.register()
    results: list[T] = []
    errors: list[BaseException] = []

    def be() -> None:
        world = World(size)
        try:
            with threads.seated(world, rank, RankState()), _torch.thread_isolation():
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group("threads", store=store, rank=rank, world_size=size)
                prepare()
                watch(world)
                try:
                    results.append(fn())
                finally:
                    world.observer = None
                    dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=be, name=f"gradmesh rank {rank}", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        text = message(
            f"rank {rank}, which plays alone in a world of {size}, did not return within {timeout:g} s",
            op="simulate",
            remedy="look for a loop that waits for what other ranks do, or give a longer timeout",
        )
        raise RankError(text, rank=rank)
    if errors:
        text = message(
            f"rank {rank}, which plays alone in a world of {size}, failed with {type(errors[0]).__name__}",
            op="simulate",
            got=str(errors[0]),
        )
        raise RankError(text, rank=rank) from errors[0]
    return results[0]
