"""The pages on tests and CI: their tests run, and their reports are those that they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401

import gradmesh.checker.report
import gradmesh.checker.run  # noqa: F401
import gradmesh_pytest.plans  # noqa: F401
from tests.test_plugin import OPTIONS

# The unused imports: pytester unloads what the tests of a page load first, and torch cannot be loaded twice.

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "testing.md"
EXAMPLES = [
    found
    for page in (PAGE, DOCS / "ci.md")
    for found in re.findall(r"```python\n(.*?)```\n(?:\n```console\n(.*?)```)?", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_tests_of_the_page_end_as_it_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    code, report = EXAMPLES[number]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makepyfile(code)
    result = pytester.runpytest_inprocess(*OPTIONS)
    outcomes = result.parseoutcomes()
    assert set(outcomes) == ({"failed"} if report else {"passed"})
    # In this order; between them stand the lines that the page leaves out.
    lines = iter(result.outlines)
    for line in report.splitlines():
        assert line in lines, line


def test_the_page_names_every_option_and_no_other() -> None:
    text = PAGE.read_text()
    settings = (PAGE.parent.parent / "src" / "gradmesh_pytest" / "settings.py").read_text()
    options = set(re.findall(r'"(--world-\w+)"', settings))
    configured = set(re.findall(r'addini\(\s*"(world_\w+)"', settings))
    assert set(re.findall(r"--world-\w+", text)) == options
    assert set(re.findall(r"\bworld_\w+", text)) == configured
