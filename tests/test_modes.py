"""The table of verbs and modes: its verdicts, on a system that is right and on systems that are not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import gradmesh as gm
from benchmarks.modes import report
from benchmarks.modes.cell import Verdict
from benchmarks.modes.command import modes
from benchmarks.modes.grid import Pools, measure
from benchmarks.modes.mode import MODES, expected, no_meaning
from benchmarks.systems.cases import CASES
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import DTENSOR, FUNCTIONAL, NN, PEERS
from benchmarks.systems.system import Op, Setting, System, find
from gradmesh.ops.registry import REGISTRY


def system(where: str, **verbs: Callable[[Setting], Op]) -> System:
    """A system whose verbs are all in all_gather's place."""
    return System(name=where, where=f"tests.test_modes:{where}", own=("tests.test_modes",), verbs=verbs)


def _wrong(at: Setting) -> Op:
    return lambda x: gm.all_gather(x, at.group, dst=gm.I, sizes=at.sizes)


def _refuses(at: Setting) -> Op:
    def call(x: Tensor) -> Tensor:
        raise ValueError("this needs a tensor of another kind\nand more")

    return call


def _stumbles(at: Setting) -> Op:
    return lambda x: [x][2]


def _fails_on_one_rank(at: Setting) -> Op:
    def call(x: Tensor) -> Tensor:
        if at.rank == 0:
            raise ValueError("only here")
        return gm.all_gather(x, at.group)

    return call


def _hangs(at: Setting) -> Op:
    return lambda x: gm.all_gather(x, at.group) if at.rank else torch.cat([x, x])


def _dies(at: Setting) -> Op:
    def call(x: Tensor) -> Tensor:
        if at.rank == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        return gm.all_gather(x, at.group)

    return call


NAME = "all_gather(dst=R)"
WRONG = system("WRONG", **{NAME: _wrong})
REFUSES = system("REFUSES", **{NAME: _refuses})
STUMBLES = system("STUMBLES", **{NAME: _stumbles})
PARTLY = system("PARTLY", **{NAME: _fails_on_one_rank})
HANGS = system("HANGS", **{NAME: _hangs})
DIES = system("DIES", **{NAME: _dies})


@pytest.fixture(scope="module")
def on_threads() -> Iterator[Pools]:
    with Pools("threads", timeout=60) as pools:
        yield pools


@pytest.fixture(scope="module")
def on_processes() -> Iterator[Pools]:
    with Pools("gloo", timeout=60) as pools:  # the first case of a peer imports much of torch
        yield pools


@pytest.mark.parametrize("mode", [name for name in MODES if not name.startswith("compile")])
def test_gradmesh_is_right_or_refuses_in_every_cell_but_compiled_ones(mode: str, on_threads: Pools) -> None:
    grid = measure(GRADMESH, on_threads, modes=[mode])
    assert report.faults(grid) == []
    words = [verdict.word for verdict in grid.values()]
    assert words.count("refused") <= 4
    assert words.count("n/a") == sum(bool(no_meaning(case, MODES[mode])) for case in CASES.values())


def test_every_public_op_has_a_case() -> None:
    rows = {row.call for row in REGISTRY if row.public}
    assert rows <= set(CASES)
    assert set(CASES) == set(GRADMESH.verbs)


def test_wrong_gradient_is_reported_with_its_size(on_threads: Pools) -> None:
    verdict = on_threads.cell(WRONG, NAME, MODES["reverse"])
    assert verdict.word == "wrong"
    assert "gradient: off by " in verdict.note


def test_a_wrong_gradient_is_found_in_the_modes_that_have_one(on_threads: Pools) -> None:
    grid = measure(
        WRONG, on_threads, cases=[NAME], modes=["second order", "forward", "vmap", "complex", "uneven"]
    )
    words = {mode: verdict.word for (_, mode), verdict in grid.items()}
    assert words.pop("forward") == "ok"
    assert set(words.values()) == {"wrong"}


@pytest.mark.parametrize(
    ("bad", "verdict"),
    [
        (REFUSES, Verdict("refused", "ValueError: this needs a tensor of another kind")),
        (STUMBLES, Verdict("error", "IndexError: list index out of range")),
        (PARTLY, Verdict("error", "on one rank: ValueError: only here; the other waits")),
        (HANGS, Verdict("hang", "one rank waits, the other has returned")),
    ],
    ids=lambda value: value.name if isinstance(value, System) else "",
)
def test_errors_and_hangs_are_distinguished(bad: System, verdict: Verdict, on_threads: Pools) -> None:
    assert on_threads.cell(bad, NAME, MODES["reverse"]) == verdict


def test_a_verb_that_a_system_lacks_is_not_run(on_threads: Pools) -> None:
    grid = measure(WRONG, on_threads, cases=["scan"], modes=["reverse"])
    assert grid == {("scan", "reverse"): Verdict("n/a", "no such verb")}


@pytest.mark.slow
@pytest.mark.processes
def test_processes_hang_and_die_and_the_next_cell_is_run_all_the_same() -> None:
    with Pools("gloo", timeout=5) as pools:
        result = {bad.name: pools.cell(bad, NAME, MODES["reverse"]) for bad in (HANGS, DIES, GRADMESH)}
    assert result == {
        "HANGS": Verdict("hang", "one rank waits, the other has returned"),
        "DIES": Verdict("abort", "a process ended with SIGABRT"),
        "gradmesh": Verdict("ok"),
    }


@pytest.mark.slow
@pytest.mark.processes
def test_compiled_cells_are_run_on_processes(on_threads: Pools) -> None:
    assert on_threads.cell(GRADMESH, NAME, MODES["compile"]) == Verdict("ok")


@pytest.mark.processes
@pytest.mark.torch_at_least("2.11", "gradients of functional collectives and DTensors are wrong")
@pytest.mark.parametrize("peer", [NN, FUNCTIONAL, DTENSOR], ids=lambda peer: peer.name)
def test_peer_is_right_where_it_is_listed_as_right(peer: System, on_processes: Pools) -> None:
    for case in (NAME, "reduce_scatter", "all_reduce(dst=R)"):
        assert on_processes.cell(peer, case, MODES["reverse"]) == Verdict("ok")


def test_systems_are_found_where_they_say() -> None:
    for each in (GRADMESH, *PEERS, WRONG):
        assert find(each.where) is each
        assert set(each.verbs) <= set(CASES)


def test_the_dense_program_is_differentiated_like_any_other() -> None:
    found = expected(CASES["all_reduce(dst=I)"], MODES["second order"])
    assert [len(found[name]) for name in ("value", "gradient", "second derivative")] == [2, 2, 2]
    assert torch.equal(found["value"][0], found["value"][1])


def grid_of(**words: Verdict) -> dict[str, tuple[System, dict[tuple[str, str], Verdict]]]:
    return {"WRONG": (WRONG, {(NAME, mode): verdict for mode, verdict in words.items()})}


def test_notes_that_read_the_same_have_one_number() -> None:
    measured = grid_of(reverse=Verdict("hang", "a *b*"), vmap=Verdict("hang", "a *b*"), forward=Verdict("ok"))
    page = report.markdown(measured)
    assert f"| `{NAME}` | hang (1) | hang (1) | ok |" in page
    assert "* (1) hang: a \\*b\\*\n" in page
    assert "(2)" not in page


def test_faults_are_the_cells_that_are_neither_right_nor_refused() -> None:
    words = ("ok", "refused", "n/a", "wrong", "error", "hang", "abort")
    grid = {(NAME, word): Verdict(word, "why") for word in words}
    assert [line.split(": ")[1] for line in report.faults(grid)] == ["wrong", "error", "hang", "abort"]


def test_the_command_prints_and_writes_the_table(tmp_path: Path) -> None:
    page, data = tmp_path / "modes.md", tmp_path / "modes.json"
    arguments = ["--quick", "--backend", "threads", "--mode", "reverse"]
    result = CliRunner().invoke(modes, [*arguments, "--json", str(data)], obj=page)
    assert result.exit_code == 0, result.output
    assert "halo_exchange" in result.output
    assert "| `halo_exchange` | ok |" in page.read_text()
    loaded: dict[str, Any] = json.loads(data.read_text())
    assert loaded["systems"]["gradmesh"]["scan"]["reverse"] == {"verdict": "ok", "note": ""}
