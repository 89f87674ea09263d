"""Verbs that a user-written autograd.Function calls in its forward and backward.

Two calls of such a Function could have their backward calls mispaired where ranks use the results differently. So the
sequence numbers of the calls in the Function's forward are stored under its node's number, and sent as flags with the
call in its backward. They are hints: two ranks that both know theirs must have a call in common; an unknown one matches
anything, since a rank may not be able to find its node.
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
"""The position in the flags: two fields of 10 bits, the lower one 0 where the numbers are unknown."""
_FIELD = (1 << 10) - 1
_KEPT = 1 << 14


@dataclass(slots=True)
class FunctionCalls:
    """The calls in one forward of a Function.

    Attributes:
        first: the sequence number of its first call.
        last: that of the last call before another node was made.
        text: description of the first call.
        site: its call site.
    """

    first: int
    last: int
    text: str
    site: Site

    def __str__(self) -> str:
        made = f"call {self.first}: {self.text} {show_site(self.site)}"
        return f"in the backward of the autograd.Function that made {made}"


class _Thread(threading.local):
    """A token per thread; thread ids are reused."""

    def __init__(self) -> None:
        self.token = object()


_here = _Thread()


class Functions:
    """The calls of user-written Functions on a group, on this rank.

    Autograd numbers nodes per thread, so only the first thread that calls is tracked.
    """

    __slots__ = ("_made", "_thread")

    def __init__(self) -> None:
        self._made: OrderedDict[int, FunctionCalls] = OrderedDict()
        self._thread: object = None

    def __len__(self) -> int:
        return len(self._made)

    def note(self, node: int, place: int, text: str) -> None:
        """Store a call of a Function's forward; the oldest Functions are evicted."""
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
        """The calls in the forward of a node's Function, if known."""
        return self._made.get(node) if self._thread is _here.token else None


def encode_flags(made: FunctionCalls) -> int:
    """The sequence numbers as flags."""
    return (1 + made.first % _FIELD | min(made.last - made.first, _FIELD) << 10) << _SHIFT


def _read(flags: int) -> tuple[int, int] | None:
    """First sequence number and how many follow; None where unknown."""
    first, more = flags >> _SHIFT & _FIELD, flags >> _SHIFT + 10
    return (first - 1, more) if first else None


def conflicting(peer_flags: Sequence[int]) -> bool:
    """Whether two ranks run the backward of Functions that have no call in common.

    >>> one, both = encode_flags(FunctionCalls(7, 7, "", None)), encode_flags(FunctionCalls(7, 8, "", None))
    >>> conflicting([one, both, 0]), conflicting([one, encode_flags(FunctionCalls(8, 8, "", None))])
    (False, True)
    """
    known = {read for flags in peer_flags if (read := _read(flags)) is not None}
    return any(
        (other - first) % _FIELD > more and (first - other) % _FIELD > further
        for (first, more), (other, further) in itertools.combinations(known, 2)
    )


def show_flags(peer_flags: Sequence[int], own: FunctionCalls | None) -> str:
    """One line per rank: the call whose backward it runs.

    Args:
        peer_flags: every rank's flags.
        own: this rank's calls, to complete the numbers, of which the flags have 10 bits.
    """
    lines = []
    for rank, flags in enumerate(peer_flags):
        read = _read(flags)
        if read is None:
            lines.append(f"rank {rank}: unknown")
            continue
        place = (
            read[0] if own is None else own.first + (read[0] - own.first + _FIELD // 2) % _FIELD - _FIELD // 2
        )
        lines.append(f"rank {rank}: in the backward of the autograd.Function that made call {place}")
    return "\n".join(lines)
