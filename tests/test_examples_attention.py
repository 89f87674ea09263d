"""The example with attention and the command that measures it work as documented, at small size."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.attention import WAYS, Case, peaks, step, times

pytestmark = pytest.mark.fresh_ranks  # it measures memory

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "ring_attention.py"
SMALL = ["--steps", "3", "--length", "26"]


def furthest(printed: str) -> float:
    return float(re.findall(r"differs by (\S+)", printed)[0])


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_the_example_follows_the_single_process(
    attention: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), "--attention", attention, "--ranks", "3", *SMALL])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert furthest(capsys.readouterr().out) < 1e-12


APART = ["ring, zigzag", "torch's ring, balanced"]
"""The ways that have the sequence in another order, which a causal mask tells from the others."""


def results(case: Case) -> dict[str, list[torch.Tensor]]:
    torch.set_num_threads(1)
    return {way: step(case, way)(case.inputs()) for way in WAYS if way != "dense"}


@pytest.mark.processes
@pytest.mark.torch_at_least("2.10", "its ring attention, one of the ways, is elsewhere")
@pytest.mark.parametrize("causal", [False, True])
def test_all_ways_that_are_measured_compute_the_same(
    causal: bool, processes: Callable[[int], Callable[..., list[Any]]]
) -> None:
    for found in processes(2)(results, Case(32, 2, 4, causal)):
        for way in found:
            like = "gathered keys" if not causal or way not in APART else APART[0]
            assert all(
                torch.allclose(a, b, atol=1e-5) for a, b in zip(found[way], found[like], strict=True)
            ), way
        assert not causal or not torch.allclose(found[APART[0]][0], found["ring"][0], atol=1e-2)


@pytest.mark.processes
def test_memory_and_time_are_measured(processes: Callable[[int], Callable[..., list[Any]]]) -> None:
    assert all(peak > 0 for peak in processes(2)(peaks, Case(4096, 4, 64), "ring"))
    for seen in processes(2)(times, Case(32, 2, 4), ("ring", "ulysses"), 2):
        assert [len(each) for each in seen.values()] == [2, 2]
        assert min(min(each) for each in seen.values()) > 0
