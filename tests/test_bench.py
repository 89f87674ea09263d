"""`gradmesh bench`: it times the documented calls, and prints and writes all results. No test depends on times."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.utils.benchmark import Measurement
from torch.utils.benchmark.utils.common import TaskSpec

from gradmesh import bench, cli
from gradmesh.bench import VERBS, WAYS, Cell, Plan, measured
from tests.conftest import Run

TINY = Plan({"12 B": 12}, rounds=3, seconds=1e-6)


def results(verb: str) -> tuple[list[Tensor], list[Tensor]]:
    """On a rank: what the verb's calls return, forward and backward, and what the raw ones do."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    x = torch.arange(4.0 * size).add_(17 * rank)
    calls: list[Any] = list(bench._calls(verb, x))
    forward = calls[0]()
    _, (gradient,) = calls[1]()
    if len(calls) == 2:
        return [forward.detach(), gradient], []
    others = calls[2]().clone()  # as the next call may work in place
    _, back = calls[3]()
    return [forward.detach(), gradient], [others, back]


def assert_same(name: str, ranks: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for rank, (ours, raw) in enumerate(ranks):
        assert bool(raw) == (VERBS[name][1] is not None)
        for way, mine, other in zip(WAYS, ours, raw, strict=False):
            if name == "broadcast" and way == WAYS[1] and rank:
                continue  # dist.reduce leaves what it likes on the ranks that are not the root
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=f"{name} {way}")


@pytest.mark.processes
@pytest.mark.parametrize("name", VERBS)
def test_raw_call_equals_the_verb_on_processes(name: str, processes: Callable[[int], Run]) -> None:
    assert_same(name, processes(2)(results, name))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", VERBS)
def test_raw_call_equals_the_verb(name: str, ranks: int, threads: Callable[[int], Run]) -> None:
    assert_same(name, threads(ranks)(results, name))


def test_every_verb_is_timed_both_ways_at_every_size() -> None:
    said: list[str] = []
    cells = list(measured(2, "threads", TINY, said.append))
    assert [(cell.verb, cell.size, cell.way) for cell in cells] == [
        (verb, "12 B", way) for verb in VERBS for way in WAYS
    ]
    for cell in cells:
        assert (cell.raw is not None) == (VERBS[cell.verb][1] is not None)
        assert [len(times.times) for times in (cell.ours, cell.raw) if times] == [3] * (1 + bool(cell.raw))
        assert min(cell.ours.times) > 0
    assert said[0] == "starting 2 ranks on threads"
    assert said[1:] == [f"[{n}/{len(VERBS)}] {verb}, 12 B" for n, verb in enumerate(VERBS, 1)]


def test_the_garbage_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    list(measured(2, "threads", TINY, lambda _: None))
    assert gc.isenabled()


def test_a_sample_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(*_: object) -> list[list[float]]:
        slow = torch.distributed.get_rank() == 1
        return [[3.0, 1.0] if slow else [2.0, 2.0], [1.0, 1.0]]

    monkeypatch.setattr(bench, "samples", made_up)
    cell = next(iter(measured(2, "threads", TINY, lambda _: None)))
    assert cell.ours.times == [3.0, 2.0]


def times(*seconds: float) -> Measurement:
    return Measurement(1, list(seconds), TaskSpec(stmt="", setup=""))


def test_added_time_is_the_median_of_the_differences() -> None:
    cell = Cell("shift", "12 B", "forward", times(15e-6, 97e-6, 16e-6), times(10e-6, 90e-6, 12e-6))
    assert cell.added == pytest.approx((5e-6, 16 / 12))
    assert Cell("scan", "12 B", "forward", times(1.0), None).added is None


def test_the_command_shows_every_cell_and_writes_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradmesh.bench.QUICK", TINY)
    path = tmp_path / "bench.json"
    result = CliRunner().invoke(
        cli.commands(), ["bench", "--backend", "threads", "--quick", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert [sum(verb in line for line in result.stdout.splitlines()) for verb in VERBS] == [2] * len(VERBS)
    assert f"[{len(VERBS)}/{len(VERBS)}] scan, 12 B" in result.stderr.splitlines()
    data = json.loads(path.read_text())
    assert (data["backend"], data["ranks"], data["unit"]) == ("threads", 2, "s")
    assert len(data["cells"]) == 2 * len(VERBS)
    first = data["cells"][0]
    assert (first["verb"], first["way"], len(first["ours"]), len(first["raw"])) == (
        "all_gather",
        WAYS[0],
        3,
        3,
    )


@pytest.mark.parametrize("columns", [60, 130])
def test_output_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmesh.bench.QUICK", TINY)
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(cli.commands(), ["bench", "--backend", "threads", "--quick"])
    assert columns - 20 < max(map(len, result.stdout.splitlines())) <= columns


def test_unwritable_times_path_raises_before_the_work(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.commands(), ["bench", "--json", str(tmp_path / "none" / "bench.json")])
    assert result.exit_code == 1
    assert "starting" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_unknown_backend_raises_before_the_work() -> None:
    result = CliRunner().invoke(cli.commands(), ["bench", "--backend", "nccl"])
    assert result.exit_code == 2
    assert "nccl is not available" in result.stderr
