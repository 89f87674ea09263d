"""`gradmesh demo forces`: its figures, its picture, and that `gradmesh demo` is what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradmesh as gm
from gradmesh import extras
from gradmesh.cli import commands
from gradmesh.demo.forces import job
from gradmesh.demo.forces.settings import Settings

SMALL = ["--ranks", "2", "--backend", "threads", "--steps", "12", "--md", "4", "--channels", "2"]
SMALL += ["--structures", "8", "--atoms", "4096", "--moving", "24"]


def test_json_is_the_only_line_of_stdout_and_the_tables_judge_each_figure(tmp_path: Path) -> None:
    picture = tmp_path / "made" / "forces.png"
    done = CliRunner().invoke(commands(), ["demo", "forces", *SMALL, "--json", "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert max(told["param_error"], told["loss_error"], *told["deviations"].values()) <= 1e-10
    assert told["rank_error"] == 0
    assert told["gradient_without_second_derivative"] > 1e-3
    assert told["force_error"] < told["force_error_of_the_mean"]
    assert set(told["force_error_by_family"]) == set(told["families"])
    assert sum(trained for trained, _ in told["families"].values()) == 8
    sent = [rows["sent"] / rows["gathered"] for rows in told["rows"]]
    assert sent[-1] < 0.4 < sent[0] <= 1
    assert 0 < told["drift_by_atom"] < 1e-3
    assert len(told["losses"]) == 12
    assert (told["ranks"], told["backend"], told["partition"]) == (2, "threads", "space")
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
def test_help_says_what_there_is(arguments: list[str], shown: str) -> None:
    done = CliRunner().invoke(commands(), arguments)
    assert done.exit_code == 0
    assert shown in done.output


def test_options_without_a_name_are_those_of_the_first_job(tmp_path: Path) -> None:
    asked = ["--ranks", "1", "--backend", "threads", "--epochs", "1", "--json"]
    asked += ["--picture", str(tmp_path / "made.png")]
    told = [
        json.loads(CliRunner().invoke(commands(), ["demo", *name, *asked]).stdout) for name in ([], ["clip"])
    ]
    assert told[0]["curves"] == told[1]["curves"]
    assert CliRunner().invoke(commands(), ["demo", "nothing"]).exit_code == 2


def test_missing_extra_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "forces", ("click", "no_such_module"))
    with pytest.raises(gm.MissingExtraError, match=r"gradmesh\[forces\]"):
        job.run(Settings(ranks=1, backend="threads", steps=1))
    done = CliRunner().invoke(commands(), ["demo", "forces", *SMALL])
    assert done.exit_code == 1
    assert "no no_such_module" in done.output
