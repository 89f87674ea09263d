"""`gradmesh demo forces`: its figures, its picture, and that `gradmesh demo` is what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradmesh_demos import forces
from gradmesh_demos.forces import Job

import gradmesh as gm
from gradmesh._util import environment
from gradmesh.cli import commands

SMALL = ["--ranks", "2", "--backend", "threads", "--steps", "12", "--md", "4", "--channels", "2"]
SMALL += ["--structures", "8", "--atoms", "4096", "--moving", "24"]


def test_json_is_the_only_line_of_stdout_and_the_tables_judge_each_figure(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "forces.png"
    done = CliRunner().invoke(commands(), ["demo", "forces", *SMALL, "--json", "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert max(report["param_error"], report["loss_error"], *report["deviations"].values()) <= 1e-10
    assert report["rank_error"] == 0
    assert report["gradient_without_second_derivative"] > 1e-3
    assert report["force_error"] < report["force_error_of_the_mean"]
    assert set(report["force_error_by_family"]) == set(report["families"])
    assert sum(trained for trained, _ in report["families"].values()) == 8
    sent = [rows["sent"] / rows["gathered"] for rows in report["rows"]]
    assert sent[-1] < 0.4 < sent[0] <= 1
    assert 0 < report["drift_by_atom"] < 1e-3
    assert len(report["losses"]) == 12
    assert (report["ranks"], report["backend"], report["partition"]) == (2, "threads", "space")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    verdicts = [
        row.split()[-1] for row in done.stderr.splitlines() if row.rstrip().endswith(("rounding", "wrong"))
    ]
    assert verdicts == ["rounding"] * 7 + ["wrong"]


def test_structures_can_be_written_instead(tmp_path: Path) -> None:
    path = tmp_path / "new" / "made.xyz"
    asked = ["--structures", "4", "--write", str(path), "--json"]
    done = CliRunner().invoke(commands(), ["demo", "forces", *asked])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"structures": 4, "written": str(path)}
    assert path.read_text().count("Properties=") == 4


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["demo", "--help"], "forces"),
        (["demo", "clip", "--help"], "--epochs"),
        (["demo", "forces", "--help"], "--partition"),
    ],
)
def test_help_lists_commands_and_options(arguments: list[str], shown: str) -> None:
    done = CliRunner().invoke(commands(), arguments)
    assert done.exit_code == 0
    assert shown in done.output


def test_options_without_a_name_are_those_of_the_first_job(tmp_path: Path) -> None:
    asked = ["--ranks", "1", "--backend", "threads", "--epochs", "1", "--json"]
    asked += ["--picture", str(tmp_path / "made.png")]
    report = [
        json.loads(CliRunner().invoke(commands(), ["demo", *name, *asked]).stdout) for name in ([], ["clip"])
    ]
    assert report[0]["curves"] == report[1]["curves"]
    assert CliRunner().invoke(commands(), ["demo", "nothing"]).exit_code == 2


def test_missing_extra_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.EXTRAS, "forces", ("click", "no_such_module"))
    with pytest.raises(gm.MissingExtraError, match=r"gradmesh\[forces\]"):
        forces.run(Job(ranks=1, backend="threads", steps=1))
    done = CliRunner().invoke(commands(), ["demo", "forces", *SMALL])
    assert done.exit_code == 1
    assert "not installed: no_such_module" in done.output
