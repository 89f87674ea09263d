"""What a rank says about the values that it hands in, at the level "full" of `gradmesh.check`.

A number made of the bits of the operand, whether a NaN or an infinity is in it, and a number made of the line of the
call travel with the claim of the call. Bits are compared, not nearness: ranks that repeat the same work on one machine
get the same bits.
"""

from __future__ import annotations

import cmath
import hashlib
import os
import warnings
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh._torch import LastPass, in_plain_mode
from gradmesh.call_sites import call_site
from gradmesh.errors import CheckWarning, MismatchError, message
from gradmesh.state import rank_state
from gradmesh.transport.call_checks import BACKWARD, CallRecord, OpCallCheck, Signature
from gradmesh.transport.packing import dense, flattened, with_memory
from gradmesh.types import I, P, R, Type

__all__ = ["ReplicatedLossPass", "ValueCheck", "bits_of", "checksum"]

_NOT_FINITE = 8
_LINE_SHIFT, _LINE_BITS = 4, (1 << 10) - 1
_SHIFT = 14
_BITS = (1 << 20) - 1
_LANES = 64


class ReplicatedLossPass(LastPass):
    """The backward pass of a loss that was declared the same on every rank, and scaled to be a term of the whole."""


def checksum(x: Tensor) -> int:
    """20 bits that differ where the bits of two tensors do, also where the same values stand in other places.

    Zeros have 0.
    """
    return int.from_bytes(bits_of(x, 4), "little") & _BITS


def bits_of(x: Tensor, size: int) -> bytes:
    """A digest of a tensor's bits, of as many bytes; zeros and tensors without elements have zero bytes.

    Numbers of eight bytes are summed in lanes, which takes as long as reading the memory.
    """
    if not x.numel():
        return bytes(size)
    memory = flattened(with_memory(dense(x))).view(torch.uint8)
    if memory.storage_offset() % 8:
        memory = memory.clone()
    whole = memory.numel() // (8 * _LANES) * (8 * _LANES)
    lanes = memory[:whole].view(torch.int64).view(-1, _LANES).sum(0).tolist() if whole else []
    rest = memory[whole:].tolist()
    if not any(lanes) and not any(rest):
        return bytes(size)
    return hashlib.blake2b(array("q", lanes).tobytes() + bytes(rest), digest_size=size).digest()


def _finite(x: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()):
        return True
    if x.itemsize == 1 or x.dtype is torch.complex32:  # torch has no arithmetic for these
        x = x.to(torch.complex64 if x.is_complex() else torch.float32)
    # A sum is a tenth of the work of asking every element; only where it is not finite are they asked.
    return cmath.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def _line() -> int:
    """10 bits of the line of code that makes the call."""
    site = call_site()
    if site is None:
        return 0
    said = f"{os.path.basename(site[0].co_filename)}:{site[1]}"
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=2).digest(), "little") & _LINE_BITS


class ValueCheck(OpCallCheck):
    """The claim of one call, and of what is handed in.

    Args:
        said: what the call says each time.
        recorded: what is remembered of it.
        x: this rank's operand.
        src: the operand's type over the ranks; None: it has none.
    """

    __slots__ = ("_src", "sends_positions")

    def __init__(self, said: Signature, recorded: CallRecord | None, x: Tensor, src: Type | None) -> None:
        super().__init__(said, recorded)
        self._src = src
        counts = src in (R, I) or self._summed
        self.sends_positions = not counts
        finite, number = in_plain_mode(lambda: (_finite(x), checksum(x) if counts else 0))
        self.flags |= (0 if finite else _NOT_FINITE) | _line() << _LINE_SHIFT | number << _SHIFT

    @property
    def _backward(self) -> bool:
        return self._record is not None and self._record.role == BACKWARD

    @property
    def _summed(self) -> bool:
        """Whether the operand is a gradient that this call sums over the ranks."""
        return self._backward and self._src is P

    def settle(self) -> None:
        """Look at what the others said, of their part in the backward and of their values.

        Raises:
            MismatchError: values that are declared the same on every rank are not.
        """
        super().settle()
        flags = self.flags
        peer_flags = self.peer_flags
        numbers = {flags >> _SHIFT} if peer_flags is None else {other >> _SHIFT for other in peer_flags}
        if self._src in (R, I) and peer_flags is not None and len(numbers) > 1:
            raise self._unequal(peer_flags)
        if (
            self._summed
            and numbers == {flags >> _SHIFT} != {0}
            and not rank_state().get_or_create(ReplicatedLossPass).running
        ):
            self._warn("the same gradient on every rank is summed", _SUMMED)
        if peer_flags is not None and len({other >> _LINE_SHIFT & _LINE_BITS for other in peer_flags}) > 1:
            self._warn("the ranks make this call at different lines", _ELSEWHERE)
        if flags & _NOT_FINITE or (
            peer_flags is not None and any(other & _NOT_FINITE for other in peer_flags)
        ):
            ranks = (
                [rank for rank, other in enumerate(peer_flags) if other & _NOT_FINITE]
                if peer_flags
                else ["every one"]
            )
            self._warn(f"a NaN or an infinity is handed in, by rank {', '.join(map(str, ranks))}", _SPOILT)

    def _unequal(self, peer_flags: Sequence[int]) -> MismatchError:
        declared = (
            "the gradient of a result that is declared"
            if self._backward
            else "the operand, which is declared"
        )
        remedy = (
            "if the ranks use the result differently, say dst=gm.R, whose backward sums what each of them finds; if "
            "they repeat the same work, look for what makes it differ (data, dropout, the order of a sum)"
        )
        return MismatchError(
            message(
                f"{declared} the same on every rank, is not",
                op=self._signature.verb,
                axis=self._signature.axis,
                expected=f"the same bits on every rank, which gm.{self._src} says",
                got="\n".join(
                    f"rank {rank}: values number {other >> _SHIFT}" for rank, other in enumerate(peer_flags)
                )
                + f"\nin {self.said()}",
                remedy=remedy
                if self._backward
                else f"hand in the same values, or do not call them gm.{self._src}",
            )
        )

    def _warn(self, problem: str, remedy: str) -> None:
        site = call_site()
        text = message(
            problem, op=self._signature.verb, axis=self._signature.axis, got=self.said(), remedy=remedy
        )
        place = ("<unknown>", 0) if site is None else (site[0].co_filename, site[1])
        warnings.warn_explicit(text, CheckWarning, *place)


_SUMMED = (
    "if every rank repeats the same work on the result, this gradient is too large by the number of ranks: say "
    "dst=gm.I; if each rank's loss is a term of the whole, it is right"
)
_ELSEWHERE = (
    "if calls of one kind changed places on a rank, mend that; a branch that makes the same call is right"
)
_SPOILT = "look for where it comes from on that rank, before this line"
