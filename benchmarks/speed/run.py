"""The round robin: every contender is timed once in a round, so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.speed.contenders import CONTENDERS, FLOOR_NAME, absent, chosen
from benchmarks.speed.pools import MpiPool, Pool, open_pools
from benchmarks.speed.results import Cell, Memory, Results
from benchmarks.speed.tasks import ELEMENT, SIZES, VERBS, WAYS, Task, said

__all__ = ["FULL", "QUICK", "Plan", "able_to", "calibrated", "judged", "measure"]

SAMPLE = 25e-3
"""Seconds that a sample should take at least: with more ranks than cores, shorter ones measure who starts first."""
_ALONE = 16 * 2**20
"""Bytes from which one call takes longer than that in every system."""
_MOST = 1000
"""Calls in a sample at most."""
_LEAST_ROUNDS = 3

Tell = Callable[[str, int], object]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        ranks: numbers of ranks.
        verbs: names.
        sizes: bytes of a rank's part.
        systems: names; all if empty.
        rounds: how often each contender is timed at most.
        seconds: how long a cell may take before no further round begins, once there are three.
    """

    ranks: tuple[int, ...] = (2, 4)
    verbs: tuple[str, ...] = tuple(VERBS)
    sizes: tuple[int, ...] = SIZES
    systems: tuple[str, ...] = ()
    rounds: int = 15
    seconds: float = 2.5

    @property
    def steps(self) -> int:
        """How many cells there are to go through."""
        return len(self.ranks) * len(self.verbs) * len(self.sizes) * len(WAYS)


FULL = Plan()
QUICK = Plan(ranks=(2,), sizes=(4, 512 * 2**10, 4 * 2**20), rounds=7, seconds=0.5)


def measure(plan: Plan, command: str, tell: Tell = lambda *_: None) -> Results:
    """Measure everything.

    Args:
        plan: what.
        command: how it was asked for.
        tell: called with what is going on, and how many cells further it is than it was.
    """
    results = Results(machine(), command, {name: getattr(plan, name) for name in Plan.__annotations__})
    contenders = [(contender, absent(contender)) for contender in chosen(plan.systems)]
    results.left_out.update({contender.name: reason for contender, reason in contenders if reason})
    there = [contender for contender, reason in contenders if not reason]
    for ranks in plan.ranks:
        tell(f"starting {ranks} ranks", 0)
        with open_pools(ranks, there) as pools:
            for pool in pools:
                results.left_out.update(pool.left_out)
                if isinstance(pool, MpiPool):
                    results.machine["MPI"] = pool.version
            for verb in plan.verbs:
                _verb(plan, pools, ranks, verb, results, tell)
    return results


def _verb(plan: Plan, pools: Sequence[Pool], ranks: int, verb: str, results: Results, tell: Tell) -> None:
    able = [able_to(pool, Task(verb, ranks, ELEMENT * ranks), results.left_out) for pool in pools]
    for size in plan.sizes:
        task = Task(verb, ranks, size)
        for pool, ways in zip(pools, able, strict=True):
            pool.call("prepare", task, list(dict.fromkeys(name for way in WAYS for name in ways[way])))
        for way in WAYS:
            what = f"{ranks} ranks, {said(size)}: {verb} {way}"
            tell(what, 0)
            results.cells.extend(_cells(plan, task, way, _those(pools, able, way)))
            tell(what, 1)
        if size == max(plan.sizes):
            results.memory.extend(_memory(task, _those(pools, able, "backward")))


def _those(
    pools: Sequence[Pool], able: Sequence[Mapping[str, list[str]]], way: str
) -> list[tuple[Pool, list[str]]]:
    return [(pool, ways[way]) for pool, ways in zip(pools, able, strict=True)]


def able_to(pool: Pool, task: Task, left_out: dict[str, str]) -> dict[str, list[str]]:
    """Who does the verb rightly, each way; the others are left out, as the time of a wrong result says nothing."""
    names = [name for name in pool.names if task.verb in CONTENDERS[name].makers]
    found = pool.check(task, names)
    able: dict[str, list[str]] = {way: [] for way in WAYS}
    for (name, way), ranks in found.items():
        problem = None if name == FLOOR_NAME else judged(task, way, ranks)
        if problem is None:
            able[way].append(name)
        else:
            left_out[f"{name}, {task.verb} {way}"] = problem
    return able


def judged(task: Task, way: str, found: Sequence[Tensor | str]) -> str | None:
    """What is wrong with what the ranks ended up with; None if nothing."""
    for rank, dense in enumerate(task.dense(way)):
        got = found[rank]
        if isinstance(got, str):
            return got
        if rank in task.judged(way) and not torch.equal(got.view(-1), dense):
            return f"differs from the dense program on rank {rank}"
    return None


def _cells(plan: Plan, task: Task, way: str, able: Sequence[tuple[Pool, list[str]]]) -> list[Cell]:
    numbers = [
        dict.fromkeys(names, 1) if task.size >= _ALONE else calibrated(partial(pool.sample, way), names)
        for pool, names in able
    ]
    samples: dict[str, list[float]] = {name: [] for _, names in able for name in names}
    begin, done = time.monotonic(), 0
    while done < min(_LEAST_ROUNDS, plan.rounds) or (
        done < plan.rounds and time.monotonic() - begin < plan.seconds
    ):
        for (pool, names), number in zip(able, numbers, strict=True):
            turn = done % max(1, len(names))  # who comes after whom changes with the round
            order = {name: number[name] for name in (*names[turn:], *names[:turn])}
            for name, seconds in pool.sample(way, order).items():
                samples[name].append(seconds)
        done += 1
    number_of = {name: n for number in numbers for name, n in number.items()}
    return [
        Cell(task.ranks, task.verb, way, task.size, name, number_of[name], tuple(taken))
        for name, taken in samples.items()
    ]


def calibrated(
    sample: Callable[[Mapping[str, int]], Mapping[str, float]], names: Sequence[str]
) -> dict[str, int]:
    """How many calls of each make a sample, found out once and the same for all ranks and rounds.

    Args:
        sample: the seconds of so many calls of each.
        names: who.
    """
    numbers, short = dict.fromkeys(names, 1), list(names)
    for _ in range(2):  # again where a call is short, from more calls than one
        for name, seconds in sample({name: numbers[name] for name in short}).items():
            numbers[name] = min(_MOST, max(1, round(SAMPLE * numbers[name] / seconds)))
        short = [name for name in short if numbers[name] > 1]
    return numbers


def _memory(task: Task, able: Sequence[tuple[Pool, list[str]]]) -> list[Memory]:
    return [
        Memory(task.ranks, task.verb, task.size, name, max(pool.call("memory", name)), task.after * ELEMENT)
        for pool, names in able
        if pool.weighs
        for name in names
        if name != FLOOR_NAME
    ]
