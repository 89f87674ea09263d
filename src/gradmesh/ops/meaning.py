"""The meaning of an op on plain lists: from the operands of all ranks the results of all ranks, with torch alone.

The op is run as it is, for one rank after another in one thread, over a transport that only passes parts of tensors on.
So there is one statement of what an op does, which also holds for ops that are defined outside of the package. Autograd
follows it: the gradient is that of the forward, and uses nothing of the op's own adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradmesh.errors import MismatchError
from gradmesh.ops.base import Op
from gradmesh.ops.transport import Axis, Counts, Transport


def meaning(ops: Sequence[Op], xs: Sequence[Tensor]) -> list[Tensor]:
    """The results of all ranks of one call.

    Args:
        ops: the op of each rank, in rank order; they may differ in the fields that may differ between ranks. The axes
            need a rank and a size only, as `gradmesh.ops.transport.PlainAxis` has them.
        xs: the operand of each rank; the sent dtypes of the ops are ignored.

    Raises:
        MismatchError: the ranks' parts do not fit together, or the ranks wait for each other.

    >>> from gradmesh.ops.scan import Scan
    >>> from gradmesh.ops.transport import PlainAxis
    >>> meaning([Scan(PlainAxis(rank, 3)) for rank in range(3)], [torch.ones(1), torch.ones(1), torch.ones(1)])
    [tensor([1.]), tensor([2.]), tensor([3.])]
    """
    table = _Table(len(ops))
    results: dict[int, Tensor] = {}
    while len(results) < len(ops):
        before = table.given
        for place, (op, x) in enumerate(zip(ops, xs, strict=True)):
            if place not in results:
                try:
                    results[place] = op.transfer(x, _ListTransport(op.axis, table))
                except _WaitingError:  # for a part of another rank; it starts again when that is there
                    continue
        if before == table.given and len(results) < len(ops):
            waiting = ", ".join(str(place) for place in range(len(ops)) if place not in results)
            raise MismatchError.of(
                "the ranks' calls do not match",
                op=ops[0].verb,
                expected="a transfer() that calls the same primitives in the same order on every rank",
                got=f"ranks {waiting} wait for parts that no rank sends",
                remedy="choose primitives by values that are the same on every rank",
            )
    return [results[place] for place in range(len(ops))]


class _WaitingError(BaseException):
    """A rank needs a part that is not there yet; no Exception, so that an op does not catch it."""


@dataclass
class _Table:
    """The parts and the messages that the ranks have given so far."""

    size: int  # the number of ranks
    # for each exchange, in order, the parts for each rank by the rank that gave them
    rounds: list[dict[int, Sequence[Tensor]]] = field(default_factory=list)
    # the messages from one rank to another, in order, with their descriptions
    letters: dict[tuple[int, int], list[tuple[str, Tensor]]] = field(default_factory=dict)
    given: int = 0  # how many parts and messages are there


class _ListTransport(Transport):
    """One rank's transport in one attempt."""

    def __init__(self, axis: Axis, table: _Table) -> None:
        super().__init__(axis)
        self._table, self._round = table, 0
        self._posted: dict[int, int] = {}
        self._fetched: dict[int, int] = {}

    def exchange(
        self,
        flat: Tensor,
        send: Counts,
        receive: Counts,
        shape: Counts | None = None,
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """Give a part to each rank, and take one from each."""
        table, me = self._table, self.axis.rank
        if self._round == len(table.rounds):
            table.rounds.append({})
        there = table.rounds[self._round]
        self._round += 1
        if me not in there:
            there[me] = flat.split(list(send))
            table.given += 1
        if len(there) < table.size:
            raise _WaitingError
        parts = [there[rank][me] for rank in range(table.size)]
        if [part.numel() for part in parts] != list(receive):
            sent = [part.numel() for part in parts]
            raise MismatchError.of(
                "the ranks' counts do not match",
                axis=str(self.axis),
                expected=f"receive={list(receive)}, as this rank passed",
                got=f"parts of {sent} elements from the ranks",
                remedy="pass counts in rank order that agree with what the other ranks send",
            )
        got = torch.cat(parts)
        return got if shape is None else got.view(tuple(shape))

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        """Give a message."""
        box = self._table.letters.setdefault((self.axis.rank, peer), [])
        number = self._posted[peer] = self._posted.get(peer, 0) + 1
        if number > len(box):
            box.append((greeting, self.copy(x)))
            self._table.given += 1

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        """Take a message."""
        box = self._table.letters.get((peer, self.axis.rank), [])
        number = self._fetched[peer] = self._fetched.get(peer, 0) + 1
        if number > len(box):
            raise _WaitingError
        said, x = box[number - 1]
        if said != greeting:
            return said
        out.copy_(x)
        return None
