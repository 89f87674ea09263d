"""Verify that all-to-all send and receive counts agree, with one checksum per rank.

Each (source, target, count) has a 64-bit hash. A rank adds the hashes of what it sends and subtracts those of what it
receives. Counts that agree cancel, so that the checksums of all ranks add up to 0, and almost never otherwise. The
checksum is added to the call digest that the ranks exchange anyway; the flag bits of the digest stay untouched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from gradmesh.backends.call_check import FLAGS

__all__ = ["agreed", "balance", "signed"]

_WHOLE = 1 << 64


@lru_cache(maxsize=4096)
def _number(source: int, target: int, amount: int) -> int:
    text = f"{source} gives {target} {amount}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & ~FLAGS


def balance(rank: int, send: Sequence[int], receive: Sequence[int]) -> int:
    """A rank's checksum.

    Args:
        rank: the rank.
        send: the number of elements that it sends to each rank.
        receive: the number of elements that it receives from each rank.

    >>> sum(balance(r, send, take) for r, send, take in ((0, (1, 2), (1, 4)), (1, (4, 3), (2, 3)))) % 2**64
    0
    >>> sum(balance(r, send, take) for r, send, take in ((0, (1, 2), (1, 5)), (1, (4, 3), (2, 3)))) % 2**64 == 0
    False
    """
    return _balance(rank, tuple(send), tuple(receive))


@lru_cache(maxsize=1024)
def _balance(rank: int, send: tuple[int, ...], receive: tuple[int, ...]) -> int:
    gives = sum(_number(rank, other, amount) for other, amount in enumerate(send))
    takes = sum(_number(other, rank, amount) for other, amount in enumerate(receive))
    return (gives - takes) % _WHOLE


def agreed(heads: Sequence[int], own: int) -> bool:
    """Whether all ranks' call digests are equal and their count checksums cancel.

    Args:
        heads: every rank's digest plus checksum, with its flags.
        own: this rank's digest alone.

    >>> one = FLAGS + 1
    >>> agreed([one, one + 1], one), agreed([2 * one, 0], one), agreed([one, 2 * one], one)
    (True, True, False)
    """
    return (sum(head & ~FLAGS for head in heads) - len(heads) * own) % _WHOLE == 0


def signed(number: int) -> int:
    """An unsigned 64-bit number as a signed one.

    >>> signed(2**64 - 1), signed(2**64 + 3)
    (-1, 3)
    """
    number %= _WHOLE
    return number - _WHOLE if number >= _WHOLE >> 1 else number
