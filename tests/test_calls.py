"""What a call of a verb enters: ceilings of Python calls and files, so that no layer comes back unseen."""

from __future__ import annotations

import pytest

from tools.calls import CALLS, counted, modules_at_import

MOST = {
    "all_reduce": ((45, 19), (51, 20), (41, 15)),
    "all_gather": ((52, 20), (58, 21), (44, 16)),
    "clip_loss": ((366, 27), (378, 28), (61, 16)),
}
"""Calls and files, at most: without gradients, forward, and backward."""


@pytest.mark.parametrize("name", MOST)
def test_a_call_enters_few_functions_and_files(name: str) -> None:
    plain, both = counted(name, requires_grad=False).row, counted(name).row
    for got, most in zip((plain[:2], both[:2], both[2:]), MOST[name], strict=True):
        assert got[0] <= most[0], (
            f"{name}: {got[0]} calls; list them with python -m tools.calls {name} --list"
        )
        assert got[1] <= most[1], (
            f"{name}: {got[1]} files; list them with python -m tools.calls {name} --list"
        )


def test_the_count_is_that_of_the_rank_that_waits() -> None:
    assert len({counted("all_reduce").row for _ in range(3)}) == 1


def test_functions_of_gradmesh_are_counted_and_no_others() -> None:
    found = counted("all_reduce")
    assert ("verbs/collectives.py", "all_reduce") in found.forward
    assert any("backends/threads" in file for file, _ in found.forward)
    assert not [file for file, _ in (*found.forward, *found.backward) if file.startswith("/")]


def test_every_call_runs_forward_and_backward() -> None:
    assert len(CALLS) >= 15
    for name in ("broadcast", "gather", "scan", "ring_attention"):
        calls, files, back, back_files = counted(name).row
        assert calls > files > 0, name
        assert back > back_files > 0, name


def test_the_import_loads_few_modules() -> None:
    assert modules_at_import() <= 60
