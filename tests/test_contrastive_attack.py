"""Random contrastive programs: the dense loss of one process in value and derivatives, or an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contrastive_programs import Program, differs, drawn, on_rank
from tests.seldom import seldom

Threads = Callable[[int], Callable[..., list[Any]]]


def held(program: Program, run: Callable[..., list[Any]]) -> str | None:
    rtol = 1e-9 if program.dtype is torch.float64 else 2e-4
    return differs(program, run(on_rank, program), rtol)


@pytest.mark.parametrize("ranks", seldom([1, 2, 3], [3]))
def test_random_programs(ranks: int, threads: Threads) -> None:
    wrong = [held(drawn(seed, ranks), threads(ranks)) for seed in range(1000 * ranks, 1000 * ranks + 50)]
    assert [each for each in wrong if each] == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_many_random_programs(ranks: int, threads: Threads) -> None:
    wrong = [held(drawn(seed, ranks), threads(ranks)) for seed in range(10000 * ranks, 10000 * ranks + 1500)]
    assert [each for each in wrong if each] == []


@pytest.mark.slow
@pytest.mark.processes
def test_random_programs_on_processes(processes: Threads) -> None:
    wrong = [held(drawn(seed, 2), processes(2)) for seed in range(300)]
    assert [each for each in wrong if each] == []
