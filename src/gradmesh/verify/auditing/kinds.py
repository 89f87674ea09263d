"""The kinds of findings of an audit. Reports and documentation pages are generated from this list."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "SEVERITIES", "Kind", "table"]

SEVERITIES = ("error", "warning", "note")
"""Most severe first: wrong numbers, a crash or a hang; wrong in some uses only; an unsupported feature."""


@dataclass(frozen=True)
class Kind:
    """One kind of finding.

    Attributes:
        name: the identifier in findings and reports.
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
        "the process exits or crashes while the function runs",
        "check the sizes on every rank before the collective, and raise an exception instead",
    ),
    Kind(
        "hangs",
        "error",
        "the function does not return: ranks wait for collectives that other ranks do not issue",
        "issue the same collectives on every rank, in backward too",
    ),
    Kind(
        "backward-raises",
        "error",
        "backward raises on a contiguous float gradient",
        "return one value for each argument of forward; None for arguments without a gradient",
    ),
    Kind(
        "not-adjoint",
        "error",
        "backward is the adjoint of forward under no convention for the loss, or not under the requested one",
        "apply the adjoint: that of all_gather is reduce_scatter (sum over ranks, then the local slice); that of "
        "all_reduce is all_reduce if the ranks' losses differ, and the identity if every rank computes the same loss; "
        "no other factor",
    ),
    Kind(
        "gradient-overwritten",
        "error",
        "backward writes into its incoming gradient, which other code may also use",
        "reduce a copy: grad = grad.clone() before an in-place collective",
    ),
    Kind(
        "operand-overwritten",
        "error",
        "the function writes into its operand, which other code (a residual branch) may also read",
        "reduce a copy: x = x.clone() before an in-place collective",
    ),
    Kind(
        "strided-operand",
        "error",
        "a non-contiguous operand gives a different result, or raises",
        "use the tensor that .contiguous() returns: x = x.contiguous(); the call does not change x itself",
    ),
    Kind(
        "strided-gradient",
        "error",
        "a non-contiguous incoming gradient gives a different result, or raises",
        "use the tensor that .contiguous() returns: grad = grad.contiguous(); gradients may be expanded or transposed",
    ),
    Kind(
        "gradient-uninitialised",
        "error",
        "part of the gradient or of the result is uninitialized memory",
        "allocate with torch.zeros instead of torch.empty where the collective does not fill every element",
    ),
    Kind(
        "saved-buffer-overwritten",
        "error",
        "a second backward with retain_graph=True gives a different gradient, or backward changes a tensor that was "
        "already returned",
        "do not write into saved tensors, results or reused buffers; clone them first",
    ),
    Kind(
        "second-order-wrong",
        "error",
        "the second-order gradient is silently wrong",
        "call differentiable collectives in backward, not raw torch.distributed ones; or decorate backward with "
        "torch.autograd.function.once_differentiable",
    ),
    Kind(
        "forward-mode-wrong",
        "error",
        "the forward-mode tangent is silently wrong or lost",
        "define jvp: apply the same collective to the tangent, since the jvp of a linear map is the map itself",
    ),
    Kind(
        "vmap-wrong",
        "error",
        "torch.func.vmap gives a different result than a loop",
        "in the vmap rule move the batch dimension so that it is not the one that is split or concatenated",
    ),
    Kind(
        "complex-wrong",
        "error",
        "complex operands are handled incorrectly: the result or gradient is conjugated, or loses its imaginary part",
        "reduce torch.view_as_real(x), and return the gradient of the real and the imaginary part",
    ),
    Kind(
        "empty-part",
        "error",
        "it fails if a rank's shard is empty",
        "let a rank without rows participate with a tensor of 0 rows",
    ),
    Kind(
        "uneven-parts",
        "error",
        "it fails if the ranks' shards have different sizes",
        "exchange the sizes or pass them as an argument, and use them in backward too",
    ),
    Kind(
        "own-rank-assumed",
        "error",
        "it is wrong if the group rank differs from the global rank or the local rank",
        "use dist.get_rank(group), and dist.get_global_rank(group, root) for arguments that are global ranks",
    ),
    Kind(
        "global-convention",
        "error",
        "the gradient depends on module or program state at the time of backward",
        "read that state in forward and store it in ctx",
    ),
    Kind(
        "unusual-reading",
        "warning",
        "backward is the adjoint of forward, but only under an unusual convention for such a function",
        "check that the gradients are on the right ranks, then state the intended types: audit(build, arrow='V -> V') "
        "accepts a backward that is correct under them, and otherwise reports what is wrong",
    ),
    Kind(
        "precision-lost",
        "warning",
        "float64 values are rounded to a narrower dtype",
        "communicate in the operand's dtype; make a narrower one optional, as comm_dtype= is in gradmesh",
    ),
    Kind(
        "result-aliases-operand",
        "warning",
        "the result shares memory with the operand, so that writing into one changes the other",
        "return x.clone(), or apply x.view_as(x) outside of the Function",
    ),
    Kind(
        "second-order-lost",
        "warning",
        "the gradient is not differentiable: a loss computed from it has no gradient with respect to the operand",
        "call differentiable collectives in backward, or decorate it with once_differentiable so that it raises",
    ),
    Kind(
        "second-order-raises",
        "warning",
        "the second-order gradient raises",
        "call differentiable collectives in backward, and save tensors with ctx.save_for_backward",
    ),
    Kind(
        "unused-output",
        "warning",
        "if one rank does not use the result, the others hang in backward, also inside gradmesh.ordered()",
        "use a gradmesh verb inside gradmesh.ordered(), or add 0 * result.sum() to that rank's loss",
    ),
    Kind(
        "forward-mode-missing",
        "note",
        "forward-mode AD raises",
        "define jvp on the Function: for a linear map it applies the same map to the tangent",
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
"""Every kind by its name, most severe first."""


def table() -> str:
    """The kinds as a Markdown table."""
    rows = [f"| `{kind.name}` | {kind.severity} | {kind.means} | {kind.remedy} |" for kind in KINDS.values()]
    return "\n".join(["| kind | severity | what it means | what to change |", "|---|---|---|---|", *rows])
