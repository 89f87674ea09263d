"""SARIF: valid under the published schema, and what a code host needs is in it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gradmesh.checker.findings import RULES, Verdict
from gradmesh.checker.report import sarif
from tests.checker_samples import finding, one_of_each

SCHEMA = json.loads((Path(__file__).parent / "sarif" / "sarif-schema-2.1.0.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())


def log(verdict: Verdict, folder: Path, **options: Any) -> dict[str, Any]:
    document = sarif(verdict, version="0.1.0", base=folder, **options)
    return json.loads(json.dumps(document))


@pytest.mark.parametrize("status", ["complete", "stopped", "not-run"])
@pytest.mark.parametrize("empty", [False, True], ids=["findings", "no finding"])
def test_a_log_is_valid_under_the_published_schema(tmp_path: Path, status: Any, empty: bool) -> None:
    verdict = replace(one_of_each(tmp_path), status=status)
    document = log(replace(verdict, findings=()) if empty else verdict, tmp_path, script="train.py")
    VALIDATOR.validate(document)
    assert len(document["runs"][0]["results"]) == (0 if empty else len(RULES))
    assert document["runs"][0]["invocations"][0]["executionSuccessful"] == (status == "complete")


def test_schema_rejects_invalid_logs(tmp_path: Path) -> None:
    right = log(one_of_each(tmp_path), tmp_path)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for way, value in (
        (("runs", 0, "results", 0, "level"), "fatal"),
        (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "startLine"), 0),
        (("runs", 0, "results", 0, "message"), {}),
        (("runs", 0, "tool", "driver", "rules", 0, "helpUri"), 3),
        (("runs", 0, "invocations", 0), {}),
        (("version",), "2.0.0"),
    ):
        wrong: Any = copy.deepcopy(right)
        inner = wrong
        for step in way[:-1]:
            inner = inner[step]
        inner[way[-1]] = value
        assert list(VALIDATOR.iter_errors(wrong)), way


def test_every_rule_has_a_descriptor_that_its_results_point_at(tmp_path: Path) -> None:
    run = log(one_of_each(tmp_path), tmp_path)["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    for rule in rules:
        own = RULES[rule["id"]]
        assert rule["defaultConfiguration"]["level"] == own.severity
        assert rule["shortDescription"]["text"] == own.short
        assert own.why in rule["fullDescription"]["text"]
        assert own.remedy in rule["help"]["markdown"]
        assert rule["name"].isalnum()
        assert rule["properties"]["page"] == own.page
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == RULES[result["ruleId"]].severity


def test_files_of_the_repository_are_named_from_its_root_and_others_as_they_are(tmp_path: Path) -> None:
    verdict = one_of_each(tmp_path)
    inside = log(verdict, tmp_path)["runs"][0]["results"][1]
    place = inside["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "src/a%20model.py"
    assert place["region"] == {"startLine": 11, "snippet": {"text": "y = gather(x, 1)"}}
    assert inside["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "Model.forward"
    outside = log(verdict, tmp_path / "src")["runs"][0]["results"][1]["relatedLocations"][0]
    assert outside["physicalLocation"]["artifactLocation"]["uri"] == (tmp_path / "train.py").as_uri()


def test_origin_is_a_related_location_linked_from_the_message(tmp_path: Path) -> None:
    results = log(one_of_each(tmp_path), tmp_path)["runs"][0]["results"]
    assert results[1]["relatedLocations"][0]["id"] == 1
    assert "[here](1), at train.py:3" in results[1]["message"]["text"]
    assert "relatedLocations" not in results[0]
    assert "(1)" not in results[0]["message"]["text"]


def test_a_finding_without_a_place_is_shown_at_the_script(tmp_path: Path) -> None:
    nowhere = Verdict((finding("GM401", at=None),), (), 2, 1)
    [result] = log(nowhere, tmp_path, script="train.py")["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 1}
    assert place["artifactLocation"]["uri"].endswith("train.py")
    assert log(nowhere, tmp_path)["runs"][0]["results"][0]["locations"] == []


def test_fingerprints_distinguish_findings_even_on_one_line(tmp_path: Path) -> None:
    verdict = one_of_each(tmp_path)
    twice = replace(verdict, findings=(*verdict.findings, verdict.findings[0]))
    keys = [
        each["partialFingerprints"]["gradmeshCheck/v1"] for each in log(twice, tmp_path)["runs"][0]["results"]
    ]
    assert len(set(keys)) == len(keys)
    assert keys[-1] == keys[0].replace(":1", ":2")


def test_untraceable_parts_are_notifications(tmp_path: Path) -> None:
    [invocation] = log(one_of_each(tmp_path), tmp_path)["runs"][0]["invocations"]
    assert invocation["toolExecutionNotifications"] == [
        {"level": "note", "message": {"text": "a cell was not followed"}}
    ]
