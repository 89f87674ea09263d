"""What a rank says about a call, so that calls which do not fit together are refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Claim"]


@dataclass(frozen=True)
class Claim:
    """What a rank says about a call, for the others to compare.

    Attributes:
        digest: 64 bits that differ where the calls do not fit together.
        said: the call in words, for the error; asked only when the calls are refused.
        refusal: builds the error from every rank's words, in rank order.
    """

    digest: int
    said: Callable[[], str]
    refusal: Callable[[list[str]], Exception]
