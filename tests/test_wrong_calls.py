"""Wrong calls, on all ranks and on one: a clear error on every rank, no hang, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradmesh as gm
from tests.wrong_calls import CASES, Case, outcomes

Ranks = Callable[[int], Callable[..., list[Any]]]
Table = dict[str, tuple[str, str]]


def labels(text: str) -> list[str]:
    """What the lines of an error's text begin with."""
    return [line.split()[0] for line in text.splitlines()[1:] if line.startswith("  ") and line[2] != " "]


def refused(table: Table, rank: int) -> list[str]:
    """The cases in which a rank's wrong call did not end in the error that it should."""
    return [
        name
        for name, case in CASES.items()
        if table[name][0] != case.kind.__name__
        or not table[name][1].startswith(f"gradmesh.{case.verb}: ")
        or f"rank {rank} of 2" not in table[name][1]
        or labels(table[name][1])[:4] != ["axis", "expected", "got", "remedy"]
    ]


def heard(table: Table) -> list[str]:
    """The cases in which rank 1, which was right, was not notified of the error of rank 0, or needlessly."""
    wanted: dict[str, Callable[[Case], str]] = {
        "now": lambda case: f" in <lambda>: gradmesh.{case.verb}: ",
        "next": lambda case: f", after {case.verb}(",
        "never": lambda _: "",
    }
    return [
        name
        for name, case in CASES.items()
        if table[name][0] != ("" if case.heard == "never" else "MismatchError")
        or wanted[case.heard](case) not in table[name][1]
        or (case.heard == "now" and f"rank 0: {case.kind.__name__} at " not in table[name][1])
        or (case.heard != "never" and table[name][1].count("wrong_calls.py:") < 2)
    ]


def check_all(tables: list[Table]) -> None:
    for rank, table in enumerate(tables):
        assert {name: table[name] for name in refused(table, rank)} == {}


def check_alone(tables: list[Table]) -> None:
    wrong, right = tables
    assert {name: wrong[name] for name in refused(wrong, 0)} == {}
    assert {name: right[name] for name in heard(right)} == {}


def test_there_are_many_of_every_kind() -> None:
    assert len(CASES) >= 60
    assert len({case.verb for case in CASES.values()}) >= 15


def test_on_threads_all_ranks_refuse(threads: Ranks) -> None:
    check_all(threads(2)(outcomes, False))


def test_error_on_one_rank_notifies_the_other_on_threads(threads: Ranks) -> None:
    check_alone(threads(2)(outcomes, True))


@pytest.mark.processes
def test_all_ranks_refuse(processes: Ranks) -> None:
    check_all(processes(2)(outcomes, False))


@pytest.mark.processes
def test_error_on_one_rank_notifies_the_other(processes: Ranks) -> None:
    check_alone(processes(2)(outcomes, True))


def uncaught() -> None:
    gm.all_gather([1.0] if gm.rank() == 0 else torch.ones(1))  # type: ignore[arg-type]


def right() -> list[float]:
    return gm.all_gather(torch.ones(1)).tolist()


@pytest.mark.parametrize(
    "backend",
    ["threads", *(pytest.param(name, marks=pytest.mark.processes) for name in ("shm", "gloo"))],
)
def test_next_call_works_after_an_uncaught_error(backend: str) -> None:
    with gm.Ranks(2, backend=backend, timeout=60) as ranks:
        for _ in range(2):
            with pytest.raises(gm.RankError, match=r"(?s)ArgumentError.*test_wrong_calls\.py.*in uncaught"):
                ranks.run(uncaught)
            assert ranks.run(right) == [[1.0, 1.0]] * 2
    with pytest.raises(gm.RankError, match="ArgumentError"):
        gm.launch(uncaught, 2, backend=backend, timeout=60)
    assert gm.launch(right, 2, backend=backend, timeout=60) == [[1.0, 1.0]] * 2
