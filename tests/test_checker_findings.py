"""The registry of rules, and what a check returns."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from gradmesh.checker import findings
from gradmesh.checker.findings import RULES, Place, Rule, Verdict
from tests.checker_samples import finding

PLACE = Place("train.py", 7, "step", "loss.backward()")


def test_rules_are_in_the_order_of_their_ids_and_each_id_and_name_stands_once() -> None:
    assert list(RULES) == sorted(RULES)
    assert all(RULES[rule.id] is rule for rule in RULES.values())
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_rule_explains_itself_in_sentences(rule: Rule) -> None:
    assert re.fullmatch(r"GM[1-5]\d\d", rule.id)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
    assert rule.severity in {"error", "warning"}
    for text in (rule.short, rule.why, rule.remedy):
        assert text[0].isupper()
        assert text.endswith(".")
        assert "  " not in text
    assert len(rule.short) < 120
    assert len(rule.why) > len(rule.short) or rule.id == "GM501"


def test_a_rule_and_a_finding_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RULES["GM101"].severity = "warning"
    with pytest.raises(FrozenInstanceError):
        finding().message = "other"


def test_the_remedy_is_the_rules_where_none_is_given() -> None:
    assert finding().remedy == RULES["GM101"].remedy
    assert finding(remedy="do this").remedy == "do this"


def test_a_verdict_is_ok_without_errors_and_when_all_of_it_ran() -> None:
    warning = finding("GM203")
    assert warning.severity == "warning"
    assert Verdict((), (), 2, 1).ok
    assert Verdict((warning,), (), 2, 1).ok
    assert not Verdict((warning, finding()), (), 2, 1).ok
    assert not Verdict((), (), 2, 1, status="stopped").ok
    assert Verdict((warning, finding()), (), 2, 1).warnings == (warning,)


def test_a_verdict_as_json_has_every_field_in_json_values() -> None:
    verdict = Verdict((finding(began=PLACE, subject="norm.weight"),), ("a note",), 4, 2, {"checked": 1.23456})
    data = json.loads(json.dumps(verdict.as_json()))
    assert data["findings"] == [
        {
            "rule": "GM101",
            "name": "missing-sum",
            "severity": "error",
            "message": "the ranks' gradients differ",
            "at": {"file": "train.py", "line": 7, "function": "step", "text": "loss.backward()"},
            "began": {"file": "train.py", "line": 7, "function": "step", "text": "loss.backward()"},
            "received": None,
            "ranks": [0, 1],
            "subject": "norm.weight",
            "remedy": RULES["GM101"].remedy,
            "step": None,
        }
    ]
    assert (data["ranks"], data["steps"], data["notes"]) == (4, 2, ["a note"])
    assert data["seconds"] == {"checked": 1.235}
    assert (data["status"], data["ok"]) == ("complete", False)


def test_neither_rules_nor_findings_import_torch() -> None:
    tree = ast.parse(Path(findings.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "dataclasses" in imported
    assert not any(name.split(".")[0] == "torch" for name in imported)
