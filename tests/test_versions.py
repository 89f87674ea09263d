"""The table of what the tests did on other versions of torch and Python is made of pytest's own reports."""

from __future__ import annotations

from pathlib import Path

from tools.pages import END
from tools.versions import BEGIN, read, table

ROOT = Path(__file__).parent.parent
REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" timestamp="2026-01-02T03:04:05">
<testcase classname="tests.test_a" name="test_right"/>
<testcase classname="tests.test_a" name="test_wrong[2]"><failure message="assert"/></testcase>
<testcase classname="tests.test_a" name="test_unclean"/>
<testcase classname="tests.test_a" name="test_unclean"><error message="teardown"/></testcase>
<testcase classname="tests.test_b" name="test_left_out"><skipped message="no GPU"/></testcase>
<testcase classname="" name="tests.test_c"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


AGAIN = """<?xml version="1.0"?><testsuites><testsuite name="pytest" timestamp="2026-01-03T03:04:05">
<testcase classname="tests.test_a" name="test_wrong[2]"/>
<testcase classname="tests.test_c" name="test_right"/>
</testsuite></testsuites>"""
PAGE = f"""{BEGIN}

| torch | day |
|---|---|
| 2.9.1 | another day | 1 | 1 | 0 | 0 |
| 2.15.0 | another day | 4 | 0 | 0 | 0 |
| Python 3.9 | another day | 5 | 0 | 0 | 0 |

* 2.9.1: `tests/test_c.py::test_old`
* 2.15.0: `tests/test_c.py::test_new`

{END}
"""


def test_report_counts_tests_and_names_failures(tmp_path: Path) -> None:
    path = tmp_path / "torch-2.15.0.xml"
    path.write_text(REPORT)
    found = read(path)
    assert (found.version, found.day) == ("2.15.0", "2026-01-02")
    assert [found.count(outcome) for outcome in ("passed", "failed", "skipped")] == [1, 3, 1]
    assert found.failed == [
        "tests/test_a.py::test_unclean",
        "tests/test_a.py::test_wrong[2]",
        "tests/test_c.py",
    ]
    lines = table([found]).splitlines()
    assert lines[2] == "| 2.15.0 | 2026-01-02 | 1 | 3 | 1 | 0 |"
    assert lines[-2] == "* 2.15.0: `tests/test_a.py::test_wrong[2]`"


def test_what_ran_again_counts_and_other_versions_stay(tmp_path: Path) -> None:
    first, again = tmp_path / "torch-2.15.0.xml", tmp_path / "torch-2.15.0-again.xml"
    first.write_text(REPORT)
    again.write_text(AGAIN)
    python = tmp_path / "python-3.14.xml"
    python.write_text(AGAIN)
    lines = table([read(again), read(first), read(python)], PAGE).splitlines()
    assert lines[2:] == [
        "| 2.9.1 | another day | 1 | 1 | 0 | 0 |",
        "| 2.15.0 | 2026-01-03 | 3 | 1 | 1 | 2 |",
        "| Python 3.9 | another day | 5 | 0 | 0 | 0 |",
        "| Python 3.14 | 2026-01-03 | 2 | 0 | 0 | 0 |",
        "",
        "* 2.9.1: `tests/test_c.py::test_old`",
        "* 2.15.0: `tests/test_a.py::test_unclean`",
    ]


def test_the_page_has_a_place_for_it() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    assert END in text.partition(BEGIN)[2]
