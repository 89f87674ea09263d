"""Runs a single rank of a large world, assuming that all other ranks do the same.

The data of other ranks is made up from this rank's input: they contribute the same terms and send the same parts. So
calls, sizes, bytes and modelled times are those of this rank in the full world; the values are not. If sizes depend on
received values, this rank's values count. Point-to-point messages raise, since their other end does not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from gradmesh import _torch
from gradmesh.backends import threads
from gradmesh.backends.threads.collectives import write
from gradmesh.backends.threads.rendezvous import Contribution, Group, Receive, Rendezvous
from gradmesh.backends.threads.waiting import World
from gradmesh.errors import ArgumentError, RankError, message
from gradmesh.state import RankState
from gradmesh.verify.simulator.counting import op_of
from gradmesh.verify.simulator.watching import Watching

__all__ = ["SingleRankObserver", "run_single_rank"]

T = TypeVar("T")


def run_single_rank(
    size: int,
    rank: int,
    prepare: Callable[[], object],
    watch: Callable[[World], None],
    fn: Callable[[], T],
    timeout: float | None,
) -> T:
    """Run a function as one rank of a world, in a separate thread.

    Args:
        size: the world size.
        rank: the rank.
        prepare: called first, without the observer.
        watch: installs an observer in the world.
        fn: the function.
        timeout: seconds that it may take; None: no limit. After that the thread is abandoned.

    Raises:
        RankError: the function raised, which is the error's cause; or it timed out.
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
            f"rank {rank}, simulated alone in a world of {size}, did not return within {timeout:g} s",
            op="simulate",
            remedy="remove loops that wait for other ranks, or pass a longer timeout, e.g. timeout=600",
        )
        raise RankError(text, rank=rank)
    if errors:
        text = message(
            f"rank {rank}, simulated alone in a world of {size}, failed with {type(errors[0]).__name__}",
            op="simulate",
            got=str(errors[0]),
        )
        raise RankError(text, rank=rank) from errors[0]
    return results[0]


class SingleRankObserver(Watching):
    """Observes a world in which only one rank runs."""

    def _bring(
        self,
        group: Group,
        place: int,
        part: Contribution,
        kernel: Callable[[list[Contribution]], None],  # noqa: ARG002 - needs every rank's part
        carried: Callable[[], None],
    ) -> Rendezvous:
        meeting = Rendezvous(group, group.calls[place])
        group.calls[place] += 1
        _torch.in_plain_mode(lambda: _make_up(place, part, len(group.ranks)))
        carried()
        meeting.done = True
        return meeting

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:  # noqa: ARG002
        """Raise: there is no receiver."""
        raise _no_peer(group, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:  # noqa: ARG002
        """Raise: there is no sender."""
        raise _no_peer(group, part)


def _no_peer(group: Group, part: Contribution) -> ArgumentError:
    return ArgumentError(
        message(
            "point-to-point messages are not supported with only=",
            op="simulate",
            axis=str(group),
            expected="collectives, since only one rank runs",
            got=str(part),
            remedy="remove only= to simulate every rank, or use the collectives gradmesh.permute and gradmesh.shift",
        )
    )


def _make_up(place: int, part: Contribution, size: int) -> None:
    """Write the result that the call would have if every rank had this rank's input."""
    op, pieces = op_of(part), part.pieces
    if op == "reduce_scatter":
        given = [batch.give[place] for batch in pieces]  # type: ignore[attr-defined]
        _fill(part.outputs, [_summed(part.call, tensor, size) for tensor in given])
    elif op == "all_reduce" or (op == "reduce" and part.call.endswith(f"root {place})")):
        _fill(part.outputs, [_summed(part.call, tensor, size) for tensor in part.inputs])
    elif op == "permute" and pieces is not None:
        _fill(part.outputs, part.inputs)
    elif isinstance(pieces, Sequence):
        for batch in pieces:
            for source, taken in enumerate(batch.take):
                if taken is not None:
                    _fill([taken], [batch.give[source], *batch.give, *part.inputs])


def _fill(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> None:
    """Write into each output the value of the same index, or the first one of its shape and dtype; else zeros."""
    for number, output in enumerate(outputs):
        wanted = [*values[number : number + 1], *values]
        fits = (v for v in wanted if v is not None and v.shape == output.shape and v.dtype == output.dtype)
        write(output, next(fits, torch.zeros_like(output)))


def _summed(call: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The reduction of the same tensor on `size` ranks."""
    if "(sum" in call:
        return tensor * size
    if "(product" in call:
        return tensor**size
    if "(bxor" in call and size % 2 == 0:
        return tensor ^ tensor
    return tensor
