"""What `make gpu` does: it says where there is no GPU, counts what was run, and fills in the status tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools import generate, gpu

REPORT = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure message="x"/></testcase><testcase name="c"><error message="y"/></testcase>
<testcase name="d"><skipped message="needs 2 NVIDIA GPUs, and there are 1"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = gpu.PAGE.read_text(), gpu.RESULTS.read_text()
    assert gpu.main(["--device", "cuda"]) == 1
    assert capsys.readouterr().err == "No NVIDIA GPU was found, so nothing was run.\n"
    assert (gpu.PAGE.read_text(), gpu.RESULTS.read_text()) == before


def test_failures_and_what_was_not_run_are_counted_with_their_reasons() -> None:
    found = gpu.counts_in(REPORT)
    assert (found["passed"], found["failed"], found["not run"]) == (1, 2, 1)
    assert found["reasons"] == ["failed: b: x", "failed: c: y", "needs 2 NVIDIA GPUs, and there are 1"]
    assert gpu.cell({"laws": found}, "laws") == "**2 of 3 tests fail**"


def test_nothing_is_claimed_of_a_section_that_was_not_run() -> None:
    skipped: dict[str, Any] = {"passed": 0, "failed": 0, "not run": 3, "reasons": ["needs a GPU"]}
    assert gpu.cell({"streams": skipped}, "streams") == "not run"
    for line in gpu.table({}).splitlines()[2:]:
        assert line.endswith("| not run | not run |")


def test_page_and_status_tables_are_those_of_the_results() -> None:
    assert gpu.PAGE.read_text() == gpu.page(gpu.results())
    for file in (generate.README, generate.GPUS):
        begin, end = generate.STATUS
        written = file.read_text().split(begin)[1].split(end)[0].strip()
        assert written.replace("](docs/", "](") == gpu.table(gpu.results())
