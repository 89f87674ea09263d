"""Sizes that the ranks have along one dimension of a tensor: equal ones, or explicit ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from gradmesh.axis import balanced

if TYPE_CHECKING:
    from gradmesh.ops.base import Op

__all__ = ["EQUAL", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Each rank's size along one dimension, in rank order.

    They are *equal* (nobody said anything: every rank has what this one has), *explicit* by the caller, or *found* by
    asking the ranks, after which they are as good as explicit.

    Attributes:
        each: one size for each rank; None: equal.
    """

    each: tuple[int, ...] | None = None

    @classmethod
    def balanced(cls, total: int, ranks: int) -> Sizes:
        """Cut `total` among the ranks; the first `total % ranks` of them get one more."""
        return cls(balanced(total, ranks))

    def __getitem__(self, rank: int) -> int:
        """The size of a rank, of explicit sizes."""
        return self.explicit[rank]

    @property
    def explicit(self) -> tuple[int, ...]:
        """The sizes of all ranks, of explicit ones."""
        if self.each is None:
            raise ValueError("equal sizes are known with an operand alone")
        return self.each

    @property
    def total(self) -> int:
        """The sum of explicit sizes."""
        return sum(self.explicit)

    @property
    def equal(self) -> bool:
        """Whether they are equal because nobody explicit any."""
        return self.each is None

    def of_whole(self, op: Op, dim: int, total: int) -> Sequence[int]:
        """Each rank's size, of a tensor that is whole along `dim`.

        Raises:
            ShapeError: they do not add up to `total`, or the ranks do not divide it.
        """
        if self.each is None:
            share = total // op.axis.size
            if total % op.axis.size:
                op.fail(
                    f"dim {dim} cannot be split equally",
                    expected=f"a size that {op.axis.size} ranks divide",
                    got=f"size {total}",
                    remedy=f"pass the size of each rank's part, such as {_example(op, total)}",
                )
            return (share,) * op.axis.size
        if sum(self.each) != total:
            op.fail(
                f"the sizes do not add up to dim {dim}",
                expected=f"sizes with the sum {total}",
                got=f"sizes={self.each} with the sum {sum(self.each)}",
                remedy=f"give each rank's size along dim, such as {_example(op, total)}",
            )
        return self.each

    def of_part(self, op: Op, dim: int, own: int) -> Sequence[int]:
        """Each rank's size, of a tensor that is this rank's part along `dim`.

        Raises:
            ShapeError: this rank's is not `own`.
        """
        if self.each is None:
            return (own,) * op.axis.size
        self.check(op, dim, self.each[op.axis.rank], own)
        return self.each

    def check(self, op: Op, dim: int, expected: int, got: int) -> None:
        """Refuse an operand of another size along `dim` than these sizes say."""
        if expected != got:
            self._refuse(op, dim, expected, got)

    def _refuse(self, op: Op, dim: int, expected: int, got: int) -> NoReturn:
        op.fail(
            f"dim {dim} is not what sizes says for this rank",
            expected=f"size {expected}, from sizes={self.each}",
            got=f"size {got}",
            remedy=f"pass the true sizes, such as sizes={self._with(op.axis.rank, got)} if the others are right, or "
            'sizes="auto" to have them exchanged',
        )

    def _with(self, rank: int, size: int) -> tuple[int, ...]:
        return (*self.explicit[:rank], size, *self.explicit[rank + 1 :])

    def __str__(self) -> str:
        return "equal" if self.each is None else str(self.each)


def _example(op: Op, total: int) -> str:
    """An argument that fits, for an error."""
    name = {"all_to_all": "split_sizes", "reduce_scatter": 'sizes="balanced" or sizes'}.get(op.verb, "sizes")
    return f"{name}={balanced(total, op.axis.size)}, the balanced split of {total} over {op.axis.size} ranks"


EQUAL = Sizes()
"""Every rank has what this one has."""
