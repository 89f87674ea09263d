"""What a rank says about a call, so that calls which do not fit together are refused on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["FLAGS", "CallCheck"]

FLAGS = (1 << 34) - 1
"""The bits of a head, or of a digest that travels, that carry a claim's flags; the others are compared."""


class CallCheck:
    """What a rank says about one call, for the others to compare.

    Args:
        digest: 64 bits that differ where the calls do not fit together.
        said: the call in words, for the error; asked only when the calls are refused.
        refusal: builds the error from every rank's words, in rank order.

    Attributes:
        digest: as above.
        flags: bits that are not compared, but told to the others; see `FLAGS`.
        heard: every rank's flags, in rank order, where they are not the same on all; None: they are.
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
        """The call in words."""
        return self._said()

    def refusal(self, words: list[str]) -> Exception:
        """The error, from every rank's words, in rank order."""
        return self._refusal(words)
