"""The four types a tensor can have over the ranks of an axis, and what its gradient is.

====  ==========  ==================================================  ========  =================
type  reads       value on the ranks                                  gradient  pairing
====  ==========  ==================================================  ========  =================
V     varying     different on each rank                              V         sum over ranks
R     replicated  the same; each rank uses it differently             P         sum over ranks
P     partial     a pending sum                                       R         sum over ranks
I     invariant   the same; each rank repeats the same work           I         counted once
====  ==========  ==================================================  ========  =================

R and I have the same bits on every rank. They differ in the gradient: an R value is used differently on every rank, so
its gradient still has to be summed; every rank repeats the same work on an I value, so every rank already has the full
gradient. The terms are those of JAX's `shard_map` and of `spmd_types`.
"""

from __future__ import annotations

import enum
from typing import Final, Literal

import torch

__all__ = ["Convention", "I", "P", "R", "Reduction", "Type", "V"]


class Type(enum.Enum):
    """The type of a tensor over the ranks of an axis; `gm.V`, `gm.R`, `gm.I` and `gm.P` are its members.

    >>> Type.R.dual is Type.P
    True
    """

    V = "V"
    R = "R"
    I = "I"  # noqa: E741 - the field's letter for invariant
    P = "P"

    @property
    def dual(self) -> Type:
        """The type of the gradient of a value of this type."""
        return _DUAL[self]

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__


if torch.__version__ >= "2.13":
    # Every call uses types as dict keys, and an Enum recomputes its hash each time. An older Dynamo rejects dict keys
    # whose class defines __hash__.
    Type.__hash__ = object.__hash__  # type: ignore[method-assign]

_DUAL = {Type.V: Type.V, Type.R: Type.P, Type.P: Type.R, Type.I: Type.I}

# Final, so that type checkers can reject invalid types in calls.
V: Final = Type.V
R: Final = Type.R
I: Final = Type.I  # noqa: E741 - see above
P: Final = Type.P

Convention = Literal[Type.R, Type.I]
"""The types of a value that is the same on every rank; the `dst` or `src` of many verbs."""

Reduction = Literal["sum", "mean", "max", "min", "prod", "logsumexp"]
"""How `all_reduce` can combine the ranks' tensors."""
