"""Verbs that a Function of the user's own calls by hand, in forward and in backward.

Two backward calls of one kind and one shape, of two calls of the Function, would be taken for each other where ranks
use their results differently. So in the Function's forward the places of its calls among those of the group are kept
under the number of its node, and the call in its backward tells them. They are told and not compared, since a rank may
not know them: work of its own that goes through autograd hides the node from what follows it. What is known on two
ranks has to have a call in common; what is not known fits everything.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gradmesh.call_sites import Site, call_site, show_site

__all__ = ["FunctionCalls", "Functions", "conflicting", "encode_flags", "show_flags"]

_SHIFT = 14
"""Where in a claim's flags the places are told; two fields of 10 bits, the lower one 0 where they are not known."""
_FIELD = (1 << 10) - 1
_KEPT = 1 << 14


@dataclass(slots=True)
class FunctionCalls:
    """What a Function's forward called in a group.

    Attributes:
        first: the place of its first call.
        last: that of the last one before another node was made.
        text: the first call in words.
        site: where it was made.
    """

    first: int
    last: int
    text: str
    site: Site

    def __str__(self) -> str:
        return (
            f"in the backward of the function that made call {self.first}: {self.text} {show_site(self.site)}"
        )


class _Thread(threading.local):
    """Stands for the thread that asks, also when its number is another thread's later."""

    def __init__(self) -> None:
        self.token = object()


_here = _Thread()


class Functions:
    """The Functions that called a group's verbs by hand, on this rank.

    Nodes are numbered by thread, so only what one thread does is kept: the first that asks.
    """

    __slots__ = ("_made", "_thread")

    def __init__(self) -> None:
        self._made: OrderedDict[int, FunctionCalls] = OrderedDict()
        self._thread: object = None

    def __len__(self) -> int:
        return len(self._made)

    def note(self, node: int, place: int, text: str) -> None:
        """Keep a call of a Function's forward; the oldest Functions go."""
        if self._thread is None:
            self._thread = _here.token
        if self._thread is not _here.token:
            return
        if (known := self._made.get(node)) is not None:
            known.last = place
            return
        self._made[node] = FunctionCalls(place, place, text, call_site())
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)

    def of(self, node: int) -> FunctionCalls | None:
        """What the forward of a node's Function called, if that is known."""
        return self._made.get(node) if self._thread is _here.token else None


def encode_flags(made: FunctionCalls) -> int:
    """The places as flags of a claim."""
    return (1 + made.first % _FIELD | min(made.last - made.first, _FIELD) << 10) << _SHIFT


def _read(flags: int) -> tuple[int, int] | None:
    """First place, and how many further there are; None where they are not known."""
    first, more = flags >> _SHIFT & _FIELD, flags >> _SHIFT + 10
    return (first - 1, more) if first else None


def conflicting(peer_flags: Sequence[int]) -> bool:
    """Whether two ranks are in the backward of Functions that have no call in common.

    >>> one, both = told(Made(7, 7, "", None)), told(Made(7, 8, "", None))
    >>> apart([one, both, 0]), apart([one, told(Made(8, 8, "", None))])
    (False, True)
    """
    known = {read for flags in peer_flags if (read := _read(flags)) is not None}
    return any(
        (other - first) % _FIELD > more and (first - other) % _FIELD > further
        for (first, more), (other, further) in itertools.combinations(known, 2)
    )


def show_flags(peer_flags: Sequence[int], own: FunctionCalls | None) -> str:
    """What each rank told, a line each.

    Args:
        peer_flags: every rank's flags.
        own: what this rank knows, for the numbers that are told in part.
    """
    lines = []
    for rank, flags in enumerate(peer_flags):
        read = _read(flags)
        if read is None:
            lines.append(f"rank {rank}: not known")
            continue
        place = (
            read[0] if own is None else own.first + (read[0] - own.first + _FIELD // 2) % _FIELD - _FIELD // 2
        )
        lines.append(f"rank {rank}: in the backward of the function that made call {place}")
    return "\n".join(lines)
