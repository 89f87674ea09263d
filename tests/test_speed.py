"""`benchmarks.speed`: the timed programs are right, and timed as documented. No test depends on how fast it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peak import peak_is_told
from benchmarks.speed import mpi, run
from benchmarks.speed.calls import Calls, Place, in_turn
from benchmarks.speed.contenders import CONTENDERS, Contender, absent
from benchmarks.speed.floor import FLOOR
from benchmarks.speed.pools import MpiPool, Pool, on_rank, set_up
from benchmarks.speed.results import Cell
from benchmarks.speed.tasks import ELEMENT, VERBS, WAYS, Task, cotangent, operand
from benchmarks.speed.worker import Worker
from gradmesh.transport.packing import empty as recycled
from gradmesh.transport.packing import idle_bytes
from tests.conftest import Run

pytestmark = pytest.mark.fresh_ranks  # it measures memory

WRONG = {("functional collectives", "broadcast", "backward")}
"""Its gradient is that of the local result, not the sum over the ranks."""
WRONG_ON_2_11 = {("spmd_types", "all_to_all", way) for way in ("forward", "backward")}
"""There it gathers on the CPU, "falling back with allgather + chunk"."""


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
    if torch.__version__ < "2.11":  # more gradients of torch's own are wrong there
        wrong = WRONG | {each for each in wrong if each[0] == "gradmesh"}
    assert wrong == WRONG | (WRONG_ON_2_11 if torch.__version__.startswith("2.11.") else set())
    gradmesh = {key for key in found if key[:2] == ("gradmesh", "gloo")}
    assert len(gradmesh) == 2 * len(VERBS) * len(WAYS)


def test_gradmesh_and_the_raw_calls_are_right_on_threads_both_ways(threads: Callable[[int], Run]) -> None:
    names = on(["threads"])
    assert threads(2)(set_up, names, False) == [{}, {}]
    found = verdicts(names, lambda task, able: threads(2)(on_rank, "check", task, able))
    assert len(found) == 2 * 2 * len(VERBS) * len(WAYS)
    assert not any(found.values())


@pytest.mark.processes
def test_mpi_is_right_both_ways_also_under_torch() -> None:
    if reason := mpi.absent():
        pytest.skip(reason)
    names = on(["MPI", "mpi4py"])
    with MpiPool(2, [CONTENDERS[name] for name in names]) as pool:
        assert "MPI" in pool.version
        found = verdicts(names, lambda task, able: pool.call("check", task, able))
    assert len(found) == 3 * 2 * len(VERBS) * len(WAYS)
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
def test_floor_moves_the_stated_bytes(ranks: int) -> None:
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


class CallRecord(Pool):
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
    assert CallRecord({"a": 1.0, "b": 3.0}).sample("forward", {"a": 5, "b": 1}) == {"a": 10.0, "b": 6.0}


def test_calibration_fills_a_sample_and_broadcasts_it() -> None:
    pool = CallRecord({"fast": run.SAMPLE / 800, "slow": 1.0, "free": 1e-12})
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


def test_worker_reports_results_errors_and_times() -> None:
    worker, task = lone_worker(wrong=_off_by_one, broken=_raises), Task("shift", 1, 8)
    found = worker.check(task, ["wrong", "broken"])
    assert found["broken", "forward"] == found["broken", "backward"] == "ValueError: not today"
    assert run.judged(task, "forward", [found["wrong", "forward"]]) is not None
    assert run.judged(task, "backward", [found["wrong", "backward"]]) is None
    worker.prepare(task, ["wrong"])
    taken = worker.sample("forward", {"wrong": 3})
    assert list(taken) == ["wrong"]
    assert taken["wrong"] > 0


@pytest.mark.skipif(not peak_is_told(), reason="the system does not tell")
def test_memory_is_the_growth_over_a_forward_and_a_backward() -> None:
    worker = lone_worker(heavy=_heavy, light=_off_by_one)
    worker.prepare(Task("shift", 1, 8), ["heavy", "light"])
    assert 64 * 2**20 <= worker.memory("heavy") + 2**20 <= 72 * 2**20
    assert worker.memory("light") < 8 * 2**20


@pytest.mark.skipif(not peak_is_told(), reason="the system does not tell")
def test_memory_that_an_earlier_call_left_idle_counts_all_the_same() -> None:
    def recycles(at: Place) -> Calls:
        return in_turn(lambda: recycled((16 * 2**20,), torch.float32, at.x.device).fill_(1), lambda: at.x)

    worker = lone_worker(recycles=recycles)
    worker.prepare(Task("shift", 1, 8), ["recycles"])
    worker.sample("forward", {"recycles": 1})
    assert idle_bytes() >= 64 * 2**20
    assert worker.memory("recycles") + 2**20 >= 64 * 2**20


def test_wrong_rank_is_excluded_and_reported() -> None:
    class Checked(CallRecord):
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
