"""The hash of a call: 64 bits, which the ranks publish in its first epoch and compare.

The lowest bits are the flags of the call check, which are published but not compared.
"""

from __future__ import annotations

from gradmesh.backends.call_check import FLAGS, CallCheck
from gradmesh.backends.reductions import REDUCTIONS

__all__ = ["REDUCTION_NUMBER", "call_hash"]

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


def call_hash(kind: str, call_check: CallCheck | None, facts: tuple[int, ...]) -> int:
    """The hash of a call.

    Args:
        kind: its name.
        call_check: its call check, if any.
        facts: numbers that must be the same on every rank. (Hashes of ints are the same in every process.)
    """
    bits = hash((_KIND_NUMBER[kind], *facts))
    if call_check is None:
        return bits & _COMPARED
    return hash((call_check.digest, bits)) & _COMPARED | call_check.flags
