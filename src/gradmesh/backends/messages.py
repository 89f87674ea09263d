"""Descriptions of calls, and errors of both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from gradmesh.call_sites import Site, show_site, show_tensors
from gradmesh.errors import MismatchError, message

__all__ = [
    "DIFFERENT_BRANCH",
    "RETURNED_REMEDY",
    "SAME_CALLS",
    "mismatched_message",
    "refusal",
    "show_call",
    "timed_out_text",
]

SAME_CALLS = "every rank of a group makes the same calls in the same order"
DIFFERENT_BRANCH = (
    "compare the lines above: a branch (often `if rank == 0`) makes the ranks issue different collectives"
)
RETURNED_REMEDY = (
    "find the call that it did not make; if that is a backward call, because its loss does not use the output, put "
    "forward and backward into `with gradmesh.ordered():` and end the block with gradmesh.backward(loss) on every rank"
)
"""The remedy if a rank has returned while others wait for it."""


def show_call(
    call: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    site: Site,
    origin: Callable[[], str] | None = None,
) -> str:
    """Describe a call on one line: its name, the dtypes and shapes of its tensors, and its call site.

    The backward of a call is described by the forward call (`origin`), which the program contains.
    """
    if origin is not None:
        return f"{origin()}, run {show_site(site)}"
    to = f" -> {show_tensors(outputs)}" if outputs and outputs is not inputs else ""
    return f"{call}  {show_tensors(inputs)}{to}  {show_site(site)}"


def timed_out_text(ranks: Iterable[int], seconds: float) -> str:
    """The error text for ranks that timed out."""
    named = ", ".join(map(str, ranks))
    who = f" from rank{'s' * (',' in named)} {named}" if named else ""
    return f"timed out after {seconds:g} s: received nothing{who}"


def refusal(group: str) -> Callable[[list[str]], Exception]:
    """Returns a function that creates the mismatch error from the descriptions of all ranks."""

    def build(words: list[str]) -> Exception:
        return MismatchError(
            message(
                "the ranks made different calls",
                axis=f"group '{group}'",
                expected="the same call with matching tensors on every rank",
                got="\n".join(f"rank {rank}: {text}" for rank, text in enumerate(words)),
                remedy=DIFFERENT_BRANCH,
            )
        )

    return build


def mismatched_message(group: str, sent: str, asked: str) -> MismatchError:
    """The error of a receive whose tensor does not match the message."""
    return MismatchError(
        message(
            "the receiver's tensor does not match the message",
            axis=group,
            expected=sent,
            got=asked,
            remedy="use tensors of the same dtype and number of elements on both ranks",
        )
    )
