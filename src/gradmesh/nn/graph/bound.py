"""What holds the group of its ranks: it is copied on its rank, and not pickled."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, TypeVar

from gradmesh.errors import ArgumentError, message

__all__ = ["Bound"]

BoundT = TypeVar("BoundT", bound="Bound")


class Bound:
    """A plan, or part of one: `copy.copy` and `copy.deepcopy` keep its axis, and pickling is refused.

    Attributes:
        verb: what it is called in errors.
    """

    verb: str

    def __copy__(self: BoundT) -> BoundT:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self: BoundT, memo: dict[int, Any]) -> BoundT:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Say what to save instead.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            message(
                "a plan holds the group of its ranks, and cannot be pickled",
                op=self.verb,
                expected="what plan.state() returns: tensors and ints",
                got=f"a {type(self).__name__}",
                remedy="save plan.state() on each rank, and make the plan again with of_state(state)",
            )
        )
