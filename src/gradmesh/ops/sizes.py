"""The ranks' sizes along one tensor dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradmesh.ops.base import Op


def balanced(total: int, ranks: int) -> tuple[int, ...]:
    """Split `total` over the ranks; the first `total % ranks` of them get one more.

    >>> balanced(5, 3)
    (2, 2, 1)
    """
    share, more = total // ranks, total % ranks  # symbolic ints have no divmod
    return tuple(share + (rank < more) for rank in range(ranks))


def intervals(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Consecutive half-open intervals of these sizes.

    >>> intervals((2, 0, 3))
    [(0, 2), (2, 2), (2, 5)]
    """
    return list(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True)
class Sizes:
    """Each rank's size along one dimension, in rank order.

    They are uniform (the caller passed none, so every rank has this rank's size) or explicit (passed by the caller, or
    exchanged between the ranks).
    """

    each: tuple[int, ...] | None = None  # one size for each rank; None: uniform

    @classmethod
    def balanced(cls, total: int, ranks: int) -> Sizes:
        """Split `total` over the ranks; the first `total % ranks` of them get one more."""
        return cls(balanced(total, ranks))

    def __getitem__(self, rank: int) -> int:
        """The size of a rank; explicit sizes only."""
        return self.explicit[rank]

    @property
    def explicit(self) -> tuple[int, ...]:
        """The sizes of all ranks; explicit sizes only."""
        if self.each is None:
            raise ValueError("uniform sizes depend on the operand")
        return self.each

    @property
    def total(self) -> int:
        """The sum of explicit sizes."""
        return sum(self.explicit)

    @property
    def equal(self) -> bool:
        """Whether they are uniform because the caller passed none."""
        return self.each is None

    def of_whole(self, op: Op, dim: int, total: int) -> Sequence[int]:
        """Each rank's size, of a tensor that is whole along `dim`.

        Raises:
            ShapeError: they do not add up to `total`, or the ranks do not divide it.
        """
        if self.each is None:
            ranks: int = op.axis.size
            share = total // ranks
            if total % ranks:
                op.fail(
                    f"dim {dim} cannot be split equally",
                    expected=f"a size that {ranks} ranks divide",
                    got=f"size {total}",
                    remedy=f"pass the size of each rank's part, such as {_example(op, total)}",
                )
            return (share,) * ranks
        if sum(self.each) != total:
            op.fail(
                f"the sizes do not add up to the size of dim {dim}",
                expected=f"sizes with the sum {total}",
                got=f"sizes={self.each} with the sum {sum(self.each)}",
                remedy=f"pass each rank's size along dim, such as {_example(op, total)}",
            )
        return self.each

    def of_part(self, op: Op, dim: int, own: int) -> Sequence[int]:
        """Each rank's size, of a tensor that is this rank's part along `dim`.

        Raises:
            ShapeError: this rank's is not `own`.
        """
        if self.each is None:
            ranks: int = op.axis.size
            return (own,) * ranks
        self.check(op, dim, self.each[op.axis.rank], own)
        return self.each

    def check(self, op: Op, dim: int, expected: int, got: int) -> None:
        """Raise if the operand's size along `dim` differs from the expected one."""
        if expected == got:
            return
        actual = (*self.explicit[: op.axis.rank], got, *self.explicit[op.axis.rank + 1 :])
        name = "concat_sizes" if op.verb == "all_to_all" else "sizes"
        op.fail(
            f"dim {dim} of the operand does not match sizes on this rank",
            expected=f"size {expected}, from {name}={self.each}",
            got=f"size {got}",
            remedy=f"pass the actual sizes, such as {name}={actual} if the others are right, or "
            f'{name}="auto" to exchange them',
        )

    def __str__(self) -> str:
        return "equal" if self.each is None else str(self.each)


def _example(op: Op, total: int) -> str:
    """A valid argument, for error messages."""
    argument = "split_sizes" if op.verb == "all_to_all" else "sizes"
    name = f'{argument}="balanced" or {argument}' if op.verb in ("all_to_all", "reduce_scatter") else argument
    return f"{name}={balanced(total, op.axis.size)}, the balanced split of {total} over {op.axis.size} ranks"


EQUAL = Sizes()
"""Uniform sizes: every rank has this rank's size."""
