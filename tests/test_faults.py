"""One rank has a fault while the others are in the middle of something: they end soon, and say which rank it was."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from tests.store_event import StoreEvent
from tools.faults import SECONDS, Trial, page, table, trial

ON_THREADS = [
    ("raises", "call"),
    ("raises", "backward pass"),
    ("returns early", "message"),
    ("returns early", "backward pass"),
    ("slow", "asynchronous call"),
    ("stuck", "call"),
]
ON_PROCESSES = [
    ("shm", "killed", "backward pass"),
    pytest.param("shm", "stuck", "message", marks=pytest.mark.slow),
    pytest.param("shm", "no memory", "call", marks=pytest.mark.slow),
    ("shm", "launcher killed", "call"),
    ("gloo", "returns early", "asynchronous call"),
]


@pytest.mark.timed
@pytest.mark.parametrize(("fault", "way"), ON_THREADS)
def test_threads_end_with_the_name_of_the_rank(fault: str, way: str) -> None:
    assert trial("threads", fault, way).short() == []


@pytest.mark.timed
@pytest.mark.processes
@pytest.mark.parametrize(("backend", "fault", "way"), ON_PROCESSES)
def test_processes_end_with_the_name_of_the_rank_and_leave_nothing(
    backend: str, fault: str, way: str
) -> None:
    ended = trial(backend, fault, way)
    assert ended.short() == []
    assert len(ended.survivors) == 2


def too_late(rank_that_is: int, over: list[StoreEvent]) -> tuple[str, int | None, str]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    rank = dist.get_rank()
    if rank == rank_that_is:
        for other in over[:rank] + over[rank + 1 :]:
            other.wait()
        return "", None, ""
    try:
        gm.all_gather(torch.ones(3), group)
    except gm.RankError as error:
        return type(error).__name__, error.rank, str(error)
    finally:
        over[rank].set()
    return "returned", None, ""


@pytest.mark.timed
@pytest.mark.processes
def test_a_verb_on_gloo_names_the_rank_that_did_not_come_where_gloo_does_not() -> None:
    with gm.Ranks(3, backend="gloo", timeout=60) as ranks:
        for rank, (kind, lost, text) in enumerate(ranks.run(too_late, 1, [StoreEvent() for _ in range(3)])):
            if rank != 1:
                assert (kind, lost) == ("AbortedError", 1)
                assert "rank 1 did not respond" in text.splitlines()[0]
                assert "ordered()" in text


# ---- the judge itself

RIGHT = Trial(
    "launch",
    "shm",
    "killed",
    "call",
    dict.fromkeys((0, 2), "AbortedError: rank 1 ..."),
    0.1,
    "rank 1 ...",
    False,
    [],
)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"left": ["thread gradmesh rank 1"]}, "left behind"),
        ({"seconds": 60.0}, "took 60.0 s"),
        ({"caller": "rank 2 of 3 failed"}, "caller"),
        ({"survivors": {0: "returned", 2: "AbortedError: rank 1"}}, "noticed nothing"),
        ({"survivors": {0: "RuntimeError: Connection closed by peer"}}, "does not name"),
        ({"survivors": {0: "AbortedError: rank 11"}}, "does not name"),
        ({"fault": "slow"}, "AbortedError"),
        ({"fault": "stuck", "seconds": 5 + SECONDS}, "no stack"),
    ],
)
def test_failed_trial_is_reported(changes: dict[str, object], word: str) -> None:
    assert RIGHT.short() == []
    assert any(word in problem for problem in dataclasses.replace(RIGHT, **changes).short())  # type: ignore[arg-type]


def test_page_counts_shortfalls() -> None:
    assert "1 worlds, none of which fell short" in page([RIGHT])
    assert "2 worlds, 1 of which fell short" in page([RIGHT, dataclasses.replace(RIGHT, seconds=60.0)])
    assert "| killed | call | 0, 2: AbortedError: rank 1 ... | 0.1 | rank 1 ... | nothing |" in table([RIGHT])
