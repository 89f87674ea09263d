"""What an audit can find: the one list, from which the pages and the reports take their words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "SEVERITIES", "Kind", "table"]

SEVERITIES = ("error", "warning", "note")
"""From the worst down: numbers that are wrong, or no answer; what goes wrong in some use; what cannot be asked for."""


@dataclass(frozen=True)
class Kind:
    """One kind of finding.

    Attributes:
        name: as findings and reports spell it.
        severity: one of `SEVERITIES`.
        means: what is wrong, as a sentence.
        remedy: what to change.
    """

    name: str
    severity: str
    means: str
    remedy: str


_ALL = (
    Kind(
        "aborts",
        "error",
        "the process ends while the function runs",
        "check the sizes on every rank before the call, and raise",
    ),
    Kind(
        "hangs",
        "error",
        "the function does not return: ranks wait for calls that do not come",
        "make the same calls on every rank, in backward too",
    ),
    Kind(
        "backward-raises",
        "error",
        "backward raises on a plain gradient",
        "return one gradient for each argument of forward, None where there is none",
    ),
    Kind(
        "not-adjoint",
        "error",
        "backward is the adjoint of forward under no convention for the loss, or not under the requested one",
        "apply the adjoint: a gather's is the sum of the ranks' gradients, then the own slice; a sum's is the sum "
        "where the ranks' losses differ, and the identity where every rank repeats the same loss; no other factor",
    ),
    Kind(
        "gradient-overwritten",
        "error",
        "backward writes into the gradient that was handed in, which others hold too",
        "reduce a clone: grad = grad.clone() before a call that works in place",
    ),
    Kind(
        "operand-overwritten",
        "error",
        "the function writes into its operand, which a residual beside it reads",
        "reduce a clone: x = x.clone() before a call that works in place",
    ),
    Kind(
        "strided-operand",
        "error",
        "an operand that is not contiguous gives another result, or raises",
        "keep what .contiguous() returns and use that: it is a copy, and the operand does not change with it",
    ),
    Kind(
        "strided-gradient",
        "error",
        "a gradient that is not contiguous gives another result, or raises",
        "keep what .contiguous() returns and use that; a gradient may be expanded or transposed",
    ),
    Kind(
        "gradient-uninitialised",
        "error",
        "part of the gradient or of the result is memory that nobody wrote",
        "use torch.zeros for what the collective does not fill",
    ),
    Kind(
        "saved-buffer-overwritten",
        "error",
        "a second backward with retain_graph=True gives another gradient, or backward changes what was handed out",
        "do not write into saved tensors, results or buffers that are used again",
    ),
    Kind(
        "second-order-wrong",
        "error",
        "the gradient of the gradient is wrong without a word",
        "in backward call differentiable collectives, not raw ones; or mark backward with once_differentiable",
    ),
    Kind(
        "forward-mode-wrong",
        "error",
        "the tangent of forward mode is wrong or lost without a word",
        "apply the collective to the tangent: jvp of a linear map is the map",
    ),
    Kind(
        "vmap-wrong",
        "error",
        "torch.func.vmap gives another result than a loop",
        "move the batch dimension out of the way of the one that is split or joined",
    ),
    Kind(
        "complex-wrong",
        "error",
        "complex operands are not treated as pairs of real ones: a conjugate or the imaginary part is lost",
        "reduce torch.view_as_real, and let the gradient be that of the real and the imaginary part",
    ),
    Kind(
        "empty-part",
        "error",
        "it fails where a rank's part is empty",
        "let a rank without rows take part with a tensor of no rows",
    ),
    Kind(
        "uneven-parts",
        "error",
        "it fails where the ranks' parts have different sizes",
        "exchange the sizes, or be told them, and use those in backward too",
    ),
    Kind(
        "own-rank-assumed",
        "error",
        "it is wrong where the rank in the group is not the rank in the world or on the machine",
        "ask the group: dist.get_rank(group); dist.get_global_rank(group, root) for what takes a global rank",
    ),
    Kind(
        "global-convention",
        "error",
        "the gradient changes with state of the module or the program at the time of backward",
        "decide in forward and keep the decision in ctx",
    ),
    Kind(
        "unusual-reading",
        "warning",
        "backward is the adjoint of forward, but only under types that such a function is seldom meant under",
        "look whether the gradients are on the right ranks, and say what is meant: audit(build, arrow='V -> V') "
        "accepts a backward that is right under it, and names what is wrong with another one",
    ),
    Kind(
        "precision-lost",
        "warning",
        "float64 passes through a narrower dtype",
        "keep the operand's dtype; a narrower one for what travels has to be asked for",
    ),
    Kind(
        "result-aliases-operand",
        "warning",
        "the result is the operand's memory, so that writing into one changes the other",
        "return a clone, or x.view_as(x) outside of the Function",
    ),
    Kind(
        "second-order-lost",
        "warning",
        "the gradient has no gradient: a loss made from it does not reach the operand",
        "in backward call differentiable collectives, or mark it with once_differentiable so that it raises",
    ),
    Kind(
        "second-order-raises",
        "warning",
        "the gradient of the gradient raises",
        "in backward call differentiable collectives, and save tensors by ctx.save_for_backward",
    ),
    Kind(
        "unused-output",
        "warning",
        "a rank that does not use the result leaves the others waiting in backward, also inside gradmesh.ordered()",
        "use a verb of gradmesh inside gradmesh.ordered(), or add 0 * result.sum() to that rank's loss",
    ),
    Kind(
        "forward-mode-missing",
        "note",
        "forward mode raises",
        "give the Function a jvp: of a linear map it is the map on the tangent",
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
"""Every kind by its name, from the worst down."""


def table() -> str:
    """The kinds as a Markdown table."""
    rows = [f"| `{kind.name}` | {kind.severity} | {kind.means} | {kind.remedy} |" for kind in KINDS.values()]
    return "\n".join(["| kind | severity | what it means | what to change |", "|---|---|---|---|", *rows])
