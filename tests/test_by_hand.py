"""Functions whose backward calls a verb by hand: two calls of one are told apart, and nobody is accused."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.axis import axis
from gradmesh.wire import claims
from gradmesh.wire.claims import Calls, calls_of
from tests.by_hand_programs import by_hand, drawn, outcome, verdict

Ranks = Callable[[int], Callable[..., list[Any]]]


def verdicts(count: int, ranks: int, start: int = 0, backend: str = "threads") -> collections.Counter[str]:
    """What becomes of random programs, as the first word of each verdict, with the wrong ones by number."""
    found: collections.Counter[str] = collections.Counter()
    pool = None
    for seed in range(start, start + count):
        program = drawn(seed, ranks)
        pool = pool or gm.Ranks(ranks, backend, timeout=20, prefix=False)
        try:
            said = verdict(program, pool.run(outcome, program))
        except gm.RankError as error:
            stuck = "DeadlockError" in str(error)
            said = str(error) if not stuck else "accused" if program.alike else "refused"
        if said not in ("right", "refused"):
            said = f"{said.split(' ')[0]}: {seed}"
        if said != "right":  # these ranks are no longer at the same place
            pool.close()
            pool = None
        found[said] += 1
    if pool is not None:
        pool.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_functions_by_hand_are_right_or_refused_and_none_that_is_alike_is_accused(ranks: int) -> None:
    found = verdicts(60, ranks)
    assert set(found) == {"right", "refused"}, found
    assert found["right"] > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("backend", "count"), [("threads", 1500), ("shm", 60), ("gloo", 60)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_functions_by_hand_are_right_or_refused(backend: str, count: int, ranks: int) -> None:
    found = verdicts(count, ranks, 1000, backend)
    assert set(found) == {"right", "refused"}, found


def test_without_the_numbers_random_programs_are_wrong_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the tests above would show nothing."""
    monkeypatch.setattr(Calls, "note_in", lambda *_: None)
    assert any(said.startswith("wrong") for said in verdicts(60, 2))


def each_uses_another() -> str:
    x = torch.ones(12, dtype=torch.float64, requires_grad=True)
    results = by_hand(x, "shift"), by_hand(2 * x, "shift")
    try:
        results[gm.rank()].sum().backward()
    except gm.MismatchError as error:
        return str(error)
    return ""


def test_the_error_names_the_calls_that_the_function_made(threads: Ranks) -> None:
    for said in threads(2)(each_uses_another):
        first, second = [line for line in said.splitlines() if "shift(offset=-1" in line]
        assert "in the backward of the function that made call" in first
        assert "shift(offset=1, wrap=True) of float64[12]" in second
        assert first.split("made call ")[1].split(":")[0] != second.split("made call ")[1].split(":")[0]
        assert "have every rank use every result of that function" in said


class Batch(torch.autograd.Function):
    """A gather whose backward calls two verbs, one of them in a Function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gm.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return by_hand(gm.reduce_scatter(grad), "shift")


def nested() -> tuple[Tensor, Tensor]:
    found = []
    for _ in range(2):
        x = torch.full((12,), 1.0 + gm.rank(), dtype=torch.float64, requires_grad=True)
        y: Tensor = Batch.apply(x)
        (first,) = torch.autograd.grad((1 + gm.rank()) * y.sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append(second)
    return found[0], found[1]


def test_a_function_in_a_backward_by_hand_is_followed_in_every_order(threads: Ranks) -> None:
    for first, second in threads(2)(nested):
        assert torch.equal(first, second)
        assert first.abs().sum() > 0


def kept(mode: str) -> list[int]:
    """How many Functions the axis remembers, after calls of each kind."""
    found = []
    x = torch.ones(12, dtype=torch.float64)
    modes = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[mode]():
        for run in (lambda: by_hand(x, "shift"), lambda: gm.shift(x), lambda: gm.shift(x.clone())):
            run()
            found.append(len(calls_of(axis().group).made_in))
    return found


@pytest.mark.parametrize(
    ("mode", "more"), [("plain", [1, 1, 1]), ("no_grad", [1, 1, 1]), ("inference", [0, 0, 0])]
)
def test_only_what_a_function_calls_is_remembered(threads: Ranks, mode: str, more: list[int]) -> None:
    before = threads(2)(kept, mode)
    after = threads(2)(kept, mode)
    for old, new in zip(before, after, strict=True):
        assert [count - old[-1] for count in new] == more


def many() -> list[float]:
    x = torch.ones(12, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(8):
        y = by_hand(y, "shift")
    y.sum().backward()
    assert x.grad is not None
    assert len(calls_of(axis().group).made_in) <= 3
    return x.grad.tolist()


def test_the_oldest_are_forgotten_on_every_rank_alike(
    threads: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_KEPT_FUNCTIONS", 3)
    assert gm.launch(many, 2, backend="threads") == [[1.0] * 12] * 2


def twice() -> bool:
    x = torch.ones(12, dtype=torch.float64, requires_grad=True)
    y = by_hand(x, "scan")
    loss = (1 + gm.rank()) * y.square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    return torch.equal(first, torch.autograd.grad(loss, x)[0])


def test_a_graph_that_is_run_through_twice_is_right(threads: Ranks) -> None:
    assert threads(2)(twice) == [True, True]
