"""Calls in words, and the errors that both backends raise about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from gradmesh.call_sites import Site, show_site, show_tensors
from gradmesh.errors import MismatchError, message

__all__ = ["RETURNED_REMEDY", "SAME_CALLS", "nothing_came", "refusal", "show_call", "unfit_message"]

SAME_CALLS = "every rank of a group makes the same calls, in one order"
RETURNED_REMEDY = (
    "find the call that it did not make; if that is a backward one, because its loss does not use what the others' "
    "do, put the calls into `with gradmesh.ordered():`, which runs them backward on every rank"
)
"""What to do about a rank that is over while others wait for it."""


def show_call(call: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], site: Site) -> str:
    """A call on one line: its name, the dtypes and shapes of its tensors, and the line of code that made it."""
    to = f" -> {show_tensors(outputs)}" if outputs and outputs is not inputs else ""
    return f"{call}  {show_tensors(inputs)}{to}  {show_site(site)}"


def nothing_came(ranks: Iterable[int], seconds: float) -> str:
    """What to say of ranks that did not come in time."""
    named = ", ".join(map(str, ranks))
    who = f" from rank{'s' * (',' in named)} {named}" if named else ""
    return f"nothing came{who} for {seconds:g} s, the timeout of the group"


def refusal(group: str) -> Callable[[list[str]], Exception]:
    """What to raise when the ranks of a group made calls that do not fit together, from every rank's words."""

    def build(words: list[str]) -> Exception:
        return MismatchError(
            message(
                "the ranks' calls do not fit together",
                axis=f"group '{group}'",
                expected="the same call with fitting tensors on every rank",
                got="\n".join(f"rank {rank}: {said}" for rank, said in enumerate(words)),
                remedy="find the branch that the ranks take differently, at the places above",
            )
        )

    return build


def unfit_message(group: str, sent: str, asked: str) -> MismatchError:
    """The error of a receive whose tensor does not fit the message."""
    return MismatchError(
        message(
            "the receiver's tensor does not fit the message",
            axis=group,
            expected=sent,
            got=asked,
            remedy="give both the same number of elements and the same dtype",
        )
    )
