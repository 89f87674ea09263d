"""Value checks: what the ranks compare about their operands at `gradmesh.check("full")`.

A checksum of the operand, whether it contains a NaN or an infinity, and a hash of the call's source line are sent with
the call check. Bits are compared without a tolerance: ranks that repeat the same work on one machine get the same
bits.
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
    """The backward pass of a loss declared with `loss_type=gm.R`, which `gradmesh.objective` scaled."""


def checksum(x: Tensor) -> int:
    """A 20-bit checksum that depends on the order of the elements; 0 for zeros."""
    return int.from_bytes(bits_of(x, 4), "little") & _BITS


def bits_of(x: Tensor, size: int) -> bytes:
    """A digest of `size` bytes of a tensor's bits; all zero for zeros and empty tensors.

    64-bit words are summed in lanes, which runs at memory bandwidth.
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
    # A sum takes a tenth of the time of isfinite on every element.
    return cmath.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def _line() -> int:
    """A 10-bit hash of the source line of the call."""
    site = call_site()
    if site is None:
        return 0
    text = f"{os.path.basename(site[0].co_filename)}:{site[1]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "little") & _LINE_BITS


class ValueCheck(OpCallCheck):
    """The check of one call and of its operand's values.

    Args:
        signature: the signature of the call.
        recorded: its metadata.
        x: this rank's operand.
        src: the operand's type over the ranks; None: it has none.
    """

    __slots__ = ("_src", "sends_positions")

    def __init__(
        self, signature: Signature, recorded: CallRecord | None, x: Tensor, src: Type | None
    ) -> None:
        super().__init__(signature, recorded)
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
        """Check the flags and values of the other ranks.

        Raises:
            MismatchError: values that are declared the same on every rank differ.
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
            self._warn("a gradient that is the same on every rank is summed over the ranks", _SUMMED)
        if peer_flags is not None and len({other >> _LINE_SHIFT & _LINE_BITS for other in peer_flags}) > 1:
            self._warn("the ranks make this call at different source lines", _ELSEWHERE)
        if flags & _NOT_FINITE or (
            peer_flags is not None and any(other & _NOT_FINITE for other in peer_flags)
        ):
            ranks = (
                [rank for rank, other in enumerate(peer_flags) if other & _NOT_FINITE]
                if peer_flags
                else ["all"]
            )
            self._warn(
                f"the operand contains a NaN or an infinity, on rank {', '.join(map(str, ranks))}", _SPOILT
            )

    def _unequal(self, peer_flags: Sequence[int]) -> MismatchError:
        problem = (
            f"dst=gm.{self._src} promises the same gradient on every rank, but the gradients differ"
            if self._backward
            else f"a gm.{self._src} operand has to be the same on every rank, but the values differ"
        )
        remedy = (
            "if the ranks use the result differently, pass dst=gm.R, whose backward sums the ranks' gradients; if they "
            "repeat the same work, find what makes it differ (data, dropout, the order of a sum)"
        )
        return MismatchError(
            message(
                problem,
                op=self._signature.verb,
                axis=self._signature.axis,
                expected="bitwise equal values on every rank",
                got="\n".join(
                    f"rank {rank}: checksum {other >> _SHIFT}" for rank, other in enumerate(peer_flags)
                )
                + f"\nin {self.said()}",
                remedy=remedy
                if self._backward
                else "pass the same values on every rank (seed them alike, or gm.broadcast them from rank 0)",
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
    "if every rank repeats the same work on the result, this gradient is world_size times too large: pass dst=gm.I; if "
    "the loss is the sum of the ranks' losses, it is right"
)
_ELSEWHERE = (
    "if the ranks make two calls of the same kind in a different order, make the order the same; a branch that makes "
    "the same call on every rank is right"
)
_SPOILT = "find the operation that produced it on that rank, for example with torch.autograd.detect_anomaly()"
