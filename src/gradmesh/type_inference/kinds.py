"""What is known of a tensor over the ranks of one axis: one of the four types, or less than that.

Beside V, R, I and P there are three that users do not see: a value that is the same on every rank but is not declared R
or I (data), zeros (the same, and a pending sum of zeros too), and an unknown value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gradmesh.types import Type

__all__ = ["SAMES", "UNKNOWN", "ZERO", "I", "Kind", "P", "R", "S", "V", "flavor", "shown"]

Kind = str

V: Final = "V"
R: Final = "R"
I: Final = "I"  # noqa: E741 - the field's letter for invariant
P: Final = "P"
S: Final = "S"
"""The same on every rank, R or I as its use makes it."""
ZERO: Final = "Z"
UNKNOWN: Final = "?"

SAMES: Final = frozenset((S, R, I, ZERO))
"""The same bits on every rank."""

_SHOWN = {V: Type.V, R: Type.R, I: Type.I, P: Type.P, S: Type.R, ZERO: Type.R, UNKNOWN: None}


def shown(kind: Kind) -> Type | None:
    """The type that a user sees; None: it is not known.

    >>> shown("S"), shown("?")
    (R, None)
    """
    return _SHOWN[kind]


def flavor(kinds: Iterable[Kind]) -> Kind:
    """What comes of values that are the same on every rank: what meets an R value is one, then what meets an I value.

    >>> flavor("SIS")
    'I'
    """
    met = set(kinds)
    return R if R in met else I if I in met else S
