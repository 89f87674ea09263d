"""Random chains of verbs and local maps, right or with one fault put in: the audit names that one or finds nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import Audit, audit
from tests.seldom import seldom

Step = Callable[[Tensor], Tensor]

WIDTH = 3


def mixed(rank: int, rows: int, seed: int) -> Step:
    """A matrix along the rows, another one for each rank that is given."""
    m = torch.randn(
        rows, rows, generator=torch.Generator().manual_seed(97 * seed + rank), dtype=torch.float64
    )
    return lambda x: m.to(x.dtype) @ x


def moves(kind: gm.Type, rows: int, size: int) -> dict[str, tuple[gm.Type, int]]:
    """The steps that a value of a type can take, each with the type and the rows that come out."""
    cut = {} if rows % size else {"shard": (gm.V, rows // size)}
    if kind is gm.V:
        grown = {"all_gather": (gm.R, rows * size), "all_gather I": (gm.I, rows * size)} if rows < 13 else {}
        exchanged = {} if rows % size else {"all_to_all": (gm.V, rows)}
        return (
            {"own": (gm.V, rows), "shift": (gm.V, rows), "scan": (gm.V, rows), "as P": (gm.P, rows)}
            | grown
            | exchanged
        )
    if kind is gm.R:
        return {"same": (gm.R, rows), "own": (gm.V, rows), "as P": (gm.P, rows), "as I": (gm.I, rows)} | cut
    if kind is gm.P:
        scattered = {} if rows % size else {"reduce_scatter": (gm.V, rows // size)}
        return {"same": (gm.P, rows), "all_reduce": (gm.R, rows), "all_reduce I": (gm.I, rows)} | scattered
    return {"same": (gm.I, rows), "replicate": (gm.R, rows), "as P": (gm.P, rows)} | cut


def step(name: str, kind: gm.Type, rows: int, seed: int) -> Step:
    calls: dict[str, Step] = {
        "all_gather": gm.all_gather,
        "all_gather I": lambda x: gm.all_gather(x, dst=gm.I),
        "all_to_all": gm.all_to_all,
        "shift": gm.shift,
        "scan": gm.scan,
        "as P": lambda x: gm.convert(x, src=kind, dst=gm.P),  # type: ignore[call-overload]
        "as I": lambda x: gm.convert(x, src=gm.R, dst=gm.I),
        "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
        "all_reduce I": lambda x: gm.all_reduce(x, dst=gm.I),
        "reduce_scatter": gm.reduce_scatter,
        "replicate": gm.replicate,
        "shard": lambda x: gm.shard(x, src=kind),  # type: ignore[call-overload]
    }
    if name == "own":
        return mixed(1 + gm.axis().rank, rows, seed)
    return mixed(0, rows, seed) if name == "same" else calls[name]


Plan = tuple[gm.Type, gm.Type, list[tuple[str, gm.Type, int]]]


def drawn(seed: int, size: int) -> Plan:
    """A chain: its types at the ends, and its steps, each with the type and the rows that go in."""
    rng = random.Random(seed)
    src = kind = rng.choice([gm.V, gm.V, gm.P, gm.I, gm.R])
    rows = 2 * size
    steps = []
    for _ in range(rng.randint(1, 4)):
        options = moves(kind, rows, size)
        name = rng.choice(list(options))
        steps.append((name, kind, rows))
        kind, rows = options[name]
    return src, kind, steps


SWITCH = {"off": False}


class Fault(torch.autograd.Function):
    """The identity with a fault; a right one would not be found."""

    @staticmethod
    def forward(x: Tensor, what: str, memory: Tensor) -> Tensor:
        if what == "operand-overwritten":
            x.detach().mul_(2)
        return x.float().to(x.dtype) if what == "precision-lost" else x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, Tensor], output: Tensor) -> None:
        _, ctx.what, ctx.memory = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        what = ctx.what
        out = grad.clone()
        if what == "not-adjoint":
            out = 3 * grad
        elif what == "gradient-overwritten":
            grad.detach().mul_(2)
        elif what == "gradient-uninitialised":
            out = torch.empty_like(grad)
            out[1:] = grad[1:]
        elif what == "saved-buffer-overwritten":
            ctx.memory += 1
            out = grad * ctx.memory
        elif what == "second-order-lost":
            out = grad.detach().clone()
        elif what == "second-order-wrong":
            out = 2 * grad.detach() - grad
        elif what == "strided-gradient":
            out = grad.view(-1).view(grad.shape).clone()
        elif what == "global-convention":
            out = 2 * grad if SWITCH["off"] else grad.clone()
        elif what == "complex-wrong":
            out = grad.conj().resolve_conj().clone()
        return out, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return 2 * tangent if ctx.what == "forward-mode-wrong" else tangent.clone()


UNMEANT = ["not-adjoint", "unusual-reading"]

ANYWHERE = (
    "not-adjoint",
    "gradient-overwritten",
    "gradient-uninitialised",
    "saved-buffer-overwritten",
    "precision-lost",
    "second-order-lost",
    "second-order-wrong",
    "global-convention",
    "forward-mode-wrong",
    "complex-wrong",
)
AT_THE_END = ("strided-gradient",)
"""Faults that other steps would hide: they hand on contiguous gradients, and copies of operands."""
AT_THE_BEGINNING = ("operand-overwritten",)


def attacked(seed: int, size: int, fault: str | None, *, meant: bool = False) -> tuple[Plan, Audit]:
    plan = drawn(seed, size)
    _, _, steps = plan
    rng = random.Random(seed + 1)
    place = rng.randint(0, len(steps))
    place = len(steps) if fault in AT_THE_END else 0 if fault in AT_THE_BEGINNING else place

    def build() -> Any:
        calls = [step(name, kind, rows, seed + i) for i, (name, kind, rows) in enumerate(steps)]
        if fault is not None:
            calls.insert(place, lambda x: Fault.apply(x, fault, torch.ones((), dtype=x.dtype)))

        def fn(x: Tensor) -> Tensor:
            for call in calls:
                x = call(x)
            return x

        return fn, torch.randn(2 * size, WIDTH)

    return plan, audit(build, world_size=size, arrow=f"{plan[0]} -> {plan[1]}" if meant else None)


def to_be_asked_for(plan: Plan) -> bool:
    """Whether an audit may not accept these types without being asked: pending sums handed on, or one value for all."""
    src, dst, steps = plan
    kept_by_one = src is gm.I and any(name == "as P" for name, _, _ in steps)
    return dst is gm.P or src is gm.R or (src, dst) == (gm.I, gm.I) or kept_by_one


def check_right(seed: int, size: int) -> None:
    plan, found = attacked(seed, size, None)
    src, dst, _ = plan
    if not found.ok and to_be_asked_for(plan):
        assert {*found.kinds} <= {*UNMEANT}, f"seed {seed}, {size} ranks: {drawn(seed, size)}\n{found}"
        found = attacked(seed, size, None, meant=True)[1]
    assert found.ok, f"seed {seed}, {size} ranks: {drawn(seed, size)}\n{found}"
    assert found.holds(f"{src} -> {dst}"), f"seed {seed}, {size} ranks: {drawn(seed, size)}\n{found}"


def check_wrong(seed: int, size: int, fault: str) -> None:
    # three times a gradient is right as other types on three ranks, so these have to be asked for
    meant = fault == "not-adjoint" and to_be_asked_for(drawn(seed, size))
    plan, found = attacked(seed, size, fault, meant=meant)
    assert fault in found.kinds, f"seed {seed}, {size} ranks: {plan}\n{found}"
    if fault == "not-adjoint":
        assert "3 times too large" in found.findings[0].text, f"seed {seed}, {size} ranks\n{found}"


@pytest.mark.parametrize("seed", seldom(range(12), range(6)))
def test_nothing_is_found_in_a_right_chain(seed: int) -> None:
    check_right(seed, 2 + seed % 2)


def test_a_chain_whose_types_have_to_be_asked_for_is_right_as_those() -> None:
    check_right(810014, 4)  # P -> P by way of I
    check_right(1035, 4)  # I -> R by way of P
    check_wrong(2000, 2, "not-adjoint")  # I -> V, which a wrong factor explains as R -> V, too
    check_wrong(815003, 2, "not-adjoint")  # I -> I by way of P


@pytest.mark.parametrize("fault", [*ANYWHERE, *AT_THE_END, *AT_THE_BEGINNING])
def test_the_fault_in_a_chain_is_named(fault: str) -> None:
    number = [*ANYWHERE, *AT_THE_END, *AT_THE_BEGINNING].index(fault)
    check_wrong(100 + number, 2 + number % 2, fault)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_many_right_chains(seed: int) -> None:
    check_right(1000 + seed, 2 + seed % 3)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*ANYWHERE, *AT_THE_END, *AT_THE_BEGINNING])
def test_many_wrong_chains(fault: str) -> None:
    for seed in range(15):
        check_wrong(2000 + seed, 2 + seed % 3, fault)


Arrow = tuple[gm.Type, gm.Type]

VERBS: dict[str, tuple[dict[Arrow, Step], int]] = {
    "shift": ({(gm.V, gm.V): gm.shift}, 0),
    "back": ({(gm.V, gm.V): lambda x: gm.shift(x, offset=-1)}, 0),
    "all_to_all": ({(gm.V, gm.V): gm.all_to_all}, 0),
    "scan": ({(gm.V, gm.V): gm.scan}, 0),
    "all_reduce": (
        {
            (gm.P, gm.R): lambda x: gm.all_reduce(x, dst=gm.R),
            (gm.P, gm.I): lambda x: gm.all_reduce(x, dst=gm.I),
        },
        0,
    ),
    "all_gather": (
        {(gm.V, gm.R): gm.all_gather, (gm.V, gm.I): lambda x: gm.all_gather(x, dst=gm.I)},
        1,
    ),
    "reduce_scatter": ({(gm.P, gm.V): gm.reduce_scatter}, -1),
    "shard": (
        {(gm.R, gm.V): lambda x: gm.shard(x, src=gm.R), (gm.I, gm.V): lambda x: gm.shard(x, src=gm.I)},
        -1,
    ),
}
"""Verbs by the arrows that they are meant under, and whether the result has more rows or fewer."""


def _slot(x: Tensor, off: int) -> Tensor:
    size, rank = gm.world_size(), gm.axis().rank
    return torch.cat([x if at == (rank + off) % size else 0 * x for at in range(size)])


BACKWARDS: dict[int, dict[str, Step]] = {
    0: {
        "as it came": lambda g: 1 * g,
        "from the next": lambda g: gm.shift(g, offset=-1),
        "from the one before": gm.shift,
        "summed": lambda g: gm.all_reduce(g, dst=gm.R),
        "averaged": lambda g: gm.all_reduce(g, dst=gm.R, op="mean"),
        "exchanged": gm.all_to_all,
        "of the first": lambda g: g * (gm.axis().rank == 0),
        "scanned": lambda g: gm.scan(g, reverse=True),
        "scanned forth": gm.scan,
    },
    1: {
        "own rows": lambda g: 1 * g.chunk(gm.world_size())[gm.axis().rank],
        "the next one's rows": lambda g: 1 * g.chunk(gm.world_size())[(gm.axis().rank + 1) % gm.world_size()],
        "summed": gm.reduce_scatter,
        "averaged": lambda g: gm.reduce_scatter(g) / gm.world_size(),
        "the first one's rows": lambda g: 1 * g.chunk(gm.world_size())[0],
        "summed, of the next": lambda g: gm.shift(gm.reduce_scatter(g), offset=-1),
    },
    -1: {
        "own rows": lambda g: _slot(g, 0),
        "the next one's rows": lambda g: _slot(g, 1),
        "gathered": gm.all_gather,
        "gathered, times W": lambda g: gm.all_gather(g) * gm.world_size(),
        "gathered by the first": lambda g: gm.all_gather(g) * (gm.axis().rank == 0),
        "repeated": lambda g: g.repeat(gm.world_size(), 1),
    },
}
"""What a backward may do, by the rows that it has to hand back."""


def paired_with(forward: Step, back: Step) -> Step:
    """A forward with a backward that need not be its own."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return back(grad)

    return Own.apply


def right_under(verb: str, arrow: Arrow, back: Step, size: int) -> bool:
    """Whether a backward gives what the verb's own gives: for an R operand the sum over ranks counts."""
    forward = VERBS[verb][0][arrow]
    src, dst = arrow

    def drawn_as(alike: bool, shape: tuple[int, ...], seed: int) -> Tensor:
        seed = seed if alike else 10 * seed + 1 + gm.axis().rank
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def body() -> tuple[Tensor, Tensor]:
        x = drawn_as(src in (gm.R, gm.I), (2 * size, 2), 5).requires_grad_()
        y = forward(x)
        grad = drawn_as(dst.dual in (gm.R, gm.I), tuple(y.shape), 6)
        return torch.autograd.grad(y, x, grad)[0], back(grad)

    pairs = gm.launch(body, size, backend="threads")
    if src is gm.R:
        return torch.allclose(sum(one for one, _ in pairs), sum(other for _, other in pairs))  # type: ignore[arg-type]
    return all(torch.allclose(one, other) for one, other in pairs)


def held_against_what_is_meant(verb: str, size: int) -> tuple[int, int, int]:
    """Audit every backward of a verb; how many are right as meant, right as something else alone, and wrong."""
    arrows, grows = VERBS[verb]
    accepted = unmeant = wrong = 0
    for name, back in BACKWARDS[grows].items():
        right = {arrow for arrow in arrows if right_under(verb, arrow, back, size)}
        forward = next(iter(arrows.values()))

        def build(forward: Step = forward, back: Step = back) -> Any:
            return paired_with(forward, back), torch.randn(2 * size, 2)

        found = audit(build, kinds=UNMEANT, world_size=size)
        # A backward that sends what every rank has already is right by law, and has to be asked for.
        assert right or not found.ok, f"{verb}, {name}: {found}"
        for arrow in arrows:
            text = f"{arrow[0]} -> {arrow[1]}"
            meant = audit(build, arrow=text, kinds=UNMEANT, world_size=size)
            assert meant.ok == meant.holds(text) == (arrow in right), f"{verb}, {name}, {text}\n{meant}"
        accepted += found.ok
        unmeant += bool(found.readings) and not right
        wrong += not found.readings and not right
    return accepted, unmeant, wrong


@pytest.mark.parametrize(
    "verb",
    [pytest.param(v, marks=[] if v in ("shift", "all_reduce", "shard") else pytest.mark.slow) for v in VERBS],
)
def test_backward_that_fits_no_interpretation_is_found(verb: str) -> None:
    """Also where another reading fits, as P -> P does for a ring shift that hands back gradients as they came."""
    accepted, unmeant, wrong = held_against_what_is_meant(verb, 3)
    assert accepted == len(VERBS[verb][0])
    assert unmeant >= (verb in ("shift", "back", "shard"))
    assert wrong


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("verb", VERBS)
def test_backward_that_fits_no_interpretation_is_found_on_other_sizes(verb: str, size: int) -> None:
    held_against_what_is_meant(verb, size)


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s == 303 else pytest.mark.slow) for s in range(300, 306)]
)
def test_a_right_chain_is_accepted_as_it_is_meant(seed: int) -> None:
    """Of the sixteen readings those that hold without asking are accepted too, and none that does not hold."""
    size = 3
    src, dst, steps = drawn(seed, size)

    def build() -> Any:
        calls = [step(name, kind, rows, seed + i) for i, (name, kind, rows) in enumerate(steps)]

        def fn(x: Tensor) -> Tensor:
            for call in calls:
                x = call(x)
            return x

        return fn, torch.randn(2 * size, WIDTH)

    plain = audit(build, kinds=UNMEANT)
    assert plain.ok, plain
    for one in gm.Type:
        for other in gm.Type:
            text = f"{one} -> {other}"
            asked = audit(build, arrow=text, kinds=UNMEANT)
            assert asked.ok == asked.holds(text), f"{text}\n{asked}"
            assert asked.ok or not plain.holds(text), f"{text}\n{asked}"
            assert asked.ok or text != f"{src} -> {dst}", asked
