"""torch's benchmark utilities on verbs: Timer and Compare on ranks, and Callgrind's counts where there is valgrind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.benchmark import Compare, Measurement, Timer

import gradmesh as gm
from tools import instructions

Ranks = Callable[[int], Callable[..., list[Any]]]
NUMBER = 5


def timed(link: gm.verify.Link) -> list[Measurement]:
    """A verb whose call is waited for at once, and one that work hides, on a wire that is slow."""
    x = torch.ones(8)
    weight = torch.ones(700, 700)

    def in_turn() -> Tensor:
        y = gm.all_gather(x)
        return y.sum() + (weight @ weight)[0, 0]

    def hidden() -> Tensor:
        coming = gm.all_gather(x, async_op=True)
        work = (weight @ weight)[0, 0]
        return coming.wait().sum() + work

    found = []
    for name, run in {"in turn": in_turn, "hidden": hidden}.items():
        for label, wire in {"as it is": gm.verify.Link(0.0, 1e3), "slow": link}.items():
            timer = Timer("run()", globals={"run": run}, label="step", sub_label=name, description=label)
            with gm.verify.delayed(wire):
                gm.barrier()
                found.append(timer.timeit(NUMBER))
    return found


def test_timer_includes_the_modelled_link_time(threads: Ranks) -> None:
    first, second = threads(2)(timed, gm.verify.Link(latency_us=200_000, gbytes_per_s=1.0))
    for found in (first, second):
        times = {(one.task_spec.sub_label, one.task_spec.description): one.median for one in found}
        assert times["in turn", "slow"] >= 0.2
        assert times["in turn", "slow"] > times["in turn", "as it is"]
        assert all(one.number_per_run == NUMBER for one in found)


def test_compare_has_a_row_for_each_verb_and_a_column_for_each_way(threads: Ranks) -> None:
    ranks = threads(2)(timed, gm.verify.Link(latency_us=100, gbytes_per_s=1.0))
    slowest = [max(same, key=lambda one: one.median) for same in zip(*ranks, strict=True)]
    table = str(Compare(slowest))
    lines = [line for line in table.splitlines() if "|" in line]
    assert [line.split("|")[0].strip() for line in lines] == ["", "in turn", "hidden"]
    assert [cell.strip() for cell in lines[0].split("|")[1:]] == ["as it is", "slow"]
    assert all(float(cell) > 0 for line in lines[1:] for cell in line.split("|")[1:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not instructions.available(), reason="valgrind is not installed")
def test_instructions_are_counted_and_are_the_same_again() -> None:
    try:
        clone, gather, again = (
            instructions.counted(line, 20) for line in ("x.clone()", *["gm.all_gather(x)"] * 2)
        )
    finally:
        dist.destroy_process_group()  # torch has run each statement once in this process
    assert clone < gather
    assert abs(gather - again) < 0.02 * gather
