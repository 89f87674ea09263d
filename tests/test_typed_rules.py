"""The table of operators: its language, its proof, and the page that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradmesh.type_inference import rules
from gradmesh.type_inference.rules import TABLE, rule_of
from tools.operators import proof
from tools.operators.page import page, proofs, twins
from tools.operators.samples import SAMPLES

ROOT = Path(__file__).parent.parent


def said(rule: str, *kinds: str) -> tuple[str, str]:
    return rules.outcome(rules.rule(rule), {place: list(kind) for place, kind in enumerate(kinds)})


def test_language_has_the_listed_rules() -> None:
    assert said("0+1", "P", "P") == ("P", "")
    assert said("0+1", "P", "V") == ("P", "")
    assert said("0+1", "P", "Z") == ("P", "")
    assert said("0+1", "P", "I") == ("?", rules.COUNTS)
    assert said("0*1", "P", "R") == ("P", "")
    assert said("0*1", "P", "V") == ("V", rules.VARYING)
    assert said("0/1", "R", "P") == ("V", rules.NONLINEAR)
    assert said("0|1", "R", "P") == ("?", rules.UNSAID)
    assert said("0+1*2", "P", "P", "R") == ("P", "")
    assert said("0+1*2", "P", "P", "") == ("P", "")
    assert said("0*3+1*2", "I", "P", "R", "Z") == ("P", "")
    assert said("0*3+1*2", "I", "P", "R", "S") == ("?", rules.COUNTS)
    assert said("0*1", "P", "Z") == ("Z", "")
    assert said("0@1", "P", "Z") == ("P", "")
    assert said("0@1", "P", "V") == ("V", rules.VARYING)
    assert said("0@1", "R", "P") == ("V", rules.NONLINEAR)
    assert said("1@0+2@0", "S", "P", "Z") == ("P", "")
    assert said("=1", "V", "Z") == ("Z", "")
    assert said("=1", "V", "S") == ("S", "")
    assert said("1 -0", "V", "S") == ("S", "")
    assert said("1 -0", "P", "V") == ("V", "")
    assert said("!0", "S") == ("S", "")
    assert said("!0", "?") == ("?", "")
    assert said("0", "SIR") == ("R", "")
    assert said("0", "SV") == ("V", "")
    assert said("=Z", "V") == ("Z", "")
    assert said("", "P") == ("?", rules.UNSAID)


def test_every_operator_of_the_table_is_torchs_and_stands_there_once() -> None:
    for name in TABLE:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) or getattr(torch.ops.aten, f"{base}_", None)
        assert packet is not None, name
        assert not overload or overload in packet.overloads(), name
    listed = [
        name
        for names in __import__("gradmesh.type_inference.rules", fromlist=["_"])._BY_RULE.values()
        for name in names.split()
    ]
    assert len(listed) == len(set(listed))


@pytest.fixture(scope="module")
def proven() -> dict[str, proof.Proof]:
    return proofs()


def rows(text: str) -> list[list[str]]:
    """Operators and rules, without the figures."""
    return [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| `")]


def test_every_rule_is_so_and_the_page_lists_them(proven: dict[str, proof.Proof]) -> None:
    others = twins()
    there, made = (ROOT / "docs" / "reports" / "operators.md").read_text(), page(proven, others)
    assert rows(there) == rows(made)
    if f"torch {'.'.join(torch.__version__.split('.')[:2])}." in there:  # others have other derivatives
        assert there == made
    shown = [one for one in proven.values() if one.values + one.gradients + one.refused]
    assert len(shown) >= 250
    assert sum(map(len, others.values())) >= 100


WRONG = {
    "add.Tensor": ("x, y", "0*1"),
    "mul.Tensor": ("x, y", "0+1"),
    "mm": ("x, m", "0/1"),
    "exp": ("x", "0"),
    "sum": ("x", "!0"),
    "addmm": ("g, y, m", "0*1*2"),
    "div.Tensor": ("x, y", "0*1"),
    "full_like": ("x, 3", "0"),
    "clone": ("x", "=S"),
    "ones_like": ("x", "=Z"),
    "where.self": ("K, x, y", "1"),
    "index_add": ("x, 0, i, d2", "0*2"),
    "cat": ("[x, y]", "!0"),
    "_softmax": ("x, 1, False", "0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, known_rule = WRONG[name]
    monkeypatch.setattr(proof, "rule_of", lambda base, overload="": known_rule)
    with pytest.raises(proof.RefutedError):
        proof.prove(name, text)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_rule_is_so_with_other_numbers(seed: int) -> None:
    for name, text in SAMPLES:
        proof.prove(name, text, seed)


def test_variants_have_the_rules_of_their_operators() -> None:
    assert rule_of("add_") == rule_of("_foreach_add_") == rule_of("_foreach_add") == rule_of("add")
