"""`gradmesh explain`: every error and every rule has a page that is read without a clone."""

from __future__ import annotations

import errno
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gradmesh as gm
from gradmesh import cli, errors
from gradmesh.checker.findings import RULES
from gradmesh.cli import explain

ROOT = Path(__file__).parent.parent


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), ["explain", *arguments])


@pytest.mark.parametrize("name", explain.titles())
def test_everything_that_is_listed_has_a_page(name: str) -> None:
    text = explain.page(name)
    assert text.startswith(f"# {name}")
    assert "<!--" not in text
    assert not re.search(r"\]\([^)]*\.md", text)


def test_every_error_and_every_rule_is_listed() -> None:
    kinds = {name for name in errors.__all__ if name not in ("message", "refused_wait")}
    assert set(explain.titles()) == kinds | set(RULES)
    assert all(explain.titles().values())


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("AxisError", "AxisError"),
        ("axiserror", "AxisError"),
        ("gm.AxisError", "AxisError"),
        ("gradmesh.errors.AxisError", "AxisError"),
        ("GM101", "GM101"),
        ("gm101", "GM101"),
        ("missing-sum", "GM101"),
    ],
)
def test_a_page_is_found_by_any_spelling(asked: str, found: str) -> None:
    assert explain.page(asked).startswith(f"# {found}")


def test_links_to_other_pages_are_their_names() -> None:
    assert "(docs/conventions.md)" in explain.page("ArgumentError")
    assert "own call raises `MismatchError` with" in explain.page("ArgumentError")


def test_name_without_a_page_suggests_close_names() -> None:
    with pytest.raises(gm.ArgumentError, match=r"did you mean AxisError\?"):
        explain.page("AxisErorr")
    with pytest.raises(gm.ArgumentError, match="gradmesh explain` to list"):
        explain.page("weather")


def test_the_command_prints_pages_and_lists_them() -> None:
    result = _run("AxisError", "missing-sum")
    assert result.exit_code == 0
    assert result.output == explain.page("AxisError") + "\n" + explain.page("GM101") + "\n"
    assert [line.split()[0] for line in _run().output.splitlines() if line[0] != " "] == list(
        explain.titles()
    )
    wrong = _run("AxisError", "weather")
    assert wrong.exit_code == 1
    assert wrong.stdout == ""
    assert "no help page named" in wrong.stderr


def test_a_wheel_has_the_same_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Laid out as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for source, target in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    there = {name: explain.page(name) for name in explain.titles()}
    monkeypatch.setattr(explain, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(explain, "_INSTALLED", tmp_path / explain._INSTALLED.relative_to(ROOT / "src"))
    assert {name: explain.page(name) for name in there} == there


@pytest.mark.parametrize("command", [["explain"], ["check", __file__]])
def test_closed_pipe_ends_a_command_silently(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "explain_command", closed)
    monkeypatch.setattr(cli, "check_command", closed)
    result = CliRunner().invoke(cli.commands(), command)
    assert result.exit_code == 1
    assert "pipe" not in result.output + result.stderr


def test_a_package_without_its_pages_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(explain, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(explain, "_INSTALLED", tmp_path)
    with pytest.raises(gm.ArgumentError, match="the help pages are not installed"):
        explain.page("GM101")
