"""A plugin of pytest that writes each outcome to a file at once, so that those before the end of the process stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_FILE = Path(os.environ["OUTCOMES"])


def _write(outcome: str, test: str) -> None:
    with _FILE.open("a") as file:
        file.write(f"{outcome} {test}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test starts."""
    _write("started", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """A part of a test is over: what goes wrong before or after it counts."""
    if report.when == "call" or not report.passed:
        _write("xfailed" if hasattr(report, "wasxfail") else report.outcome, report.nodeid)


def pytest_collectreport(report: Any) -> None:
    """Tests are collected."""
    if report.failed:
        _write("failed", report.nodeid)
