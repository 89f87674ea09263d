"""The page of sources: every row leads to a page, to a test, and to a command that runs something."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reports" / "coverage.md"

SOURCES = [
    "ocpmodels.common.gp_utils",
    "towhee.models.drl.until_module.AllGather",
    "ksuit.distributed.functional.AllGatherGradAutograd",
    "autograd.Function",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.rpc",
    "torch.futures",
    "torch.library",
    "named tensors",
    "complex numbers",
    "torch.profiler",
    "torch.utils.benchmark",
    "torch.cuda._sanitizer",
    "torch.onnx",
    "optim.Rprop",
    "lr_scheduler.CyclicLR",
    "nn.BCEWithLogitsLoss",
    "nn.utils.parametrizations.spectral_norm",
    "fft.irfftn",
    "sparse.spdiags",
    "linalg.inv_ex",
    "narrow_copy",
]
"""What each row is of, in the order of the source documents."""


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "source"]


def anchors(page: Path) -> set[str]:
    """The names that headings of a page are linked by."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_source_has_its_row() -> None:
    named = [row[0].lstrip("`") for row in rows()]
    assert all(len(row) == 5 for row in rows())
    assert len(named) == len(SOURCES)
    for found, source in zip(named, SOURCES, strict=True):
        assert found.startswith(source)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`").split("`")[0])
def test_a_row_leads_to_a_page_a_test_and_a_command(row: list[str]) -> None:
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", row[2])
    tests = re.findall(r"`(tests/\w+\.py)`", row[3])
    assert links
    assert tests
    for target, anchor in links:
        page = PAGE.parent / target
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), (target, anchor)
    for test in tests:
        assert (ROOT / test).exists(), test
    assert_runs(shlex.split(row[4].strip("`")))


def assert_runs(command: list[str]) -> None:
    """Every file that a command names is there, and so is each test that it picks."""
    if command[0] == "gradmesh":
        assert (ROOT / "src" / "gradmesh" / command[1]).exists()
        return
    assert command[0] == "pytest"
    files = [word for word in command[1:] if word.endswith(".py")]
    texts = [(ROOT / file).read_text() for file in files]
    beside = {name for text in texts for name in re.findall(r"from tests(?: import |\.)(\w+)", text)}
    texts += [(ROOT / "tests" / f"{name}.py").read_text() for name in beside]
    assert files
    if "-k" not in command:
        return
    picked = re.sub(r"\bnot \w+|\b(and|or)\b", " ", command[command.index("-k") + 1]).split()
    for word in picked:
        assert any(word in text for text in texts), word
