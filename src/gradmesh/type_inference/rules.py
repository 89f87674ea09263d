"""How the types of an operator's operands make that of its result: the language of the table, and what it means.

A rule is written over the positions of an operator's arguments::

    0+1*2      linear in 0 and, for a given 1, in 2: the sum of the terms, each a product of its factors
    0/1        linear in 0 for a given 1, and not linear in 1
    0|1        linear in 0 for a given 1; nothing is said of 1
    0@1        linear in 0; 1, a mask or indices, chooses elements of it
    !0         not linear in 0: what is made of a pending sum is not the pending sum of what is made
    -0         not read: an operand that is overwritten
    =S =Z =V   made of shapes alone: the same on every rank, zeros, or uninitialized memory
    =1         made of shapes and the number 1: zeros if that is 0, else the same on every rank
    ~          random: the result is observed

With no pending sum among the operands, all rules say the same: what is made of values that are the same on every rank
is the same, as far as the ranks do the same; what is made of a value that varies, varies.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradmesh.type_inference.kinds import SAMES, UNKNOWN, ZERO, Kind, P, S, V, flavor

__all__ = ["COUNTS", "NONLINEAR", "PRODUCT", "READ", "UNSAID", "VARYING", "Rule", "outcome", "rule"]

NONLINEAR = "nonlinear-on-partial"
PRODUCT = "product-of-partials"
VARYING = "partial-times-varying"
COUNTS = "counts-many-times"
READ = "partial-read"
UNSAID = "unsaid"
"""The rule says nothing about a pending sum there: a note."""


@dataclass(frozen=True)
class Rule:
    """One rule, read.

    Attributes:
        text: as it is written.
        terms: the terms of the sum, each the positions of its factors, with the sign before them.
        nonlinear: the positions in which it is not linear.
        unread: those that are not read.
        made: the kind of a result that is made of shapes alone, "~" of a random one; the position of the number that
            it is filled with.
    """

    text: str
    terms: tuple[tuple[tuple[int, str], ...], ...] = ()
    nonlinear: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    made: str = ""


@functools.cache
def rule(text: str) -> Rule:
    """Read a rule.

    >>> rule("0+1/2").terms
    (((0, '*'),), ((1, '*'), (2, '/')))
    """
    terms: list[tuple[tuple[int, str], ...]] = []
    nonlinear, unread, made = set(), set(), ""
    for part in text.split():
        if part[0] == "!":
            nonlinear.add(int(part[1:]))
        elif part[0] == "-":
            unread.add(int(part[1:]))
        elif part[0] in "=~":
            made = part.lstrip("=")
        else:
            for term in part.split("+"):
                factors = re.findall(r"([*/|@]?)(\d+)", term)
                terms.append(tuple((int(place), sign or "*") for sign, place in factors))
    return Rule(text, tuple(terms), frozenset(nonlinear), frozenset(unread), made)


Operands = Mapping[int, Sequence[Kind]]
"""The kinds at each position: one for a tensor, several for a list, `S` for a number that is not 0, none for None."""


def outcome(of: Rule, operands: Operands) -> tuple[Kind, str]:
    """The kind of the result, and what is wrong, if anything is.

    >>> outcome(rule("0*1"), {0: "P", 1: "R"}), outcome(rule("0*1"), {0: "P", 1: "P"})
    (('P', ''), ('V', 'product-of-partials'))
    """
    if of.made:
        return (ZERO if ZERO in operands.get(int(of.made), ()) else S) if of.made.isdigit() else of.made, ""
    read = {place: kinds for place, kinds in operands.items() if place not in of.unread}
    met = {kind for kinds in read.values() for kind in kinds}
    if UNKNOWN in met:
        return UNKNOWN, ""
    if P not in met:
        if V in met:
            return V, ""
        zeros = of.terms and not of.nonlinear and all(_is_zero(term, read) for term in of.terms)
        return (ZERO if zeros else flavor(met)), ""
    holds = {place for place, kinds in read.items() if P in kinds}
    if holds & of.nonlinear:
        return V, NONLINEAR
    if not holds <= {place for term in of.terms for place, _ in term}:
        return UNKNOWN, UNSAID
    return _sum([outcome for term in of.terms for outcome in _term(term, read)])


def _is_zero(term: Sequence[tuple[int, str]], read: Operands) -> bool:
    return any(sign == "*" and read.get(place) and set(read[place]) == {ZERO} for place, sign in term)


def _term(term: Sequence[tuple[int, str]], read: Operands) -> list[tuple[Kind, str]]:
    """The kinds of a term; a list by itself is one term for each of its tensors."""
    if len(term) == 1:
        return [(kind, "") for kind in read.get(term[0][0], ())]
    if not read.get(term[0][0]):  # a factor that is not there: None
        return []
    if _is_zero(term, read):
        return [(ZERO, "")]
    pending = [sign for place, sign in term if P in read.get(place, ())]
    others = [kind for place, _ in term for kind in read.get(place, ()) if kind != P]
    if "|" in pending:
        return [(UNKNOWN, UNSAID)]
    if "/" in pending or "@" in pending:
        return [(V, NONLINEAR)]
    if len(pending) > 1:
        return [(V, PRODUCT)]
    if V in others:
        return [(V, VARYING if pending else "")]
    if pending:
        return [(P, "")]
    return [(flavor(others), "")]


def _sum(terms: Sequence[tuple[Kind, str]]) -> tuple[Kind, str]:
    for kind, problem in terms:
        if problem:
            return kind, problem
    met = {kind for kind, _ in terms}
    if P not in met:  # overwritten, or multiplied away
        return (V if V in met else ZERO if met == {ZERO} else flavor(met)), ""
    # Its sum is not what was meant: nothing more is said of it.
    return (UNKNOWN, COUNTS) if met & (SAMES - {ZERO}) else (P, "")
