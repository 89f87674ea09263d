"""One rank plays, and the others are taken to do the same: for worlds that no machine here could hold.

What the others would give is made up from what this rank hands in: they sum the same numbers, and send the same parts.
So calls, sizes, bytes and modelled times are those of this rank in the whole world, and the values are not. A program
whose sizes depend on values that come from others is played with this rank's. Messages between two ranks are refused,
since the other end of each is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradmesh import _torch
from gradmesh.backends.threads.collectives import write
from gradmesh.backends.threads.rendezvous import Contribution, Group, Receive, Rendezvous
from gradmesh.errors import ArgumentError, message
from gradmesh.verify.simulator.counting import op_of
from gradmesh.verify.simulator.watching import Watching

__all__ = ["Lone"]


class Lone(Watching):
    """Watches a world in which one rank plays."""

    def _bring(
        self,
        group: Group,
        place: int,
        part: Contribution,
        kernel: Callable[[list[Contribution]], None],  # noqa: ARG002 - it wants every rank's part
        carried: Callable[[], None],
    ) -> Rendezvous:
        meeting = Rendezvous(group, group.calls[place])
        group.calls[place] += 1
        _torch.in_plain_mode(lambda: _make_up(place, part, len(group.ranks)))
        carried()
        meeting.done = True
        return meeting

    def send(self, group: Group, place: int, to: int, tag: int, part: Contribution) -> None:  # noqa: ARG002
        """Refuse: nobody receives it."""
        raise _no_other_end(group, part)

    def receive(self, group: Group, place: int, source: int | None, tag: int, part: Contribution) -> Receive:  # noqa: ARG002
        """Refuse: nobody sends it."""
        raise _no_other_end(group, part)


def _no_other_end(group: Group, part: Contribution) -> ArgumentError:
    return ArgumentError(
        message(
            "one rank that plays alone has nobody to exchange messages with",
            op="simulate",
            axis=str(group),
            expected="collectives",
            got=str(part),
            remedy="leave only= away, so that every rank plays, or use gradmesh.permute and shift",
        )
    )


def _make_up(place: int, part: Contribution, size: int) -> None:
    """Write what would come, if every rank handed in what this one does."""
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
    """Write into each output the value at its place, or the first one that fits; else zeros."""
    for number, output in enumerate(outputs):
        wanted = [*values[number : number + 1], *values]
        fits = (v for v in wanted if v is not None and v.shape == output.shape and v.dtype == output.dtype)
        write(output, next(fits, torch.zeros_like(output)))


def _summed(call: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """What so many ranks reduce the same tensor to."""
    if "(sum" in call:
        return tensor * size
    if "(product" in call:
        return tensor**size
    if "(bxor" in call and size % 2 == 0:
        return tensor ^ tensor
    return tensor
