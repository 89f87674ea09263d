"""What the documentation shows is run: docstrings, README and pages."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import benchmarks
import gradmesh as gm
import gradmesh_pytest
from gradmesh._util import environment
from tests.gloo_lines import without_gloo_lines
from tools import generate, point
from tools.generate import badges

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    module.name
    for package in (gm, benchmarks, gradmesh_pytest)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "errors").glob("*.md")),
    *sorted((ROOT / "docs" / "reports").glob("*.md")),
]


def test_the_readmes_table_is_the_registrys() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == generate.with_table(text)
    assert generate.with_table(text.replace("| V -> R |", "| V -> V |")) == text


@pytest.mark.torch_at_least("2.10", "one of the names is another")
def test_the_page_of_versions_has_every_private_name_of_torch() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    assert text == generate.with_names(text)
    assert generate.with_names(text.replace("`torch._add_batch_dim`", "`torch._none`")) == text


def test_badges_match_the_project_file() -> None:
    for name, fresh in badges().items():
        assert (ROOT / "docs" / "badges" / name).read_text() == fresh


def test_readme_picture_matches_the_computed_values() -> None:
    found, picture = point.deviations(), (ROOT / "docs" / "point.svg").read_text()
    right = {"gm.all_gather", "torch.distributed.nn.functional.all_gather"}
    assert all(found[way] < 1e-14 for way in right)
    wrong = [far for way, far in found.items() if way not in right]
    assert min(wrong) > 0.1
    labels = re.findall(r">([^<>]+)</text>", picture)
    assert labels[: 2 * len(found)] == [*reversed(found), *map(point.said, reversed(found.values()))]
    assert (
        f": {100 * min(wrong):.0f} to {100 * max(wrong):.0f} percent off" in (ROOT / "README.md").read_text()
    )


def test_environment_page_lists_exactly_the_variables() -> None:
    text = (ROOT / "docs" / "launch.md").read_text()
    assert text == generate.with_variables(text)
    named = {variable.name for variable in environment.VARIABLES}
    sources = [file.read_text() for file in (ROOT / "src").rglob("*.py")]
    assert {name for source in sources for name in re.findall(r"GRADMESH_[A-Z_]+[A-Z]", source)} == named


class Shown(doctest.OutputChecker):
    """Compares what an example prints without the lines of Gloo."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, without_gloo_lines(got), optionflags)


@pytest.mark.parametrize("name", ["gradmesh", *MODULES])
def test_docstring_examples_pass(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(Shown())
    for example in doctest.DocTestFinder().find(module, extraglobs={"gm": gm, "torch": torch}):
        try:
            runner.run(example)
        finally:  # each starts without a process group and a mesh
            if dist.is_initialized():
                dist.destroy_process_group()
    assert runner.summarize(verbose=False).failed == 0


VERBS = [name for name in gm.__all__ if callable(getattr(gm, name)) and name[0].islower()]


@pytest.mark.parametrize("name", VERBS)
def test_every_public_function_has_an_example_that_runs(name: str) -> None:
    function: Callable[..., object] = getattr(gm, name)
    assert doctest.DocTestFinder().find(function, name)[0].examples


def blocks(page: Path) -> list[tuple[str, str]]:
    """The python blocks of a page, each with the text block that may follow as its output."""
    found = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page.read_text(), re.DOTALL)
    return [(code, output) for code, output in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page_print_the_shown_output(page: Path) -> None:
    for code, output in blocks(page):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(page), "exec"), {"__name__": "example"})
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if output:
            assert without_gloo_lines(printed.getvalue()).replace(f"{ROOT}{os.sep}", "") == output


def test_the_readmes_first_example_is_short_and_prints_a_gradient() -> None:
    code, output = blocks(ROOT / "README.md")[0]
    assert len(code.splitlines()) <= 12
    assert "tensor" in output


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
