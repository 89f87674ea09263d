"""The benchmark: what it times is right, and what it makes of the times is too. No test depends on how fast it runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.compare import changes
from benchmarks.speed import mpi, page, run, tables
from benchmarks.speed.calls import Calls, Place, in_turn
from benchmarks.speed.command import size_of
from benchmarks.speed.contenders import CONTENDERS, FLOOR_NAME, Contender, absent
from benchmarks.speed.floor import FLOOR
from benchmarks.speed.overhead import overheads
from benchmarks.speed.pools import MpiPool, Pool, on_rank, set_up
from benchmarks.speed.results import Cell, Key, Memory, Results, loaded
from benchmarks.speed.targets import OURS, PEERS, RAW_SHM, against_peers, targets
from benchmarks.speed.tasks import ELEMENT, SIZES, VERBS, WAYS, Task, cotangent, operand
from benchmarks.speed.worker import Worker, memory_is_told
from gradmesh import cli
from gradmesh.errors import ArgumentError
from gradmesh.wire.memory import empty as recycled
from gradmesh.wire.memory import idle_bytes
from tests.conftest import Run

WRONG = {("functional collectives", "broadcast", "backward")}
"""Its gradient is that of the own result, not the sum of all."""


def verdicts(
    names: Sequence[str], check: Callable[[Task, Sequence[str]], list[Any]]
) -> dict[Any, str | None]:
    """What is wrong with each contender in each verb and way, at an even size and at the smallest."""
    found: dict[Any, str | None] = {}
    for size in (6 * ELEMENT, ELEMENT):
        for verb in VERBS:
            task = Task(verb, 2, size)
            able = [name for name in names if verb in CONTENDERS[name].makers]
            ranks = check(task, able)
            for name, way in ranks[0]:
                key = (CONTENDERS[name].system, CONTENDERS[name].backend, verb, way, size)
                found[key] = run.judged(task, way, [rank[name, way] for rank in ranks])
    return found


def on(backends: Sequence[str]) -> list[str]:
    return [name for name, each in CONTENDERS.items() if each.backend in backends and absent(each) is None]


@pytest.mark.processes
def test_every_system_is_right_on_processes_both_ways(processes: Callable[[int], Run]) -> None:
    names = on(["gloo", "shm"])
    assert processes(2)(set_up, names, False) == [{}, {}]
    found = verdicts(names, lambda task, able: processes(2)(on_rank, "check", task, able))
    wrong = {(system, verb, way) for (system, _, verb, way, _), problem in found.items() if problem}
    assert wrong == WRONG
    gradmesh = {key for key in found if key[:2] == ("gradmesh", "gloo")}
    assert len(gradmesh) == 2 * len(VERBS) * len(WAYS)


def test_gradmesh_and_the_raw_calls_are_right_on_threads_both_ways(threads: Callable[[int], Run]) -> None:
    names = on(["threads"])
    assert threads(2)(set_up, names, False) == [{}, {}]
    found = verdicts(names, lambda task, able: threads(2)(on_rank, "check", task, able))
    assert len(found) == 2 * 2 * len(VERBS) * len(WAYS)
    assert not any(found.values())


@pytest.mark.processes
@pytest.mark.skipif(mpi.absent() is not None, reason=str(mpi.absent()))
def test_mpi_is_right_both_ways() -> None:
    with MpiPool(2, [CONTENDERS["MPI"]]) as pool:
        assert "MPI" in pool.version
        found = verdicts(["MPI"], lambda task, able: pool.call("check", task, able))
    assert len(found) == 2 * len(VERBS) * len(WAYS)
    assert not any(found.values())


def test_a_wrong_result_is_found_and_so_is_an_error() -> None:
    task = Task("all_gather", 2, 8)
    right: list[Tensor | str] = list(task.dense("forward"))
    assert run.judged(task, "forward", right) is None
    assert run.judged(task, "forward", [right[0], -right[1]]) == "differs from the dense program on rank 1"  # type: ignore[operator]
    assert run.judged(task, "forward", [right[0][:1], right[1]]) is not None
    assert run.judged(task, "forward", [right[0], "ValueError: no"]) == "ValueError: no"


def test_the_gradient_of_broadcast_counts_at_the_root_alone() -> None:
    task = Task("broadcast", 2, 8)
    at_0, at_1 = task.dense("backward")
    assert run.judged(task, "backward", [0 * at_0, at_1]) is None
    assert run.judged(task, "backward", [at_0, 0 * at_1]) is not None


def test_operands_differ_between_ranks_and_from_element_to_element() -> None:
    task = Task("reduce_scatter", 2, 64)
    for given in (operand, cotangent):
        first, second = given(task, 0), given(task, 1)
        assert not torch.equal(first, second)
        assert first.unique().numel() == first.numel()
    assert (task.part, task.before, task.after) == (16, 32, 16)
    assert Task("all_to_all", 4, 4).part == 4


class Counting(TorchDispatchMode):
    """Adds up the bytes that copies and sums read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("copy_", "add", "sum"):
            out = args[0] if name == "copy_" else kwargs["out"]
            sources = args[1:2] if name == "copy_" else [x for x in args if isinstance(x, Tensor)]
            self.read += sum(x.nbytes for x in sources)
            self.written += out.nbytes
        return func(*args, **kwargs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_floor_moves_what_it_says(ranks: int) -> None:
    n = 64 * ELEMENT
    gather, fold, copy = (ranks * n, ranks * n), (ranks * n, n), (n, n)
    total = (2 * n, n // ranks + n)
    stated = {
        "all_gather": (gather, fold),
        "reduce_scatter": (fold, gather),
        "all_reduce": (total, total),
        "all_to_all": (copy, copy),
        "broadcast": (copy, total),
        "shift": (copy, copy),
    }
    assert stated.keys() == FLOOR.keys() == VERBS.keys()
    for verb, both in stated.items():
        for way, moved in zip(WAYS, both, strict=True):
            with Counting() as counted:
                calls = at_floor(verb, ranks, n, rank=1)
                counted.read = counted.written = 0
                getattr(calls, way)()
            assert (counted.read, counted.written) == moved, (verb, way)


def at_floor(verb: str, ranks: int, size: int, rank: int) -> Calls:
    task = Task(verb, ranks, size)
    return FLOOR[verb](Place(task, rank, None, operand(task, rank), cotangent(task, rank)))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_floor_is_the_verb_where_all_ranks_hold_the_same(verb: str, ranks: int) -> None:
    calls, task = at_floor(verb, ranks, 64 * ELEMENT, rank=1), Task(verb, ranks, 64 * ELEMENT)
    x = operand(task, 1)
    if verb == "all_gather":
        assert torch.equal(calls.forward(), x.repeat(ranks))
    elif verb == "reduce_scatter":
        assert torch.equal(calls.forward(), x.view(ranks, -1).sum(0))
    elif verb == "all_reduce":
        assert torch.equal(calls.forward(), x.view(ranks, -1).sum(0).repeat(ranks))
    else:
        assert torch.equal(calls.forward(), x)


def test_the_floor_has_a_smallest_size_too() -> None:
    for verb in VERBS:
        for rank in range(2):
            calls = at_floor(verb, 2, ELEMENT, rank)
            calls.both()


class Recorded(Pool):
    """Two ranks of which the second takes twice as long, at a fixed cost of each contender's call."""

    def __init__(self, cost: Mapping[str, float]) -> None:
        self.names, self.left_out, self.weighs = list(cost), {}, False
        self.cost = cost
        self.asked: list[tuple[str, dict[str, int]]] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        way, numbers = args
        self.asked.append((way, dict(numbers)))
        return [{n: rank * self.cost[n] * k for n, k in numbers.items()} for rank in (1, 2)]

    def close(self) -> None:
        pass


def test_a_sample_is_that_of_the_slowest_rank() -> None:
    assert Recorded({"a": 1.0, "b": 3.0}).sample("forward", {"a": 5, "b": 1}) == {"a": 10.0, "b": 6.0}


def test_calibration_fills_a_sample_and_tells_all_ranks_the_same() -> None:
    pool = Recorded({"fast": run.SAMPLE / 800, "slow": 1.0, "free": 1e-12})
    numbers = run.calibrated(lambda n: pool.sample("forward", n), pool.names)
    assert numbers == {"fast": 400, "slow": 1, "free": 1000}
    assert pool.asked == [
        ("forward", {"fast": 1, "slow": 1, "free": 1}),
        ("forward", {"fast": 400, "free": 1000}),
    ]


def test_a_median_is_that_of_the_rounds() -> None:
    cell = Cell(2, "shift", "forward", 4, "any", 10, (30e-6, 10e-6, 50e-6))
    assert cell.median == pytest.approx(3e-6)
    assert cell.measurement.iqr == pytest.approx(2e-6)
    assert cell.times == pytest.approx([3e-6, 1e-6, 5e-6])


def _off_by_one(at: Place) -> Calls:
    return in_turn(lambda: at.x + 1, lambda: at.cotangent)


def _raises(_: Place) -> Calls:
    raise ValueError("not today\nand more")


def _heavy(at: Place) -> Calls:
    return in_turn(lambda: torch.ones(16 * 2**20), lambda: at.cotangent.clone())


def lone_worker(**makers: Callable[[Place], Calls]) -> Worker:
    """A worker without any other."""
    contenders = [Contender(name, "", {"shift": maker}) for name, maker in makers.items()]
    return Worker(0, contenders, {}, lambda: None)


def test_a_worker_tells_results_and_errors_and_times_what_it_is_told() -> None:
    worker, task = lone_worker(wrong=_off_by_one, broken=_raises), Task("shift", 1, 8)
    found = worker.check(task, ["wrong", "broken"])
    assert found["broken", "forward"] == found["broken", "backward"] == "ValueError: not today"
    assert run.judged(task, "forward", [found["wrong", "forward"]]) is not None
    assert run.judged(task, "backward", [found["wrong", "backward"]]) is None
    worker.prepare(task, ["wrong"])
    taken = worker.sample("forward", {"wrong": 3})
    assert list(taken) == ["wrong"]
    assert taken["wrong"] > 0


@pytest.mark.skipif(not memory_is_told(), reason="the system does not tell")
def test_memory_is_the_growth_over_a_forward_and_a_backward() -> None:
    worker = lone_worker(heavy=_heavy, light=_off_by_one)
    worker.prepare(Task("shift", 1, 8), ["heavy", "light"])
    assert 64 * 2**20 <= worker.memory("heavy") + 2**20 <= 72 * 2**20
    assert worker.memory("light") < 8 * 2**20


@pytest.mark.skipif(not memory_is_told(), reason="the system does not tell")
def test_memory_that_an_earlier_call_left_idle_counts_all_the_same() -> None:
    def recycles(at: Place) -> Calls:
        return in_turn(lambda: recycled((16 * 2**20,), torch.float32, at.x.device).fill_(1), lambda: at.x)

    worker = lone_worker(recycles=recycles)
    worker.prepare(Task("shift", 1, 8), ["recycles"])
    worker.sample("forward", {"recycles": 1})
    assert idle_bytes() >= 64 * 2**20
    assert worker.memory("recycles") + 2**20 >= 64 * 2**20


def test_who_is_wrong_is_left_out_and_told() -> None:
    class Checked(Recorded):
        def call(self, method: str, *args: Any) -> list[Any]:
            task, names = args
            assert method == "check"
            right = {(name, way): task.dense(way) for name in names for way in WAYS}
            ranks: list[dict[Any, Any]] = [{key: of[rank] for key, of in right.items()} for rank in (0, 1)]
            ranks[1]["gradmesh (gloo)", "backward"] = ranks[1]["gradmesh (gloo)", "backward"] + 1
            return ranks

    left_out: dict[str, str] = {}
    pool = Checked(dict.fromkeys(("gradmesh (gloo)", "torch.distributed (gloo)", "DTensor (gloo)"), 1.0))
    able = run.able_to(pool, Task("shift", 2, 8), left_out)
    assert able == {
        "forward": ["gradmesh (gloo)", "torch.distributed (gloo)"],
        "backward": ["torch.distributed (gloo)"],
    }
    assert left_out == {"gradmesh (gloo), shift backward": "differs from the dense program on rank 1"}


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


def test_what_was_not_measured_is_no_promise_kept() -> None:
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
def test_another_file_is_told_to_be_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="this file holds no results"):
        loaded(path)


def gradmesh(*arguments: object) -> Result:
    return CliRunner().invoke(cli.commands(), [str(argument) for argument in arguments])


def test_compare_passes_equal_runs_and_small_changes(tmp_path: Path) -> None:
    old, new = written(tmp_path / "a", made_up(KEPT)), written(tmp_path / "b", made_up(KEPT, shift=1.2))
    for other in (old, new):
        told = gradmesh("compare", old, other)
        assert told.exit_code == 0, told.output
    assert "1.20" in told.output


def test_compare_finds_a_regression(tmp_path: Path) -> None:
    old, new = written(tmp_path / "a", made_up(KEPT)), written(tmp_path / "b", made_up(KEPT, shift=1.3))
    told = gradmesh("compare", old, new)
    assert told.exit_code == 1
    assert "1.30 slower" in told.stdout
    cells = 2 * 2 * len(SIZES) * len(KEPT)
    assert f"{cells} of {cells * len(VERBS)} cells have become slower" in told.stderr
    assert "shift forward, 2 ranks, 4 B: 1.30 times" in told.stderr
    assert gradmesh("compare", old, new, "--threshold", 1.4).exit_code == 0
    assert gradmesh("compare", new, old).exit_code == 0


def test_compare_can_look_at_one_system(tmp_path: Path) -> None:
    old = written(tmp_path / "a", made_up(KEPT))
    new = written(tmp_path / "b", made_up(KEPT | {"MPI": 9.0}))
    assert gradmesh("compare", old, new).exit_code == 1
    assert gradmesh("compare", old, new, "--system", "gradmesh").exit_code == 0


def test_compare_tells_another_machine(tmp_path: Path) -> None:
    other = dataclasses.replace(made_up(KEPT), machine={"CPU": "another", "torch": "2"})
    told = gradmesh("compare", written(tmp_path / "a", made_up(KEPT)), written(tmp_path / "b", other))
    assert told.exit_code == 0
    assert "CPU: made up before, another now" in told.output
    assert "torch" not in told.output.splitlines()[0]


def test_compare_refuses_runs_without_a_common_cell(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no cell in common"):
        changes(made_up({"MPI": 1.0}), made_up({OURS: 1.0}))
    paths = [written(tmp_path / name, made_up({name: 1.0})) for name in ("MPI", OURS)]
    told = gradmesh("compare", *paths)
    assert told.exit_code == 1
    assert "no cell in common" in told.stderr
    assert "Traceback" not in told.stderr


def test_the_tables_show_every_cell_and_the_floor_where_it_can_be_told() -> None:
    results = made_up(KEPT | {FLOOR_NAME: 0.5})
    texts = tables.compared(results.cells)
    assert len(texts) == 2 * len(VERBS) * len(WAYS)
    assert all("microseconds" in text and "32 MiB" in text and "MPI" in text for text in texts)
    assert not any(FLOOR_NAME in text for text in texts)
    assert all(FLOOR_NAME in text for text in tables.compared(made_up(KEPT).cells))


def test_the_page_has_all_tables_and_links_the_picture() -> None:
    text = page.markdown(made_up(KEPT), "bench.png")
    assert "](bench.png)" in text
    assert text.count("| met |") == 20
    assert f"| {OURS} | 1.9 | 1.9 | 1.9 | 1.9 | 1.9 |" in text
    assert "| 2 | all_gather | forward | +0.4 us, x 1.27 | +0.5 us, x 1.33 |" in text
    assert "| 3.0 MiB, x 3.0 |" in text
    assert "* DTensor (gloo): a | reason" in text
    for line in text.splitlines():
        if line.startswith("| ---"):
            assert set(line) <= set("| -")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from benchmarks.speed.picture import draw

    results = made_up(KEPT)
    cells = [cell for cell in results.cells if cell.verb == "shift"]
    draw(dataclasses.replace(results, cells=cells), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "x", "0", "3", "-4", "4GiB", "KiB", "1.5MiB", "6B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="no size"):
        size_of(text)


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_the_commands_explain_themselves(command: str) -> None:
    told = gradmesh(command, "--help")
    assert told.exit_code == 0
    assert "--system" in told.output


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
    told = gradmesh("bench", *arguments, "--json", "-", "--write", tmp_path / "docs" / "bench.md")
    assert told.exit_code == 0, told.output
    data = json.loads(told.stdout)
    names = {each["contender"] for each in data["cells"]}
    assert {FLOOR_NAME, "gradmesh (gloo)", "gradmesh (threads)"} <= names
    assert {len(each["samples"]) for each in data["cells"]} == {2}
    assert {each["size"] for each in data["cells"]} == {4, 4096}
    assert data["machine"]["torch"] == torch.__version__
    assert [target["met"] for target in data["targets"]].count(None) == len(data["targets"])
    assert "shift forward, 2 ranks" in told.stderr
    assert "--verb shift" in data["command"]
    assert (tmp_path / "docs" / "bench.png").exists()
    assert "](bench.png)" in (tmp_path / "docs" / "bench.md").read_text()
