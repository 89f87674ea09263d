"""What a rank says about a call, so that ranks whose calls do not fit together hear of it."""

from __future__ import annotations

import hashlib
from functools import partial

from gradmesh.backends.claim import Claim
from gradmesh.call_sites import call_site, show_site
from gradmesh.errors import MismatchError, message

__all__ = ["Claim", "claim"]


def claim(verb: str, axis: str, text: str, own: str = "") -> Claim:
    """Make a claim.

    Args:
        verb: the verb that is called, for the error.
        axis: the axis, for the error.
        text: what every rank has to say alike.
        own: what it may say differently, for the error alone.
    """
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return Claim(digest, partial(_said, f"{text}{own}"), partial(_refusal, verb, axis))


def _said(text: str) -> str:
    return f"{text} {show_site(call_site())}"


def _refusal(verb: str, axis: str, words: list[str]) -> MismatchError:
    return MismatchError(
        message(
            "the ranks' calls do not fit together",
            op=verb,
            axis=axis,
            expected="the same call, with operands of the same dtype and sizes, on every rank",
            got="\n".join(f"rank {rank}: {said}" for rank, said in enumerate(words)),
            remedy='if sizes differ on purpose, pass them, or sizes="auto"; else look where the ranks part',
        )
    )
