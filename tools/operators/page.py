"""docs/reports/operators.md: every operator, its rule, and how it was proven."""

from __future__ import annotations

import warnings
from collections import defaultdict

import torch

from gradmesh.type_inference.kinds import S, V
from gradmesh.type_inference.raw import CALLS
from gradmesh.type_inference.table import TABLE
from tools.operators.proof import Proof, prove
from tools.operators.samples import SAMPLES
from tools.operators.twins import twins_of

__all__ = ["page", "proofs", "twins"]

_HEAD = """\
# What each operator does to types over ranks

`gm.typed` follows [types](../typed.md) by this table. What is made of values that are the same on every rank is the same;
what is made of a value that varies, varies: so it is for every operator here but those of shapes alone and random ones.
A rule says what becomes of a pending sum, P. Numbers are the places of the arguments:

| rule | reads |
|---|---|
| `0` | linear in argument 0: of P comes P; each tensor of a list is a term |
| `0+1` | linear in both together: P and P give P, a V beside a P is a term; a value that every rank has is a finding |
| `0*1` | linear in each: P and R, or P and I, give P; P and P, P and V are findings |
| `0+1*2` | a sum of such terms |
| `0/1` | linear in 0 for a given 1, and not in 1 |
| `0\\|1` | linear in 0 for a given 1; nothing is said of 1: a note |
| `0@1` | linear in 0; 1, a mask or indices, chooses elements: P and V give a finding |
| `!0` | not linear in 0: a finding |
| `-0` | 0 is overwritten |
| `=S`, `=Z`, `=V` | made of shapes alone: the same on every rank; zeros, which are a pending sum too; not written yet |
| `=1` | made of shapes and the number 1: zeros if that is 0, else the same on every rank |
| `~` | random: observed when the program runs |
| none | nothing is said of pending sums: a note |

Proven means: on three simulated ranks, in double precision, for every choice of types of the operands (for three
operands and more, for some).

* *Values*: what is the same is so bit for bit; what is P sums up to what the operator makes of the sums.
* *Gradients*: those of the operands, added up as their types say, are the finite differences of the objective of all
  ranks, and those of I and P are the same on every rank.
* *Faults*: where the rule calls it a finding, the sum over ranks is another.
* *Twins*: in place and on lists (`_foreach_`), the same bits.

`python -m tools.operators --write docs/reports/operators.md` proves them and writes this page.
"""


def proofs() -> dict[str, Proof]:
    """Every operator's proof: those of its samples, added up.

    Raises:
        RefutedError: a rule says what is not so.
    """
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
        f"{len(proven)} operators and {count} twins of them are proven; {len(left)} have a rule that is not proven "
        "here, since they run on other devices, or say nothing of pending sums. These are the figures of torch "
        f"{'.'.join(torch.__version__.split('.')[:2])}.\n"
    )
    rows += ["| operator | rule | twins | values | gradients | faults | |", "|---|---|---|---|---|---|---|"]
    for name, one in sorted(proven.items()):
        shown = " ".join(f"`{other}`" for other in others.get(name, ()))
        said = "; ".join(sorted(one.said))
        rule = f"`{one.rule}`".replace("|", "\\|") if one.rule else ""
        counts = " | ".join(str(n or "") for n in (one.values, one.gradients, one.refused))
        rows.append(f"| `{name}` | {rule} | {shown} | {counts} | {said} |")
    rows += ["", "Not proven here: " + ", ".join(f"`{name}`" for name in left) + ".", ""]
    rows += [
        "## Collectives of torch.distributed",
        "",
        "Where torch's dispatcher sees them: on Gloo and NCCL. What is the same on every rank is R or I as its use "
        "makes it.",
        "",
        "| collective | leaves |",
        "|---|---|",
    ]
    words = {S: "the same on every rank", V: "V"}
    rows += [
        f"| `{space}.{name}` | {words[kind]} |"
        for space, calls in CALLS.items()
        for name, kind in calls.items()
    ]
    return "\n".join(rows) + "\n"
