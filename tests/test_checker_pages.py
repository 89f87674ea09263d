"""The pages of the rules: what they say is the registry's, and their programs are found wrong and right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradmesh.checker.findings import RULES, Rule
from gradmesh.checker.run import Target, check_script
from tools import rules as writer

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "rules"
PROGRAMS = [(rule, kind) for rule in RULES.values() for kind in ("wrong", "right")]
QUICK = {"GM101", "GM105", "GM201", "GM401"}
"""Rules whose programs are run in every test run; those of all are with the slow ones."""


def program(rule: Rule, kind: str) -> str:
    """The wrong or the right program of a rule's page."""
    text = (ROOT / rule.page).read_text()
    section = text.split(f"\n## {kind.capitalize()}\n")[1].split("\n## ")[0]
    [code] = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    return code


def test_the_pages_are_up_to_date() -> None:
    for path, text in writer.pages(FOLDER).items():
        assert path.read_text() == text, f"{path.name}: python -m tools.report docs/rules"


def test_a_stale_page_would_be_seen() -> None:
    path = FOLDER / "GM101.md"
    text = path.read_text()
    assert writer.with_rule(text.replace(RULES["GM101"].short, "Other."), RULES["GM101"]) == text
    assert writer.with_rule(text, RULES["GM102"]) != text


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    assert {path.stem for path in FOLDER.glob("GM*.md")} == set(RULES)
    assert len(re.findall(r"^\| \[GM\d+\]", writer.index(), re.M)) == len(RULES)


@pytest.mark.parametrize(("rule", "kind"), PROGRAMS, ids=lambda each: getattr(each, "id", each))
def test_a_program_is_whole_and_short(rule: Rule, kind: str) -> None:
    code = program(rule, kind)
    ast.parse(code)
    assert 15 <= len(code.splitlines()) <= 45
    assert 'init_process_group("gloo")' in code
    assert "gradmesh" not in code
    assert max(map(len, code.splitlines())) <= 120


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_the_programs_of_a_page_differ_in_a_few_lines(rule: Rule) -> None:
    wrong, right = (set(program(rule, kind).splitlines()) for kind in ("wrong", "right"))
    assert 1 <= len(wrong ^ right) <= 20


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def runs() -> Iterator[object]:
    """Every program."""
    for rule, kind in PROGRAMS:
        marks = [] if rule.id in QUICK else [pytest.mark.slow]
        yield pytest.param(rule, kind, marks=marks, id=f"{rule.id}-{kind}")


@pytest.mark.processes
@pytest.mark.parametrize(("rule", "kind"), [*runs()])
def test_the_check_finds_the_pages_rule_in_the_wrong_program_and_no_error_in_the_right_one(
    rule: Rule, kind: str, tmp_path: Path
) -> None:
    script = tmp_path / f"{rule.name}.py"
    script.write_text(program(rule, kind))
    verdict = check_script(Target(str(script)), ranks=2, steps=2, timeout=5.0 if rule.id == "GM402" else 30.0)
    found = [finding.rule.id for finding in verdict.findings]
    if kind == "wrong":
        assert rule.id in found, verdict.as_json()
        places = [finding.at for finding in verdict.findings if finding.rule is rule]
        assert all(place is None or Path(place.file).name == script.name for place in places)
    else:
        assert not verdict.errors, verdict.as_json()
        assert rule.id not in found
        assert verdict.status == "complete"
