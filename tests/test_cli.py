"""The command line: information about the installation, and errors."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

from gradmesh import cli
from gradmesh._util.environment import EXTRAS
from gradmesh.backends import shm
from gradmesh.ops.registry import table
from tests.forking import Forking


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), arguments)


def test_help_names_every_command() -> None:
    result = _run("--help")
    assert result.exit_code == 0
    assert re.findall(r"^  (\w+)  ", result.output, re.MULTILINE) == [
        "audit",
        "bench",
        "check",
        "demo",
        "explain",
        "info",
    ]


def test_without_arguments_the_description_is_printed() -> None:
    result = _run()
    assert "Differentiable collective communication for PyTorch." in result.output
    assert "bench" in result.output


@pytest.mark.parametrize("arguments", [("modes", "--quick"), ("compare", "a", "b"), ("modes", "--help")])
def test_a_command_that_has_moved_says_where_to(arguments: tuple[str, ...]) -> None:
    result = _run(*arguments)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"python -m benchmarks.{arguments[0]}" in result.stderr


@pytest.mark.parametrize("command", ["audit", "bench", "check", "demo clip", "demo forces", "info"])
def test_every_command_explains_itself_and_its_options(command: str) -> None:
    result = _run(*command.split(), "--help")
    assert result.exit_code == 0
    found: Any = cli.commands()
    for name in command.split():
        found = found.commands[name]
    parameters = [p for p in found.params if isinstance(p, click.Option)]
    assert parameters
    for each in parameters:
        assert each.help
        assert each.opts[0] in result.output


def test_info_prints_versions_and_backends() -> None:
    result = _run("info")
    assert result.exit_code == 0
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in result.output.splitlines())
    assert rows["torch"] == torch.__version__
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))
    assert int(rows["cores"]) >= 1
    default = shm.default()
    assert [name for name in rows if name.startswith("backend")] == [
        f"backend {name}" for name in ("shm", "threads", "gloo", "hosts", "nccl", "mpi", "mpi4py")
    ]
    assert rows[f"backend {default}"] == "available, the default of gm.launch"
    assert rows["backend threads"] == "available"
    assert (rows["backend nccl"] == "available") == torch.cuda.is_available()
    assert [rows[f"extra {extra}"] for extra in ("cli", "demo")] == ["installed", "installed"]


def test_info_says_how_to_install_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "notebook", ("no_such_module",))
    assert "no no_such_module: pip install 'gradmesh[notebook]'" in _run("info").output


def test_info_lists_the_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GRADMESH_RECYCLE  64" not in _run("info").output
    monkeypatch.setenv("GRADMESH_RECYCLE", "64")
    assert re.search(r"^GRADMESH_RECYCLE\s+64\s*$", _run("info").output, re.MULTILINE)


def test_info_prints_the_table_of_the_registry() -> None:
    assert _run("info", "--table").output == table() + "\n"


def test_unknown_backend_error_lists_the_known_ones(tmp_path: Path) -> None:
    result = _run("demo", "--backend", "carrier-pigeon", "--picture", str(tmp_path / "curves.png"))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "carrier-pigeon" in result.stderr
    assert "gloo" in result.stderr
    assert "threads" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_unwritable_picture_path_raises_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = _run("demo", "--picture", str(tmp_path / "file" / "curves.png"))
    assert result.exit_code == 1
    assert "file" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["--ranks", "--epochs"])
def test_numbers_below_one_are_refused(option: str) -> None:
    result = _run("demo", option, "0")
    assert result.exit_code == 2
    assert option in result.stderr


def test_without_click_there_is_a_text_and_no_traceback(forking: Forking) -> None:
    done = forking.run("import sys; sys.modules['click'] = None; from gradmesh.cli import main; main()")
    assert done.returncode == 1
    assert "pip install 'gradmesh[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_gradmesh_loads_nothing_of_the_extras(forking: Forking) -> None:
    modules = sorted(
        {module for extra in EXTRAS.values() for module in extra} - {"numpy"}
    )  # torch loads numpy
    done = forking.run(
        f"import sys, gradmesh, gradmesh.cli; print([m for m in {modules} if m in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_command_starts_without_torchs_benchmark_utilities_which_may_warn_about_cuda(
    forking: Forking,
) -> None:
    done = forking.run(
        "import gradmesh.cli, sys; gradmesh.cli.commands(); print('torch.utils.benchmark' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr
    assert not done.stderr


def test_python_m_gradmesh_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradmesh", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("gradmesh, version ")


def test_extras_are_those_of_the_project_file() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    name = re.compile(r"[\w-]+")
    wanted = {
        extra: {
            match.group()
            for entry in declared[extra]
            if (match := name.match(entry)) and match.group() != "gradmesh"
        }
        for extra in EXTRAS
    }
    wanted["demo"] |= wanted["cli"]
    wanted["forces"] |= wanted["cli"]
    as_distribution = {"sklearn": "scikit-learn"}
    assert {
        extra: {as_distribution.get(module, module) for module in modules}
        for extra, modules in EXTRAS.items()
    } == wanted
