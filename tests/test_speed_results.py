"""`benchmarks.speed` and `benchmarks.compare`: what they make of the times, and how they show and keep them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks.compare import changes, compare
from benchmarks.modes.command import modes
from benchmarks.speed import page, tables
from benchmarks.speed.command import size_of, speed
from benchmarks.speed.contenders import FLOOR_NAME
from benchmarks.speed.overhead import overheads
from benchmarks.speed.picture import draw
from benchmarks.speed.results import Cell, Key, Memory, Results, loaded
from benchmarks.speed.targets import OURS, PEERS, RAW_SHM, against_peers, targets
from benchmarks.speed.tasks import SIZES, VERBS, WAYS
from benchmarks.terminal import progress
from gradmesh.errors import ArgumentError
from tests.gloo_lines import without_gloo_lines


def made_up(microseconds: Mapping[str, float], **changed: float) -> Results:
    """A run in which each contender always takes the same time; `changed` is by verb."""
    cells = [
        Cell(ranks, verb, way, size, name, 1, (1e-6 * time * changed.get(verb, 1.0),) * 3)
        for ranks in (2, 4)
        for verb in VERBS
        for size in SIZES
        for way in WAYS
        for name, time in microseconds.items()
    ]
    memory = [Memory(2, "all_gather", SIZES[-1], name, 3 * 2**20, 2**20) for name in microseconds]
    machine = {"CPU": "made up", "torch": "2"}
    return Results(
        machine, "python -m benchmarks.speed", {"rounds": 3}, cells, memory, {"DTensor (gloo)": "a | reason"}
    )


FUNCOL = "functional collectives (shm)"
KEPT = {FLOOR_NAME: 1.0, OURS: 1.9, RAW_SHM: 1.5, FUNCOL: 2.0, "MPI": 1.6, PEERS[0]: 40.0, PEERS[1]: 20.0}


def test_promises_that_are_kept_are_met() -> None:
    found = targets(made_up(KEPT))
    assert len(found) == 2 * 10
    assert {target.verdict for target in found} == {"met"}
    assert "10.5 times" in found[0].figure


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({PEERS[1]: 18.0}, ["geometric mean"] * 3),
        ({PEERS[1]: 5.0}, ["in every cell", *["geometric mean"] * 4]),
        ({"MPI": 1.4}, ["MPICH"]),
        ({RAW_SHM: 2.1, "MPI": 3.0}, ["the floor"]),
        ({FUNCOL: 1.8}, ["the verb adds", "the verb adds"]),
    ],
)
def test_promises_that_are_not_kept_are_missed(changed: dict[str, float], missed: list[str]) -> None:
    found = [target for target in targets(made_up(KEPT | changed)) if target.verdict == "missed"]
    assert len(found) == 2 * len(missed)
    for target, words in zip(found, 2 * missed, strict=True):
        assert words in target.promise


def test_one_slow_cell_breaks_the_promise_for_every_cell_alone() -> None:
    results = made_up(KEPT | {PEERS[1]: 40.0})
    at = Key(2, "all_gather", "backward", 4)
    cells = [
        dataclasses.replace(cell, samples=(15e-6,) * 3) if (cell.key, cell.contender) == (at, OURS) else cell
        for cell in results.cells
    ]
    found = targets(dataclasses.replace(results, cells=cells))
    assert "2.7 times at worst: backward, 4 B" in found[0].figure
    assert [target.verdict for target in found].count("missed") == 1 + 1  # and the overhead of that verb


def test_unmeasured_bound_does_not_pass() -> None:
    found = targets(made_up({FLOOR_NAME: 1.0, OURS: 1.9}))
    assert [target.verdict for target in found].count("not measured") == 2 * 8


def test_the_fastest_peer_counts() -> None:
    found = against_peers(made_up(KEPT), Key(2, "shift", "forward", 4))
    assert found is not None
    assert found[0] == pytest.approx(20 / 1.9)
    assert found[1] == PEERS[1]


def test_an_overhead_is_the_median_of_the_differences_of_a_round() -> None:
    cells = [
        Cell(2, "shift", "forward", 4, "torch.distributed (gloo)", 1, (10e-6, 90e-6, 12e-6)),
        Cell(2, "shift", "forward", 4, "gradmesh (gloo)", 2, (2 * 15e-6, 2 * 97e-6, 2 * 16e-6)),
    ]
    (found,) = overheads(Results({}, "", {}, cells))
    assert (found.wrapper, found.backend) == ("gradmesh", "gloo")
    assert found.seconds == pytest.approx(5e-6)
    assert found.ratio == pytest.approx(16 / 12)


def written(path: Path, results: Results) -> Path:
    path.write_text(json.dumps(results.as_json()))
    return path


def test_json_holds_the_run(tmp_path: Path) -> None:
    results = made_up(KEPT)
    assert loaded(written(tmp_path / "run.json", results)) == results
    cell = results.as_json()["cells"][0]
    assert cell["samples"] == (1e-6,) * 3
    assert math.isclose(cell["median"], 1e-6)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 0}'])
def test_wrong_file_kind_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="this file holds no results"):
        loaded(path)


def run(command: click.Command, *arguments: object, obj: Path | None = None) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], obj=obj)


def test_compare_passes_equal_runs_and_small_changes(tmp_path: Path) -> None:
    old, new = written(tmp_path / "a", made_up(KEPT)), written(tmp_path / "b", made_up(KEPT, shift=1.2))
    for other in (old, new):
        result = run(compare, old, other)
        assert result.exit_code == 0, result.output
    assert "1.20" in result.output


def test_compare_finds_a_regression(tmp_path: Path) -> None:
    old, new = written(tmp_path / "a", made_up(KEPT)), written(tmp_path / "b", made_up(KEPT, shift=1.3))
    result = run(compare, old, new)
    assert result.exit_code == 1
    assert "1.30 slower" in result.stdout
    cells = 2 * 2 * len(SIZES) * len(KEPT)
    assert f"{cells} of {cells * len(VERBS)} cells have become slower" in result.stderr
    assert "shift forward, 2 ranks, 4 B: 1.30 times" in result.stderr
    assert run(compare, old, new, "--threshold", 1.4).exit_code == 0
    assert run(compare, new, old).exit_code == 0


def test_compare_can_look_at_one_system(tmp_path: Path) -> None:
    old = written(tmp_path / "a", made_up(KEPT))
    new = written(tmp_path / "b", made_up(KEPT | {"MPI": 9.0}))
    assert run(compare, old, new).exit_code == 1
    assert run(compare, old, new, "--system", "gradmesh").exit_code == 0


def test_compare_reports_another_machine(tmp_path: Path) -> None:
    other = dataclasses.replace(made_up(KEPT), machine={"CPU": "another", "torch": "2"})
    result = run(compare, written(tmp_path / "a", made_up(KEPT)), written(tmp_path / "b", other))
    assert result.exit_code == 0
    assert "CPU: made up before, another now" in result.output
    assert "torch" not in result.output.splitlines()[0]


def test_compare_refuses_runs_without_a_common_cell(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no cell in common"):
        changes(made_up({"MPI": 1.0}), made_up({OURS: 1.0}))
    paths = [written(tmp_path / name, made_up({name: 1.0})) for name in ("MPI", OURS)]
    result = run(compare, *paths)
    assert result.exit_code == 1
    assert "no cell in common" in result.stderr
    assert "Traceback" not in result.stderr


def test_tables_show_every_cell_and_the_floor_where_it_is_known() -> None:
    results = made_up(KEPT | {FLOOR_NAME: 0.5})
    texts = tables.compared(results.cells)
    assert len(texts) == 2 * len(VERBS) * len(WAYS)
    assert all("microseconds" in text and "32 MiB" in text and "MPI" in text for text in texts)
    assert not any(FLOOR_NAME in text for text in texts)
    assert all(FLOOR_NAME in text for text in tables.compared(made_up(KEPT).cells))


def test_the_page_has_all_tables_and_links_the_picture() -> None:
    text = page.markdown(made_up(KEPT), "bench.svg")
    assert "](bench.svg)" in text
    assert text.count("| met |") == 20
    assert f"| {OURS} | 1.9 | 1.9 | 1.9 | 1.9 | 1.9 |" in text
    assert "| 2 | all_gather | forward | +0.4 us, x 1.27 | +0.5 us, x 1.33 |" in text
    assert "| 3.0 MiB, x 3.0 |" in text
    assert "* DTensor (gloo): a | reason" in text
    for line in text.splitlines():
        if line.startswith("| ---"):
            assert set(line) <= set("| -")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    results = made_up(KEPT)
    cells = [cell for cell in results.cells if cell.verb == "shift"]
    draw(dataclasses.replace(results, cells=cells), tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize("text", ["", "x", "0", "3", "-4", "4GiB", "KiB", "1.5MiB", "6B"])
def test_invalid_size_raises(text: str) -> None:
    with pytest.raises(ArgumentError, match="--size is invalid"):
        size_of(text)


@pytest.mark.parametrize("command", [speed, compare, modes], ids=lambda command: command.name)
def test_the_commands_explain_themselves(command: click.Command) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--system" in result.output


@pytest.mark.processes
def test_the_command_measures_shows_and_writes(tmp_path: Path) -> None:
    arguments = [
        "--ranks",
        2,
        "--verb",
        "shift",
        "--size",
        "4",
        "--size",
        "4KiB",
        "--rounds",
        2,
        "--system",
        "gradmesh",
    ]
    result = run(speed, *arguments, "--json", "-", obj=tmp_path / "docs" / "bench.md")
    assert result.exit_code == 0, result.output
    data = json.loads(without_gloo_lines(result.stdout))
    names = {each["contender"] for each in data["cells"]}
    assert {FLOOR_NAME, "gradmesh (gloo)", "gradmesh (threads)"} <= names
    assert {len(each["samples"]) for each in data["cells"]} == {2}
    assert {each["size"] for each in data["cells"]} == {4, 4096}
    assert data["machine"]["torch"] == torch.__version__
    assert [target["met"] for target in data["targets"]].count(None) == len(data["targets"])
    assert "shift forward, 2 ranks" in result.stderr
    assert re.search(r"^\[\d+/4\] ", result.stderr, re.MULTILINE)
    assert "--verb shift" in data["command"]
    assert (tmp_path / "docs" / "bench.svg").exists()
    assert "](bench.svg)" in (tmp_path / "docs" / "bench.md").read_text()


def test_progress_that_is_piped_is_lines_with_a_count(capfd: pytest.CaptureFixture[str]) -> None:
    with progress(3, period=0) as tell:
        tell("starting", 0)
        tell("first", 1)
        tell("second", 2)
    assert capfd.readouterr().err.splitlines() == ["[0/3] starting", "[1/3] first", "[3/3] second"]


def test_piped_progress_prints_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with progress(1000, period=60) as tell:
        for step in range(1000):
            tell(f"step {step}", 1)
    assert capfd.readouterr().err == "[1/1000] step 0\n"
