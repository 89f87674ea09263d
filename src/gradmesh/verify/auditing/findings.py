"""The result of an audit: the kinds of findings with their severity and remedy, findings, and the report."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of finding.

    Attributes:
        name: the identifier in findings and reports.
        severity: "error": wrong numbers, a crash or a hang; "warning": wrong in some uses only; "note": an unsupported
            feature.
        means: what is wrong, as a sentence.
        remedy: what to change.
    """

    name: str
    severity: str
    means: str
    remedy: str


# What each kind of finding means, and its remedy, most severe first.
_ERRORS = {
    "aborts": (
        "the process exits or crashes while the function runs",
        "check the sizes on every rank before the collective, and raise an exception instead",
    ),
    "hangs": (
        "the function does not return: ranks wait for collectives that other ranks do not issue",
        "issue the same collectives on every rank, in backward too",
    ),
    "backward-raises": (
        "backward raises on a contiguous float gradient",
        "return one value for each argument of forward; None for arguments without a gradient",
    ),
    "not-adjoint": (
        "backward is the adjoint of forward under no convention for the loss, or not under the requested one",
        "apply the adjoint: that of all_gather is reduce_scatter (sum over ranks, then the local slice); that of "
        "all_reduce is all_reduce if the ranks' losses differ, and the identity if every rank computes the same loss; "
        "no other factor",
    ),
    "gradient-overwritten": (
        "backward writes into its incoming gradient, which other code may also use",
        "reduce a copy: grad = grad.clone() before an in-place collective",
    ),
    "operand-overwritten": (
        "the function writes into its operand, which other code (a residual branch) may also read",
        "reduce a copy: x = x.clone() before an in-place collective",
    ),
    "strided-operand": (
        "a non-contiguous operand gives a different result, or raises",
        "use the tensor that .contiguous() returns: x = x.contiguous(); the call does not change x itself",
    ),
    "strided-gradient": (
        "a non-contiguous incoming gradient gives a different result, or raises",
        "use the tensor that .contiguous() returns: grad = grad.contiguous(); gradients may be expanded or transposed",
    ),
    "gradient-uninitialised": (
        "part of the gradient or of the result is uninitialized memory",
        "allocate with torch.zeros instead of torch.empty where the collective does not fill every element",
    ),
    "saved-buffer-overwritten": (
        "a second backward with retain_graph=True gives a different gradient, or backward changes a tensor that was "
        "already returned",
        "do not write into saved tensors, results or reused buffers; clone them first",
    ),
    "second-order-wrong": (
        "the second-order gradient is silently wrong",
        "call differentiable collectives in backward, not raw torch.distributed ones; or decorate backward with "
        "torch.autograd.function.once_differentiable",
    ),
    "forward-mode-wrong": (
        "the forward-mode tangent is silently wrong or lost",
        "define jvp: apply the same collective to the tangent, since the jvp of a linear map is the map itself",
    ),
    "vmap-wrong": (
        "torch.func.vmap gives a different result than a loop",
        "in the vmap rule move the batch dimension so that it is not the one that is split or concatenated",
    ),
    "complex-wrong": (
        "complex operands are handled incorrectly: the result or gradient is conjugated, or loses its imaginary part",
        "reduce torch.view_as_real(x), and return the gradient of the real and the imaginary part",
    ),
    "empty-part": (
        "it fails if a rank's shard is empty",
        "let a rank without rows participate with a tensor of 0 rows",
    ),
    "uneven-parts": (
        "it fails if the ranks' shards have different sizes",
        "exchange the sizes or pass them as an argument, and use them in backward too",
    ),
    "own-rank-assumed": (
        "it is wrong if the group rank differs from the global rank or the local rank",
        "use dist.get_rank(group), and dist.get_global_rank(group, root) for arguments that are global ranks",
    ),
    "global-convention": (
        "the gradient depends on module or program state at the time of backward",
        "read that state in forward and store it in ctx",
    ),
}

_WARNINGS = {
    "unusual-reading": (
        "backward is the adjoint of forward, but only under an unusual convention for such a function",
        "check that the gradients are on the right ranks, then state the intended types: audit(build, arrow='V -> V') "
        "accepts a backward that is correct under them, and otherwise reports what is wrong",
    ),
    "precision-lost": (
        "float64 values are rounded to a narrower dtype",
        "communicate in the operand's dtype; make a narrower one optional, as comm_dtype= is in gradmesh",
    ),
    "result-aliases-operand": (
        "the result shares memory with the operand, so that writing into one changes the other",
        "return x.clone(), or apply x.view_as(x) outside of the Function",
    ),
    "second-order-lost": (
        "the gradient is not differentiable: a loss computed from it has no gradient with respect to the operand",
        "call differentiable collectives in backward, or decorate it with once_differentiable so that it raises",
    ),
    "second-order-raises": (
        "the second-order gradient raises",
        "call differentiable collectives in backward, and save tensors with ctx.save_for_backward",
    ),
    "unused-output": (
        "if one rank does not use the result, the others hang in backward, also inside gradmesh.ordered()",
        "use a gradmesh verb inside gradmesh.ordered(), or add 0 * result.sum() to that rank's loss",
    ),
}

_NOTES = {
    "forward-mode-missing": (
        "forward-mode AD raises",
        "define jvp on the Function: for a linear map it applies the same map to the tangent",
    ),
}

KINDS = {
    name: Kind(name, severity, means, remedy)
    for severity, kinds in (("error", _ERRORS), ("warning", _WARNINGS), ("note", _NOTES))
    for name, (means, remedy) in kinds.items()
}
"""Every kind by its name, most severe first."""


def table() -> str:
    """The kinds as a Markdown table."""
    rows = [f"| `{kind.name}` | {kind.severity} | {kind.means} | {kind.remedy} |" for kind in KINDS.values()]
    return "\n".join(["| kind | severity | what it means | what to change |", "|---|---|---|---|", *rows])


_WIDTH = 112
"""Columns of an audit or a finding as a str; the command uses the terminal's."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the function.

    Attributes:
        kind: a name in `KINDS`.
        text: what was observed.
        ranks: the ranks on which it was observed; empty if unknown.
        line: "file:line" of the code that causes it, if known.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    line: str | None = None

    @property
    def severity(self) -> str:
        """One of "error", "warning" and "note"."""
        return KINDS[self.kind].severity

    @property
    def remedy(self) -> str:
        """What to change."""
        return KINDS[self.kind].remedy

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON-serializable dict."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "text": self.text,
            "ranks": list(self.ranks),
            "line": self.line,
        }

    def __str__(self) -> str:
        return "\n".join(_finding_lines(self, _WIDTH))


@dataclass(frozen=True)
class Audit:
    """The result of `audit`.

    Attributes:
        name: the name of the audited function.
        world_size: the number of ranks.
        backend: the backend.
        arrows: the strongest typed readings under which backward is the adjoint, such as "V -> R". Readings that
            follow from them are omitted here; `holds` includes them.
        findings: what is wrong, most severe first; empty if nothing is.
        linear: whether the function is linear in its operands. If not, its derivative was audited, computed by finite
            differences.
        left_out: kinds that were not checked, each with the reason.
        seconds: the duration of the audit.
        readings: every typed reading that holds.
        arrow: the requested reading; None if none was requested.
        assumes: conditions under which the gradient is correct, as sentences; e.g. that all ranks compute the same
            loss, if backward does not sum the ranks' gradients.
        required: the kinds that the caller named; empty if none.

    Example:
        >>> found = gm.verify.audit(lambda: (gm.shift, torch.ones(2)), world_size=2)
        >>> found.arrows, found.ok
        (('V -> V',), True)
    """

    name: str
    world_size: int
    backend: str
    arrows: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    linear: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    readings: frozenset[str] = frozenset()
    arrow: str | None = None
    assumes: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        """True if there are no errors or warnings. Notes count only if the caller named their kind."""
        return not self._failures

    @property
    def _failures(self) -> list[Finding]:
        return [one for one in self.findings if one.severity != "note" or one.kind in self.required]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of the findings, most severe first."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    def holds(self, arrow: str) -> bool:
        """Whether backward is the adjoint under a reading, including those implied by a stronger one.

        Args:
            arrow: such as "V -> R", or "V, I -> R" if operands differ in type.
        """
        return arrow in self.readings

    def as_json(self) -> dict[str, Any]:
        """The audit as a JSON-serializable dict."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "backend": self.backend,
            "ok": self.ok,
            "linear": self.linear,
            "arrows": list(self.arrows),
            "arrow": self.arrow,
            "assumes": list(self.assumes),
            "findings": [finding.as_json() for finding in self.findings],
            "left_out": dict(self.left_out),
            "seconds": round(self.seconds, 3),
        }

    def json(self) -> str:
        """The audit as one line of JSON."""
        return json.dumps(self.as_json())

    def __str__(self) -> str:
        return shown(self, _WIDTH + 2)


def shown(audit: Audit, width: int) -> str:
    """The audit in lines of at most this many columns."""
    count = len(audit._failures)
    notes = len(audit.findings) - count
    head = f"{audit.name}: {'no finding' if audit.ok else f'{count} finding' + 's' * (count > 1)}"
    head += f", {notes} note" + "s" * (notes > 1) if notes else ""
    lines = _wrapped(
        f"{head} ({audit.world_size} ranks, {audit.backend}, {audit.seconds:.1f} s)", width, 0, 2
    )
    facts = [f"backward is the adjoint as {'; '.join(audit.arrows)}"] if audit.arrows else []
    facts += audit.assumes
    if not audit.linear and "not-adjoint" not in audit.left_out:
        facts.append("not linear: audited its derivative, by finite differences")
    lines += [line for one in facts for line in _wrapped(one, width, 2, 4)]
    lines += [f"  {line}" for finding in audit.findings for line in _finding_lines(finding, width - 2)]
    for kind, reason in audit.left_out.items():
        lines += _wrapped(f"not checked: {kind}: {reason}", width, 2, 4)
    return "\n".join(lines)


def _finding_lines(finding: Finding, width: int) -> list[str]:
    on = (
        ""
        if not finding.ranks
        else f" on rank{'s' * (len(finding.ranks) > 1)} {', '.join(map(str, finding.ranks))}"
    )
    parts = [
        *finding.text.splitlines(),
        *([f"at {finding.line}"] if finding.line else []),
        f"remedy: {finding.remedy}",
    ]
    head = _wrapped(f"{finding.severity:<8} {finding.kind}{on}", width, 0, 9)
    return [*head, *(line for part in parts for line in _wrapped(part, width, 9, 9))]


def _wrapped(text: str, width: int, first: int, rest: int) -> list[str]:
    """The text in lines, indented by `first` and `rest`; a longer word, such as a path, has a line of its own."""
    return textwrap.wrap(
        text,
        max(width, rest + 20),
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The distinct findings, most severe first."""
    order = list(KINDS)
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.kind)))
