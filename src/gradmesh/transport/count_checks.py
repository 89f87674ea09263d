"""Whether what each rank gives to each is what that one takes, told by one number of each rank.

Each pair of ranks and amount has a random-looking number of 64 bits. A rank adds those of what it gives and subtracts
those of what it takes. What one gives and another takes alike cancels, so that the sum over the ranks is 0, and hardly
ever otherwise. So the amounts are compared in the exchange of the calls' heads, to which the numbers are added. The
bits of a head that carry flags are left alone.
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
    said = f"{source} gives {target} {amount}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") & ~FLAGS


def balance(rank: int, send: Sequence[int], receive: Sequence[int]) -> int:
    """A rank's number.

    Args:
        rank: the rank.
        send: what it gives to each.
        receive: what it takes from each.

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
    """Whether all ranks say the same, and their balances cancel.

    Args:
        heads: what every rank says, with its balance added, and with its flags.
        own: what this rank says, without.

    >>> one = FLAGS + 1
    >>> agreed([one, one + 1], one), agreed([2 * one, 0], one), agreed([one, 2 * one], one)
    (True, True, False)
    """
    return (sum(head & ~FLAGS for head in heads) - len(heads) * own) % _WHOLE == 0


def signed(number: int) -> int:
    """A number of 64 bits as torch has it.

    >>> signed(2**64 - 1), signed(2**64 + 3)
    (-1, 3)
    """
    number %= _WHOLE
    return number - _WHOLE if number >= _WHOLE >> 1 else number
