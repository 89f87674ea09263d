"""The table of what each backend carries is what calls do."""

from __future__ import annotations

import pytest

from tools import backends, report


def row(case: str) -> list[str]:
    text = (report.ROOT / "docs" / "reports" / "backends.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {case} |"))
    return [part.strip() for part in line.strip("|").split("|")]


@pytest.mark.parametrize(
    "case", ["int16", "bool", "float8", "complex64", "no elements", "not contiguous", "0-d"]
)
def test_cells_of_threads_are_what_calls_do(case: str) -> None:
    found = backends.cells("threads", [case])
    assert row(case)[2] == backends._joined(found[case], 0)
    assert row(case)[1] == backends.sent(case)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_cell_is_what_calls_do(backend: str) -> None:
    found = backends.cells(backend)
    for case in backends.CASES:
        assert row(case)[2 + backends.BACKENDS.index(backend)] == backends._joined(found[case], 0), case
        if backend == "gloo":
            assert row(case)[5] == backends._joined(found[case], 1), case
