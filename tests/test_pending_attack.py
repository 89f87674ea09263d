"""Random programs some of whose calls are async and coalesced, against their dense runs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradmesh.autograd import pending
from gradmesh.autograd.coalesce import _Message
from tools.attack.calls import Region, Verb
from tools.attack.command import attack
from tools.attack.dense import expected
from tools.attack.draw import drawn
from tools.attack.meanings import Invalid
from tools.attack.programs import Program, source
from tools.attack.run import Pools

SEED, SHARE = 1914, 0.7


@pytest.fixture
def pools() -> Iterator[Pools]:
    with Pools("threads") as made:
        yield made


@pytest.mark.timeout(120)
def test_programs_with_async_calls_are_right_or_raise(pools: Pools) -> None:
    summary = attack(70, pools, seed=SEED, pending=SHARE)
    assert not summary.findings, str(summary)
    right = sum(n for (_, kind), n in summary.counts.items() if kind == "right")
    assert right > 50, str(summary)


def _verbs(program: Program) -> Iterator[tuple[Verb, bool]]:
    """The calls, and whether each is in a region of a checkpoint."""
    for one in program.statements:
        for inner in one.body if isinstance(one, Region) else (one,):
            if isinstance(inner, Verb):
                yield inner, isinstance(one, Region)


def test_they_launch_async_calls_of_every_kind_everywhere() -> None:
    kinds: collections.Counter[object] = collections.Counter()
    for index in range(200):
        program = drawn(SEED, index, pending=SHARE)
        try:
            expected(program)
        except Invalid:
            continue
        for verb, region in _verbs(program):
            if verb.later is not None:
                place = program.ordered, region
                kinds.update([verb.verb, place, verb.recorded, program.mode, ("message", verb.coalesced)])
        kinds.update(["block"] * source(program).count("gm.coalesce("))
    assert {"all_gather", "all_reduce", "broadcast", "reduce_scatter", "scan", "halo_exchange"} <= set(kinds)
    assert {(ordered, region) for ordered in (True, False) for region in (True, False)} <= set(kinds)
    assert {True, False, "second", "first", ("message", True)} <= set(kinds)
    assert kinds["block"] > 50


def test_the_program_is_else_the_same() -> None:
    for index in range(30):
        plain, apart = drawn(SEED, index), drawn(SEED, index, pending=SHARE)
        assert plain.losses == apart.losses
        assert [verb.verb for verb, _ in _verbs(plain)] == [verb.verb for verb, _ in _verbs(apart)]
        assert "async_op" not in source(plain)


def _of_another(run: Callable[..., Any]) -> Callable[..., Any]:
    """The halves of a backward, with a wrong sign between them."""

    def backward(*given: Any) -> tuple[Any, ...]:
        first, gradient, *others = run(*given)
        return (first, None if gradient is None else -gradient, *others)

    return backward


def _the_first(self: _Message, number: int) -> Any:
    return self._cut(self.pending.wait())[0]


@pytest.mark.parametrize("defect", ["a backward of another sign", "a message that is cut elsewhere"])
@pytest.mark.timeout(120)
def test_defect_of_async_calls_is_found(defect: str, pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "a backward of another sign":
        monkeypatch.setattr(
            pending._StartNode, "backward", staticmethod(_of_another(pending._StartNode.backward))
        )
    else:
        monkeypatch.setattr(_Message, "part", _the_first)
    summary = attack(400, pools, seed=SEED, pending=SHARE, most_findings=1, tell=lambda _: None, shrink=False)
    (finding,) = summary.findings
    assert any(verb.later is not None for verb, _ in _verbs(finding.program))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("backend", "programs"), [("threads", 5_000), ("shm", 500), ("gloo", 500)])
def test_many_programs_with_async_calls(backend: str, programs: int) -> None:
    with Pools(backend) as pools:
        summary = attack(programs, pools, seed=SEED + 1, pending=SHARE)
    assert not summary.findings, str(summary)
