"""Random tensor-parallel programs in mixed precision: autocast, bfloat16 parameters, scaled losses."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import gradmesh as gm
from tests.seldom import seldom

Ranks = Callable[[int], Callable[..., list[Any]]]
BF16 = torch.bfloat16
ROWS, WIDTH = 6, 12


def drawn(seed: int) -> tuple[list[str], list[Tensor], Tensor, dict[str, Any]]:
    """Layers, their whole weights, the input, and how they are computed."""
    draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = [draws.choice(("column", "row", "sequence")) for _ in range(draws.randint(1, 4))]
    weights = [
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64, device="cpu") / WIDTH**0.5
        for _ in kinds
    ]
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64, device="cpu")
    how = {
        "dtype": draws.choice((BF16, torch.float32)),
        "sums": draws.choice(({}, {"comm_dtype": torch.float32, "backward_dtype": torch.float32})),
        "scale": 2.0 ** draws.randint(0, 12),
    }
    return kinds, weights, x, how


def sharded(kind: str, weight: Tensor) -> Tensor:
    """This rank's part: of the rows, of the columns, or all of it, where the rows of the input are shared out."""
    if kind == "sequence":
        return weight
    return weight.chunk(gm.world_size(), dim=0 if kind == "column" else 1)[gm.rank()]


def layer(kind: str, x: Tensor, weight: Tensor, sums: dict[str, Any]) -> Tensor:
    """One layer of an input that is the same on every rank, and whose gradient is."""
    if kind == "column":
        return gm.all_gather(linear(gm.replicate(x, **sums), weight), dim=1, dst=gm.I)
    if kind == "row":
        return gm.all_reduce(linear(gm.shard(x, dim=1, src=gm.I), weight), dst=gm.I, **sums)
    part = linear(gm.shard(x, dim=0, src=gm.I), gm.replicate(weight, **sums))
    return gm.all_gather(part, dim=0, dst=gm.I)


def run(
    seed: int, dtype: torch.dtype | None = None, scale: float | None = None, *, alone: bool = False
) -> list[Tensor]:
    """The gradients of the weights in units of the loss; in float64 with dtype=torch.float64."""
    kinds, whole, x, how = drawn(seed)
    dtype, scale = dtype or how["dtype"], scale or how["scale"]
    low = dtype is not torch.float64
    device = torch.get_default_device()
    weights = [
        (w if alone else sharded(kind, w)).to(device, dtype).requires_grad_()
        for kind, w in zip(kinds, whole, strict=True)
    ]
    h = x.to(device, dtype)
    casts = low and device.type in ("cpu", "cuda")  # the simulated device has no autocast
    with torch.autocast(device.type, BF16) if casts else contextlib.nullcontext():
        for kind, weight in zip(kinds, weights, strict=True):
            h = (linear(h, weight) if alone else layer(kind, h, weight, how["sums"] if low else {})).tanh()
        loss = (h.to(torch.float32 if low else dtype) ** 2).mean()
    (loss * scale).backward()
    grads = [w.grad for w in weights]
    assert all(grad is not None and grad.dtype is dtype for grad in grads)
    return [grad.cpu().double() / scale for grad in grads if grad is not None]


def compared(seed: int) -> tuple[list[tuple[float, float]], bool]:
    """Errors beside float64 of this rank's gradients and of one process, and whether the scale leaves all bits."""
    kinds, *_ = drawn(seed)
    true = [sharded(kind, g) for kind, g in zip(kinds, run(seed, torch.float64, alone=True), strict=True)]
    once = [sharded(kind, g) for kind, g in zip(kinds, run(seed, alone=True), strict=True)]
    exact = run(seed, torch.float64)
    for got, expected in zip(exact, true, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    ours = run(seed)
    errors = [
        ((got - t).norm().item() / t.norm().item(), (one - t).norm().item() / t.norm().item())
        for got, one, t in zip(ours, once, true, strict=True)
    ]
    return errors, all(map(torch.equal, ours, run(seed, scale=1.0)))


def check(found: list[tuple[list[tuple[float, float]], bool]]) -> None:
    for errors, same in found:
        for ours, alone in errors:
            assert ours < 0.03
            assert ours < 2 * alone + 0.005
        assert same


@pytest.mark.parametrize("seed", seldom(range(12), range(4)))
def test_gradients_in_mixed_precision_are_as_good_as_those_of_one_process(seed: int, threads: Ranks) -> None:
    check(threads(2 + seed % 2)(compared, seed))


@pytest.mark.device
@pytest.mark.parametrize("seed", seldom(range(12), range(3)))
def test_gradients_in_mixed_precision_on_a_device(seed: int, simulated: Ranks) -> None:
    check(simulated(2)(compared, seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 200))
def test_random_programs_in_mixed_precision(seed: int, threads: Ranks) -> None:
    check(threads(2 + seed % 2)(compared, seed))
