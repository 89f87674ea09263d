"""`python -m tools.report` writes every generated page, and every generated part names its command."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from tools import pages, report, rules

MADE_BY_MAKE_DOCS = {"README.md", "docs/badges", "docs/launch.md"}
MARK = re.compile(r"<!-- (python -m tools\.report .*?) -->")
TEXTS = [report.ROOT / "README.md", *sorted((report.ROOT / "docs").rglob("*.md"))]


def test_every_command_on_a_page_is_of_a_page_in_the_table() -> None:
    named = set()
    for path in TEXTS:
        text = path.read_text()
        found = re.findall(r"python -m\s+tools\.report\s+([\w/.-]*\w)", text)
        own = str(path.relative_to(report.ROOT))
        for page in found:
            assert page in report.PAGES, f"{own} names python -m tools.report {page}"
        named |= set(found)
        assert len(MARK.findall(text)) == text.count(pages.END), own
        for command in MARK.findall(text):
            assert own.startswith(command.split()[3]), f"{own} has a part of {command}"
    unnamed = {page for page in report.PAGES if page.startswith("docs") and not page.endswith(".svg")} - named
    assert unnamed == MADE_BY_MAKE_DOCS - {"README.md"}


@pytest.mark.parametrize("page", report.PAGES)
def test_each_page_exists_and_its_tool_can_write_it(page: str) -> None:
    assert (report.ROOT / page).exists()
    main = import_module(report.PAGES[page]).main
    assert list(inspect.signature(main).parameters) == ["arguments", "into"]


def test_every_picture_of_the_docs_has_colours_for_a_dark_page() -> None:
    docs = report.ROOT / "docs"
    pictures = [path for kind in ("svg", "png", "jpg") for path in docs.rglob(f"*.{kind}")]
    assert len(pictures) > 30
    for path in pictures:
        if path.parent.name != "badges":  # they have a ground of their own
            assert "prefers-color-scheme" in path.read_bytes().decode(errors="replace"), path


def test_no_tool_writes_a_page_by_an_option_of_its_own() -> None:
    files = [path for folder in ("tools", "benchmarks") for path in (report.ROOT / folder).rglob("*.py")]
    having = {path.parts[-2:] for path in files if '"--write"' in path.read_text()}
    assert having == {("attack", "command.py")}  # a folder for findings


def test_it_lists_the_pages_and_rejects_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 0
    assert ["docs/reports/layers.md", "tools.layers"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    assert report.main(["docs/types.md"]) == 2
    assert "docs/types.md is not a generated page" in capsys.readouterr().err


def test_it_writes_what_is_not_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docs" / "rules"
    folder.mkdir(parents=True)
    for path in rules.FOLDER.glob("GM*.md"):
        (folder / path.name).write_text(path.read_text())
    page = folder / "GM101.md"
    page.write_text(pages.with_part(page.read_text(), rules.BEGIN, "Out of date."))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.main(["docs/rules"]) == 0
    assert page.read_text() == (rules.FOLDER / "GM101.md").read_text()
    assert (folder / "README.md").read_text() == (rules.FOLDER / "README.md").read_text()
