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


def attacked(seed: int, size: int, fault: str | None) -> tuple[Plan, Audit]:
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

    return plan, audit(build, world_size=size)


def check_right(seed: int, size: int) -> None:
    (src, dst, _), found = attacked(seed, size, None)
    assert found.ok, f"seed {seed}, {size} ranks: {drawn(seed, size)}\n{found}"
    assert found.holds(f"{src} -> {dst}"), f"seed {seed}, {size} ranks: {drawn(seed, size)}\n{found}"


def check_wrong(seed: int, size: int, fault: str) -> None:
    _, found = attacked(seed, size, fault)
    assert fault in found.kinds, f"seed {seed}, {size} ranks: {drawn(seed, size)}\n{found}"
    if fault == "not-adjoint":
        assert "3 times too large" in found.findings[0].text


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_found_in_a_right_chain(seed: int) -> None:
    check_right(seed, 2 + seed % 2)


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
