"""Instruments: which events they get, in which order, on which rank; and that a call without them does not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.runtime.state import INSTALLED, Instrument, RankState, installed, must_decompose
from tests.conftest import Run


class Note(Instrument):
    """Writes down its events."""

    def __init__(self, name: str, events: list[str], *, plain: bool = False) -> None:
        self.name, self.events, self.plain = name, events, plain

    def queued(self, op: Any, x: Tensor, recorded: Any) -> None:
        self.events.append(f"{self.name} queued {op.verb}")

    def called(self, op: Any, x: Tensor, recorded: Any, run: Callable[[], Tensor]) -> Tensor:
        self.events.append(f"{self.name} called {op.verb}")
        y = run()
        self.events.append(f"{self.name} returned {y.tolist()}")
        return y

    def sending(self, transport: Any) -> Any:
        self.events.append(f"{self.name} sending")
        return transport

    def waited(self, job: Any, begin: float, end: float) -> None:
        assert begin <= end
        self.events.append(f"{self.name} waited")

    def declared(self, x: Tensor, axis: Any, kind: Any) -> None:
        self.events.append(f"{self.name} declared {kind}")


def test_the_events_of_a_call_come_in_order(threads: Callable[[int], Run]) -> None:
    def on_each_rank() -> list[str]:
        events: list[str] = []
        with installed(Note("a", events)):
            gm.all_reduce(torch.ones(1), dst=gm.R)
            gm.all_gather(torch.ones(1), async_op=True).wait()
            gm.objective(torch.ones(()))
        gm.all_reduce(torch.ones(1), dst=gm.R)
        return events

    for events in threads(2)(on_each_rank):
        queued = events.index("a queued all_gather")
        assert events[:queued] == ["a called all_reduce", "a sending", "a returned [2.0]"]
        called = ["a called all_gather", "a sending", "a returned [1.0, 1.0]"]
        assert [event for event in events[queued:] if event in called][:3] == called
        assert events.index("a queued all_gather") < events.index("a called all_gather")
        assert "a waited" in events[queued:]
        assert events[-1] == "a declared V"


def test_the_last_one_is_outermost_unless_it_is_installed_innermost(threads: Callable[[int], Run]) -> None:
    def on_each_rank() -> list[str]:
        events: list[str] = []
        inner = installed(Note("c", events), innermost=True)
        with installed(Note("a", events)), installed(Note("b", events)), inner:
            gm.all_reduce(torch.ones(1), dst=gm.R)
        return events

    for events in threads(2)(on_each_rank):
        assert [event for event in events if "called" in event] == [f"{n} called all_reduce" for n in "bac"]
        assert [event for event in events if "sending" in event] == [f"{n} sending" for n in "cab"]


def test_one_rank_is_watched_without_the_others(threads: Callable[[int], Run]) -> None:
    def on_each_rank() -> list[str]:
        events: list[str] = []
        if gm.rank() == 0:
            with installed(Note("a", events, plain=True)):
                assert must_decompose()
                gm.barrier()
                gm.all_reduce(torch.ones(1), dst=gm.R)
                gm.barrier()
        else:
            gm.barrier()
            assert INSTALLED[0] == 1  # for the whole process
            assert not must_decompose()
            gm.all_reduce(torch.ones(1), dst=gm.R)
            gm.barrier()
        return events

    first, second = threads(2)(on_each_rank)
    assert first
    assert not second
    assert INSTALLED == [0]


def test_a_call_that_is_not_watched_does_not_look_for_instruments(
    threads: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(_: object) -> Any:
        raise AssertionError("looked")

    monkeypatch.setattr(RankState, "instruments", property(unexpected, lambda *_: None))

    def on_each_rank() -> float:
        x = torch.ones(1, requires_grad=True)
        gm.all_reduce(x, dst=gm.R, async_op=True).wait().backward()
        return gm.all_reduce(x, dst=gm.R).item()

    assert threads(2)(on_each_rank) == [2.0, 2.0]
