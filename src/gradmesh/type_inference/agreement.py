"""What the ranks of each axis agree on: which numbers every one of them has said.

Ranks tell each other nothing but numbers, and only where they meet anyway: at collectives, at `assert_type` and at the
end of the block. What one rank does between two meetings may be something else than what the others do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradmesh.axis import Axis
from gradmesh.errors import MismatchError, message
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.sizes import EQUAL
from gradmesh.type_inference.digest import token
from gradmesh.type_inference.tape import Mark

__all__ = ["Agreement", "gathered"]


def gathered(
    axis: Axis, numbers: Sequence[int], device: torch.device, *, operand_desc: str
) -> list[tuple[int, ...]]:
    """Every rank's numbers, as many from each."""
    with torch.no_grad():
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        every = AllGather(axis, 0, EQUAL, operand_desc=operand_desc).apply(mine)
    whole = every.tolist()
    return [tuple(whole[at : at + len(numbers)]) for at in range(0, len(whole), len(numbers) or 1)]


class Agreement:
    """The numbers that were said, by axis and rank.

    Args:
        axes: the axes that are followed.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        self._new: list[list[int]] = [[] for _ in axes]
        self._heard: list[list[set[int]]] = [[set() for _ in range(axis.size)] for axis in axes]

    def say(self, at: int, number: int) -> None:
        """Have the ranks of an axis know, when they meet next, that this rank has a number."""
        mine = self._heard[at][self.axes[at].rank]
        if number not in mine:
            mine.add(number)
            self._new[at].append(number)

    def agreed(self, at: int, number: int) -> bool:
        """Whether every rank of an axis has said a number, as far as is known."""
        return all(number in heard for heard in self._heard[at])

    def meet(
        self, axis: Axis, at: int | None, call: str, row: Sequence[Mark], device: torch.device
    ) -> list[list[Mark]]:
        """Tell the ranks of an axis what is new here, and hear what is new there.

        Args:
            axis: the ranks that meet.
            at: its place among the axes that are followed; None: it is none of them.
            call: what every rank is about to do, in the same words.
            row: marks that every rank shows of its own, one for each axis at most.
            device: where numbers can travel from.

        Returns:
            Every rank's row.

        Raises:
            MismatchError: the ranks are about to do different things.
        """
        new = self._new[at] if at is not None else []
        # The same length on each rank, so that ranks that diverge are detected here.
        row = [*row, *[Mark("?", 0)] * (len(self.axes) - len(row))]
        flat = [number for mark in row for number in (ord(mark.kind), mark.number)]
        heads = gathered(
            axis, [token(call), len(new), *flat], device, operand_desc="the types of gradmesh.typed"
        )
        if len({head[0] for head in heads}) > 1:
            raise MismatchError(
                message(
                    "the ranks meet at different places",
                    op="typed",
                    axis=str(axis),
                    expected="the same collective, or the end of the block, on every rank",
                    got=f"this rank is at {call}",
                    remedy="have every rank make the same calls in the same order, and leave the block",
                )
            )
        most = max(head[1] for head in heads)
        if most and at is not None:
            padded = new + [0] * (most - len(new))
            for rank, numbers in enumerate(gathered(axis, padded, device, operand_desc="values, as numbers")):
                self._heard[at][rank].update(numbers[: heads[rank][1]])
            self._new[at] = []
        return [
            [Mark(chr(head[place]), head[place + 1]) for place in range(2, len(head), 2)] for head in heads
        ]
