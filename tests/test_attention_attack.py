"""Random programs with attention over a cut sequence are those of one process, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.attention_programs import compare, on_rank, random_program
from tests.seldom import seldom

Ranks = Callable[[int], Callable[..., list[Any]]]


@pytest.mark.parametrize("size", seldom([1, 2, 3, 4], [2, 3]))
def test_random_programs_are_those_of_one_process(size: int, threads: Ranks) -> None:
    for seed in range(60):
        program = random_program(seed, size)
        compare(program, threads(size)(on_rank, program))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_many_random_programs_are_those_of_one_process(size: int, threads: Ranks) -> None:
    for seed in range(1000, 1600):
        program = random_program(seed, size)
        compare(program, threads(size)(on_rank, program))


@pytest.mark.slow
def test_random_programs_on_processes_are_those_of_one_process(processes: Ranks) -> None:
    for seed in range(2000, 2150):
        program = random_program(seed, 3)
        compare(program, processes(3)(on_rank, program))
