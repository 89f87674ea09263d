"""docs/reports/operators.md: every operator, its rule, and how it was proven."""

from __future__ import annotations

import warnings
from collections import defaultdict

import torch

from gradmesh.type_inference.collectives import CALLS
from gradmesh.type_inference.rules import TABLE, S, V
from tools.operators.proof import Proof, prove, twins_of
from tools.operators.samples import SAMPLES

_HEAD = """\
# Operator rules of gm.typed: how each torch operator changes V, R, I and P

How [`gm.typed`](../typed.md) derives the type of each operator's result from the types of its operands, and how each
rule was tested. Unless noted: if all inputs are replicated the output is replicated; if any input varies the output
varies. Operators that depend on shapes only, and random ones, are the exceptions. A rule says what happens to a pending
sum, P. Numbers are argument positions:

| rule | meaning |
|---|---|
| `0` | linear in argument 0: P gives P; each tensor of a list is a term |
| `0+1` | jointly linear in both: P and P give P, a V beside a P is a term; a replicated value beside a P is a finding |
| `0*1` | linear in each: P and R, or P and I, give P; P and P, P and V are findings |
| `0+1*2` | a sum of such terms |
| `0/1` | linear in 0 for a given 1, and not in 1 |
| `0\\|1` | linear in 0 for a given 1; unknown for a P in 1: a note |
| `0@1` | linear in 0; 1 is a mask or indices that select elements: P and V give a finding |
| `!0` | not linear in 0: a finding |
| `-0` | 0 is overwritten |
| `=S`, `=Z`, `=V` | depends on shapes only: the same on every rank; zeros, also a pending sum; uninitialized memory |
| `=1` | depends on shapes and the number in argument 1: zeros if that is 0, else the same on every rank |
| `~` | random: observed at run time |
| none | unknown for pending sums: a note |

Each rule is tested on three simulated ranks, in double precision, for every choice of operand types (for some choices
only, with three operands and more). The columns count the tests:

* *values*: results of type R or I are equal on every rank bit for bit; results of type P add up to the operator's
  result on the sums.
* *gradients*: the operands' gradients, combined as their types say, equal the finite differences of the objective of
  all ranks; those of I and P operands are the same on every rank.
* *faults*: where the rule reports a finding, the sum over ranks is in fact different.
* *twins*: the in-place form and the form on lists (`_foreach_`) give the same bits.

`python -m tools.report docs/reports/operators.md` runs these tests and writes this page.
"""


def proofs() -> dict[str, Proof]:
    """Every operator's proof: those of its samples, added up."""
    made: dict[str, Proof] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, text in SAMPLES:
            one = prove(name, text)
            base, _, overload = name.partition(".")
            key = name if f"{base}.{overload}" in TABLE else base
            whole = made.setdefault(key, Proof(key, one.rule))
            whole.values += one.values
            whole.gradients += one.gradients
            whole.refused += one.refused
            whole.said |= one.said
    return made


def twins() -> dict[str, list[str]]:
    """The twins of each operator that did the same."""
    found: dict[str, set[str]] = defaultdict(set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, text in SAMPLES:
            found[name.partition(".")[0]].update(twins_of(name, text))
    return {name: sorted(others) for name, others in found.items()}


def page(proven: dict[str, Proof], others: dict[str, list[str]]) -> str:
    """The page."""
    rows = [_HEAD]
    count = sum(len(set(names)) for names in others.values())
    left = sorted(set(TABLE) - set(proven))
    rows.append(
        f"{len(proven)} operators and {count} twins are tested, on torch "
        f"{'.'.join(torch.__version__.split('.')[:2])}. {len(left)} more have a rule that is not tested here, "
        "because they run on other devices or have no rule for pending sums.\n"
    )
    rows += ["| operator | rule | twins | values | gradients | faults | |", "|---|---|---|---|---|---|---|"]
    for name, one in sorted(proven.items()):
        shown = " ".join(f"`{other}`" for other in others.get(name, ()))
        said = "; ".join(sorted(one.said))
        rule = f"`{one.rule}`".replace("|", "\\|") if one.rule else ""
        counts = " | ".join(str(n or "") for n in (one.values, one.gradients, one.refused))
        rows.append(f"| `{name}` | {rule} | {shown} | {counts} | {said} |")
    rows += ["", "Not tested here: " + ", ".join(f"`{name}`" for name in left) + ".", ""]
    rows += [
        "## Collectives of torch.distributed",
        "",
        "Where torch's dispatcher sees them: on Gloo and NCCL. A result that is the same on every rank is R or I, "
        "depending on its use.",
        "",
        "| collective | its result is |",
        "|---|---|",
    ]
    words = {S: "the same on every rank", V: "V"}
    rows += [
        f"| `{space}.{name}` | {words[kind]} |"
        for space, calls in CALLS.items()
        for name, kind in calls.items()
    ]
    return "\n".join(rows) + "\n"
