"""The head of a call: 64 bits of what is called, which the ranks publish with its first phase and compare.

The lowest bits are the flags of the claim: they are published with the others, but need not be the same.
"""

from __future__ import annotations

from gradmesh.backends.call_check import FLAGS, CallCheck
from gradmesh.backends.reductions import REDUCTIONS

__all__ = ["REDUCTION_NUMBER", "head"]

_COMPARED = 0xFFFF_FFFF_FFFF_FFFF & ~FLAGS

REDUCTION_NUMBER = {name: number for number, name in enumerate(REDUCTIONS)}
_KINDS = (
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "relay",
    "scatter",
    "sparse_all_reduce",
)
_KIND_NUMBER = {name: number for number, name in enumerate(_KINDS)}


def head(kind: str, call_check: CallCheck | None, facts: tuple[int, ...]) -> int:
    """The head of a call.

    Args:
        kind: its name.
        call_check: what the rank claims about it, if anything.
        facts: numbers that have to be the same on every rank. (The hash of integers is the same in every process.)
    """
    bits = hash((_KIND_NUMBER[kind], *facts))
    if call_check is None:
        return bits & _COMPARED
    return hash((call_check.digest, bits)) & _COMPARED | call_check.flags
