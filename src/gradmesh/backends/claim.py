"""What a rank says about a call of its group, for the others to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Claim"]


@dataclass(frozen=True)
class Claim:
    """What a rank says about a call.

    Attributes:
        digest: differs where the calls do not fit together.
        said: the call in words, for the error.
        refusal: builds the error from every rank's words.
    """

    digest: int
    said: Callable[[], str]
    refusal: Callable[[list[str]], Exception]
