"""Functions whose backward calls a verb by hand: two calls of one are distinguished, and right programs pass."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.backends.own_group import FLAGS
from gradmesh.runtime.mesh import axis
from gradmesh.transport import call_checks as places
from gradmesh.transport.call_checks import (
    FunctionCalls,
    Functions,
    calls_of,
    conflicting,
    encode_flags,
    show_flags,
)
from tests.by_hand_programs import by_hand, drawn, outcome, verdict
from tools.attack.command import attack
from tools.attack.draw import drawn as drawn_program
from tools.attack.programs import source
from tools.attack.run import Pools

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
def test_random_manual_functions_are_right_or_raise_and_identical_ones_pass(ranks: int) -> None:
    found = verdicts(60, ranks)
    assert set(found) == {"right", "refused"}, found
    assert found["right"] > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("backend", "count"), [("threads", 500), ("shm", 60), ("gloo", 60)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_functions_by_hand_are_right_or_refused(backend: str, count: int, ranks: int) -> None:
    found = verdicts(count, ranks, 1000, backend)
    assert set(found) == {"right", "refused"}, found


def test_random_programs_of_verbs_are_right_too_where_functions_call_some_of_them_by_hand() -> None:
    with Pools("threads") as pools:
        summary = attack(160, pools, seed=1789, by_hand=0.8)
    assert not summary.findings, str(summary)
    programs = [drawn_program(1789, index, by_hand=0.8) for index in range(160)]
    calls = sum(source(program).count("by_hand(") for program in programs)
    assert calls > 20
    assert not any("by_hand(" in source(program) for program in programs if program.ordered)


def test_without_the_numbers_random_programs_are_silently_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the tests above would show nothing."""
    monkeypatch.setattr(Functions, "note", lambda *_: None)
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
    said = threads(2)(each_uses_another)
    for rank, text in enumerate(said):
        lines = [
            line.rpartition("made call ")[2]
            for line in text.splitlines()
            if "rank " in line and "made call" in line
        ]
        assert int(lines[1]) == int(lines[0]) + 1
        assert f"made call {lines[rank]}: shift(offset=1, wrap=True) of float64[12]" in text
        assert "use every result of that autograd.Function on every rank" in text


def test_they_are_distinguished_with_every_value_compared_too(threads: Ranks) -> None:
    def full() -> str:
        with gm.check("full"):
            return each_uses_another()

    assert all("different calls of an autograd.Function" in text for text in threads(2)(full))


@pytest.mark.parametrize(
    ("ranks", "different"),
    [
        (((7, 7), (7, 7)), False),
        (((7, 7), (8, 8)), True),
        (((7, 8), (8, 8), (7, 7)), True),  # the last two
        (((7, 9), (8, 8), None), False),
        ((None, (8, 8)), False),
        (((1022, 1024), (1023, 1023)), False),
        (((1022, 1022), (1023, 1023)), True),
        (((1, 5000), (4000, 4000)), False),
    ],
)
def test_ids_known_on_two_ranks_must_share_a_call(
    ranks: tuple[tuple[int, int] | None, ...], different: bool
) -> None:
    made = [one and FunctionCalls(*one, "", None) for one in ranks]
    heard = [0 if one is None else encode_flags(one) | 5 for one in made]
    assert conflicting(heard) == different
    text = show_flags(heard, made[0])
    assert ("unknown" in text) == (None in ranks)
    assert (
        made[0] is None
        or f"rank 0: in the backward of the autograd.Function that made call {made[0].first}" in text
    )


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


def test_function_in_a_manual_backward_is_traced_in_every_order(threads: Ranks) -> None:
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
            found.append(len(calls_of(axis().group).functions))
    return found


@pytest.mark.parametrize(
    ("mode", "more"), [("plain", [1, 1, 1]), ("no_grad", [1, 1, 1]), ("inference", [0, 0, 0])]
)
def test_only_calls_of_a_function_are_recorded(threads: Ranks, mode: str, more: list[int]) -> None:
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
    assert len(calls_of(axis().group).functions) <= 3
    return x.grad.tolist()


def test_oldest_entries_are_evicted_identically_on_every_rank(
    threads: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_KEPT", 3)
    assert gm.launch(many, 2, backend="threads") == [[1.0] * 12] * 2


def twice() -> bool:
    x = torch.ones(12, dtype=torch.float64, requires_grad=True)
    y = by_hand(x, "scan")
    loss = (1 + gm.rank()) * y.square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    return torch.equal(first, torch.autograd.grad(loss, x)[0])


def test_a_graph_that_is_run_through_twice_is_right(threads: Ranks) -> None:
    assert threads(2)(twice) == [True, True]


def local(x: Tensor) -> Tensor:
    """A Function that sends nothing: work of a rank's own."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return Own.apply(x) if gm.rank() == 0 else x


class LocalFirst(torch.autograd.Function):
    """Rank 0 does something of its own before the verb."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if gm.rank() == 0:
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                torch.autograd.grad(own.sin().sum(), own)
        return gm.all_reduce(local(x), dst=gm.R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gm.all_reduce(grad, dst=gm.R)


def experts(x: Tensor) -> Tensor:
    return gm.all_reduce(local(gm.all_reduce(local(x), dst=gm.R)), dst=gm.R)


def hooked(x: Tensor) -> Tensor:
    """A hook that calls a verb runs at another node on each rank."""
    y = by_hand(x, "all_reduce")
    y = y if gm.rank() == 0 else 1 * y
    y.register_hook(lambda grad: gm.all_reduce(grad, dst=gm.R))
    return y


def offloaded(x: Tensor) -> Tensor:
    """One rank keeps what it saves elsewhere, in both passes."""
    return by_hand(x, "all_reduce")


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "a Function before the verb": lambda x: LocalFirst.apply(x),
    "experts under the older checkpoint": lambda x: checkpoint(experts, x, use_reentrant=True),
    "experts under a checkpoint": lambda x: checkpoint(experts, x, use_reentrant=False),
    "a hook": hooked,
    "what one rank saves elsewhere": offloaded,
}


def apart_ranks(name: str) -> tuple[list[float], list[float]]:
    x = torch.full((12,), 1.0, dtype=torch.float64, requires_grad=True)
    saving = gm.rank() == 0 and name.startswith("what one")
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        if saving
        else contextlib.nullcontext()
    ):
        (by_hand(x, "scan") + APART[name](x)).sum().backward()
    assert x.grad is not None
    found, x = x.grad, x.detach().requires_grad_()
    with gm.ordered():
        y = experts(x) if name.startswith("experts") else gm.all_reduce(x, dst=gm.R)
        y = y if name != "a hook" else gm.all_reduce(y, dst=gm.R)
        gm.backward((gm.scan(x) + y).sum())
    assert x.grad is not None
    return found.tolist(), x.grad.tolist()


@pytest.mark.parametrize("name", APART)
def test_rank_local_work_is_not_reported(threads: Ranks, name: str) -> None:
    for found, right in threads(2)(apart_ranks, name):
        assert found == right


def in_other_threads() -> list[float]:
    """Nodes are numbered by thread: a number of another one's is not taken for this one's."""
    x = torch.ones(12, dtype=torch.float64, requires_grad=True)
    found = []

    def step(scale: float) -> None:
        y = local(x * scale) if scale > 1 else x
        (grad,) = torch.autograd.grad(by_hand(y, "scan").sum() * (1 + gm.rank()), x)
        found.append(grad.sum().item())

    for scale in (1.0, 2.0, 3.0):
        thread = threading.Thread(target=step, args=(scale,))
        thread.start()
        thread.join()
    return found


@pytest.mark.processes
def test_sequence_numbers_of_other_threads_are_unchanged(processes: Ranks) -> None:
    assert processes(2)(in_other_threads) == [[36.0, 72.0, 108.0], [24.0, 48.0, 72.0]]


def test_first_and_last_call_of_a_function_are_per_thread() -> None:
    functions = Functions()
    functions.note(3, 7, "first")
    functions.note(3, 9, "last")
    made = functions.of(3)
    assert made is not None
    assert (made.first, made.last, made.text) == (7, 9, "first")
    found: list[FunctionCalls | None] = []

    def elsewhere() -> None:
        functions.note(4, 10, "of another count")
        found.append(functions.of(3))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [None]
    assert functions.of(4) is None
    assert len(functions) == 1


def saved_elsewhere() -> str:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return each_uses_another()


def test_they_are_distinguished_when_every_rank_saves_to_another_path(threads: Ranks) -> None:
    assert all("different calls of an autograd.Function" in text for text in threads(2)(saved_elsewhere))


class Repeated(torch.autograd.Function):
    """Its backward says of its gradient that it is the same on every rank; rank 0 does something of its own before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gm.all_reduce(local(x), dst=gm.I)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gm.replicate(grad)


def compared_in_full() -> list[float]:
    x = torch.ones(12, dtype=torch.float64, requires_grad=True)
    found = []
    with gm.check("full"):
        for scale in range(1, 9):  # a place may be in the bits of one value by chance
            (grad,) = torch.autograd.grad(scale * Repeated.apply(x).square().sum(), x)
            found.append(grad.sum().item())
    return found


def test_text_about_a_function_is_not_taken_for_a_value(threads: Ranks) -> None:
    assert threads(2)(compared_in_full) == [[48.0 * scale for scale in range(1, 9)]] * 2


def test_the_flags_of_a_call_do_not_overlap_and_fit_beside_its_hash() -> None:
    bits = [places.NEEDS_BACKWARD, places.CAN_BACKWARD, places.ZERO_GRAD, places.DEFERRED, places._NOT_FINITE]
    line = places._LINE.pack(places._LINE.most)
    with_values = [*bits, line, places._CHECKSUM.pack(places._CHECKSUM.most)]
    without = [*bits, line, *(each.pack(each.most) for each in (places._FIRST, places._MORE))]
    for layout in (with_values, without):
        together = functools.reduce(operator.or_, layout)
        assert sum(layout) == together
        assert together & FLAGS == together
    assert places._LINE.read(places._LINE.pack(77) | ~line) == 77
