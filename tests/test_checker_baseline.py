"""Baselines: known findings stay hidden under edits elsewhere, new ones are shown, and gone ones are listed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gradmesh import ArgumentError
from gradmesh.checker.findings import RULES, Finding, Place, beside, fingerprint, read, root, write
from tests.checker_samples import finding, one_of_each

PLACE = Place("train.py", 7, "step", "loss = f(x)")


def moved(own: Finding, by: int) -> Finding:
    return replace(own, at=own.at and replace(own.at, line=own.at.line + by))


def test_a_fingerprint_stays_when_lines_spaces_and_messages_change() -> None:
    own = finding(at=PLACE, subject="w")
    for other in (
        moved(own, 30),
        replace(own, at=replace(PLACE, text="  loss  =  f(x) ")),
        replace(own, message="other", ranks=(3,), remedy="other", began=PLACE),
    ):
        assert fingerprint(other) == fingerprint(own)


@pytest.mark.parametrize(
    "other",
    [
        finding("GM102", at=PLACE),
        finding(at=replace(PLACE, file="other.py")),
        finding(at=replace(PLACE, function="other")),
        finding(at=replace(PLACE, text="loss = g(x)")),
        finding(at=PLACE, subject="w"),
        finding(at=None),
    ],
)
def test_a_fingerprint_changes_with_rule_file_function_source_and_subject(other: Finding) -> None:
    assert fingerprint(other) != fingerprint(finding(at=PLACE))


def test_a_fingerprint_is_that_of_another_checkout_and_of_another_folder_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for name in ("here", "there"):
        (tmp_path / name / ".git").mkdir(parents=True)
        (tmp_path / name / "sub").mkdir()
        for folder in (tmp_path / name, tmp_path / name / "sub"):
            monkeypatch.chdir(folder)
            assert root() == tmp_path / name
            keys.add(fingerprint(finding(at=replace(PLACE, file=str(tmp_path / name / "train.py")))))
        keys.add(fingerprint(finding(at=replace(PLACE, file="../train.py"))))
    assert len(keys) == 1


def test_baseline_hides_findings_whose_lines_moved(tmp_path: Path) -> None:
    found = one_of_each(tmp_path).findings
    write(tmp_path / "known.json", found, tmp_path)
    known = read(tmp_path / "known.json")
    later = [moved(each, 11) for each in found]
    random.Random(0).shuffle(later)
    sorted_ = beside(later, known, tmp_path)
    assert (sorted_.new, set(sorted_.hidden), sorted_.gone) == ((), set(later), ())


@pytest.mark.parametrize("seed", range(20))
def test_new_hidden_and_gone_are_those_of_any_two_runs(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    every = [finding(rule, at=replace(PLACE, text=f"line {n}")) for rule in RULES for n in range(2)]
    before, after = (draw.choices(every, k=draw.randrange(30)) for _ in range(2))
    write(tmp_path / "known.json", before, tmp_path)
    found = beside(after, read(tmp_path / "known.json"), tmp_path)
    assert sorted(map(str, (*found.new, *found.hidden))) == sorted(map(str, after))
    for each in every:
        had, has = before.count(each), after.count(each)
        assert found.hidden.count(each) == min(had, has)
        assert found.new.count(each) == max(0, has - had)
        assert sum(known.fingerprint == fingerprint(each, tmp_path) for known in found.gone) == max(
            0, had - has
        )


def test_baseline_has_one_sorted_line_per_finding(tmp_path: Path) -> None:
    found = one_of_each(tmp_path).findings
    write(tmp_path / "a.json", found, tmp_path)
    write(tmp_path / "b.json", found[::-1], tmp_path)
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert len(text.splitlines()) == len(found) + 2
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2, "findings": []}', '{"version": 1, "findings": [{}]}', "\udcff"],
)
def test_a_file_that_is_not_a_baseline_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError, match="is not a readable baseline"):
        read(path)
    with pytest.raises(ArgumentError, match="--write-baseline"):
        read(tmp_path / "none.json")
