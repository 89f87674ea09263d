"""The signature of a call, which ranks compare so that mismatched calls raise on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["FLAGS", "CallCheck"]

FLAGS = (1 << 34) - 1
"""The bits of a call hash that carry flags; only the other bits are compared."""


class CallCheck:
    """The signature of one call on a rank.

    Args:
        digest: 64 bits that differ between mismatched calls.
        said: returns the description of the call, for the error; called only on a mismatch.
        refusal: builds the error from the descriptions of all ranks, in rank order.

    Attributes:
        digest: as above.
        flags: bits that are sent to the other ranks without comparison; see `FLAGS`.
        peer_flags: every rank's flags, in rank order, if they differ; else None.
    """

    __slots__ = ("_refusal", "_said", "digest", "flags", "peer_flags")

    def __init__(
        self, digest: int, said: Callable[[], str], refusal: Callable[[list[str]], Exception], flags: int = 0
    ) -> None:
        self.digest = digest
        self.flags = flags
        self.peer_flags: Sequence[int] | None = None
        self._said, self._refusal = said, refusal

    def said(self) -> str:
        """The description of the call."""
        return self._said()

    def refusal(self, words: list[str]) -> Exception:
        """The error, from the descriptions of all ranks, in rank order."""
        return self._refusal(words)
