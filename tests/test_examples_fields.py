"""The neural operator of the examples and of the demo follows one process, and its data solves the equation."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from math import pi
from pathlib import Path

import pytest
import torch
from gradmesh_demos.fno import VISCOSITY, Job, diffused, draw, initial_fields, print_tables, run, solved

EXAMPLE = Path(__file__).parent.parent / "examples" / "fno_burgers.py"
SMALL = ["--epochs", "1", "--samples", "16", "--points", "34"]


def _far(said: str) -> list[float]:
    found = re.search(r"losses are at most (\S+) apart, parameters (\S+)", said)
    assert found, said
    return [float(number) for number in found.groups()]


def test_four_threads_follow_one_process_step_by_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *SMALL])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert max(_far(said)) < 1e-10
    assert "4 ranks on threads" in said


def test_demo_equals_one_process(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    from rich.console import Console

    job = Job(ranks=3, epochs=2, samples=16, held_out=4, batch=8, points=34, width=4, modes=5, layers=2)
    console = Console(record=True, file=io.StringIO())
    result = run(job)
    print_tables(result, console)
    draw(result).savefig(tmp_path / "fno.png")
    assert max(*result.far, result.slope, result.apart) < 1e-10
    assert len(result.losses) == 4
    assert len(result.held_out) == 2
    assert "equal to rounding" in console.export_text()
    assert (tmp_path / "fno.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(result.as_json()))["points"] == 34


def test_a_steep_wave_is_the_exact_one() -> None:
    """Cole and Hopf: u = -2 nu (log phi)_x with phi a solution of the heat equation; here two of its modes."""
    points, nu = 126, VISCOSITY
    x = 2 * pi * torch.arange(points, dtype=torch.float64) / points

    def exact(time: float) -> torch.Tensor:
        decay = torch.exp(torch.tensor(-nu * (2 * pi) ** 2 * time, dtype=torch.float64))
        return 2 * nu * 2 * pi * 0.6 * decay * x.sin() / (1 + 0.6 * decay * x.cos())

    found = solved(exact(0.0).unsqueeze(0))[0]
    assert float((found - exact(1.0)).abs().max()) < 1e-9


def test_without_steepness_only_diffusion_is_left() -> None:
    fields = initial_fields(3, 64, seed=0)
    assert fields.mean(1).abs().max() < 1e-12
    tiny = 1e-6 * fields
    torch.testing.assert_close(solved(tiny), diffused(tiny), rtol=1e-3, atol=1e-10)
