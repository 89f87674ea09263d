"""Optimizers that look at signs, and schedules that move momentum: ranks follow one process, with sharded state too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR

import gradmesh as gm
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.sizes import EQUAL
from tests import contract

Threads = Callable[[int], Callable[..., list[Any]]]
STEPS, WIDTH = 10, 4

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Rprop": lambda p, d: torch.optim.Rprop(p, lr=0.01, etas=(d.uniform(0.3, 0.7), d.uniform(1.1, 1.6))),
    "SGD": lambda p, d: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=d.random() < 0.5),
    "Adam": lambda p, d: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "AdamW": lambda p, d: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
}


def model() -> nn.Sequential:
    draw = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return net


def batch(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(y: Tensor, everything: Tensor, first: int) -> Tensor:
    """Each row against all rows."""
    labels = torch.arange(first, first + len(y))
    return nn.functional.cross_entropy(y @ everything.T, labels, reduction="sum") / len(everything)


def prepared(name: str, seed: int, parameters: list[Tensor]) -> tuple[torch.optim.Optimizer, CyclicLR]:
    """An optimizer and its schedule, with settings that the seed draws; momentum cycles where there is one."""
    draw = random.Random(seed)
    optimizer = OPTIMIZERS[name](parameters, draw)
    schedule = CyclicLR(
        optimizer,
        base_lr=0.005,
        max_lr=0.05,
        step_size_up=draw.choice([1, 2, 4]),
        step_size_down=draw.choice([1, 3]),
        mode=draw.choice(["triangular", "triangular2", "exp_range"]),
        gamma=0.9,
        cycle_momentum=name != "Rprop",  # it has none
    )
    return optimizer, schedule


def moment(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0]
    return float(group.get("momentum", group.get("betas", (0.0,))[0]))


Path = tuple[list[Tensor], list[Tensor], list[float]]


def alone(name: str, seed: int, parts: tuple[int, ...]) -> Path:
    """Parameters at each step, what the optimizer keeps at the end, and the momentum at each step."""
    net = model()
    optimizer, schedule = prepared(name, seed, list(net.parameters()))
    path, moments = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        y = net(batch(100 * seed + step, sum(parts)))
        loss_of(y, y, 0).backward()
        optimizer.step()
        schedule.step()
        path.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        moments.append(moment(optimizer))
    states = [optimizer.state[p] for p in net.parameters()]
    kept = [
        torch.cat([state[key].flatten() for state in states]) for key in states[0] if states[0][key].dim()
    ]
    return path, kept, moments


def on_ranks(name: str, seed: int, parts: tuple[int, ...], how: str) -> Path:
    """The same on a rank that has some of the rows, and all parameters or its slice of them."""
    net, axis = model(), gm.axis()
    named = dict(net.named_parameters())
    sizes = [p.numel() for p in named.values()]
    flat = torch.cat([p.detach().flatten() for p in named.values()])
    own = (gm.shard(flat) if how == "sharded" else flat.clone()).requires_grad_()
    shares = gm.sizes(own) if how == "sharded" else None

    def whole(x: Tensor) -> Tensor:
        return x.detach().clone() if shares is None else gm.all_gather(x.detach(), sizes=shares)

    optimizer, schedule = prepared(name, seed, [own])
    path, moments = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        if shares is not None:
            everything = gm.all_gather(own, sizes=shares)
        else:
            everything = own if how == "unsummed" else gm.replicate(own)
        made = {n: part.view_as(named[n]) for n, part in zip(named, everything.split(sizes), strict=True)}
        rows = batch(100 * seed + step, sum(parts))[axis.slice(parts)]
        y = torch.func.functional_call(net, made, (rows,))
        loss = loss_of(y, gm.all_gather(y, sizes=parts), sum(parts[: axis.rank]))
        if how == "averaged":  # what a wrapper does after backward
            loss = loss / axis.size
        loss.backward()
        optimizer.step()
        schedule.step()
        path.append(whole(own))
        moments.append(moment(optimizer))
    kept = optimizer.state[own]
    return path, [whole(kept[key]) for key in kept if kept[key].dim()], moments


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def parts_of(seed: int) -> tuple[int, ...]:
    """Uneven rows of 1 to 4 ranks, one of which may have none."""
    draw = random.Random(seed)
    parts = [draw.choice([0, 1, 3, 4]) for _ in range(draw.choice([1, 2, 3, 4]))]
    return tuple(parts) if sum(parts) > 2 else (*parts[1:], 3)


@pytest.mark.parametrize("how", ["replicated", "sharded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_take_the_steps_of_one_process(name: str, how: str, threads: Threads) -> None:
    """Parameters at every step, all that the optimizer keeps, and the momentum as it cycles."""
    for seed in range(4):
        parts = parts_of(seed)
        path, kept, moments = alone(name, seed, parts)
        assert kept
        assert name == "Rprop" or len(set(moments)) > 1
        for found, held, reported in threads(len(parts))(on_ranks, name, seed, parts, how):
            assert apart(found, path) < 1e-11, (seed, parts)
            assert apart(held, kept) < 1e-11, (seed, parts)
            assert reported == moments


@pytest.mark.processes
def test_sharded_rprop_on_processes(processes: Threads) -> None:
    path, kept, _ = alone("Rprop", 1, (3, 4))
    for found, held, _ in processes(2)(on_ranks, "Rprop", 1, (3, 4), "sharded"):
        assert apart(found, path) < 1e-11
        assert apart(held, kept) < 1e-11


def test_rprop_does_not_see_a_factor_and_does_see_a_missing_sum(threads: Threads) -> None:
    """Signs of a mean are those of the sum; signs of one rank's share are not, and the copies drift apart."""
    path, _, _ = alone("Rprop", 0, (3, 4))
    averaged = [found[0] for found in threads(2)(on_ranks, "Rprop", 0, (3, 4), "averaged")]
    assert max(apart(each, path) for each in averaged) < 1e-11
    one, other = (found[0] for found in threads(2)(on_ranks, "Rprop", 0, (3, 4), "unsummed"))
    assert apart(one, path) > 1e-3
    assert apart(one, other) > 1e-3
    plain, _, _ = alone("SGD", 0, (3, 4))
    for found, _, _ in threads(2)(on_ranks, "SGD", 0, (3, 4), "averaged"):
        assert apart(found, plain) > 1e-3


# ---- Complex numbers -------------------------------------------------------------------------------------------------


def test_a_gradient_without_its_conjugate_is_seen_over_the_registry(threads: Threads) -> None:
    """Every op has passed this check in test_laws; here it can fail."""

    class Conjugates(AllGather):
        """A gather whose backward conjugates, which no real value shows."""

        @property
        def adjoint(self) -> Any:
            right = super().adjoint
            made = type(
                "Back",
                (type(right),),
                {"transfer": lambda self, g, wire: right.transfer(g, wire).conj().resolve_conj()},
            )
            return made(right.axis, 0, EQUAL)

    def on_each_rank() -> bool:
        op = Conjugates(gm.axis(), 0, EQUAL)
        contract.matches_dense_autograd_to_third_order(op, (2, 3))
        try:
            contract.has_conjugate_wirtinger_gradients_to_third_order(op, (2, 3))
        except AssertionError:
            return True
        return False

    assert threads(2)(on_each_rank) == [True, True]


def powers(z: Tensor) -> Tensor:
    """Real, and no part of an analytic function."""
    return (z * z.conj().roll(1) * (1 + 2j) + z.sin() * z.conj()).real.sum()


def test_products_and_exchanges_of_complex_numbers(threads: Threads) -> None:
    """Collectives that are not linear ops of the registry."""

    def data(rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(rank)
        return torch.randn(2, dtype=torch.complex128, generator=draw)

    def on_each_rank() -> list[Tensor]:
        rank, found = gm.rank(), []
        verbs: list[Callable[[Tensor], Tensor]] = [
            lambda z: gm.all_reduce(z, op="prod", dst=gm.R),
            lambda z: torch.cat(gm.exchange([z * (1 + r) for r in range(2)])),
            lambda z: torch.cat([*gm.all_gather((z, 1j * z))]),
        ]
        for verb in verbs:
            z = data(rank).requires_grad_()
            ((1 + rank) * powers(verb(z))).backward()
            assert z.grad is not None
            found.append(z.grad)
        return found

    def dense(zs: list[Tensor], number: int, rank: int) -> Tensor:
        if number == 0:
            return zs[0] * zs[1]
        if number == 1:
            return torch.cat([z * (1 + rank) for z in zs])
        return torch.cat([*zs, *(1j * z for z in zs)])

    for number in range(3):
        zs = [data(rank).requires_grad_() for rank in range(2)]
        torch.stack([(1 + r) * powers(dense(zs, number, r)) for r in range(2)]).sum().backward()
        for z, found in zip(zs, threads(2)(on_each_rank), strict=True):
            assert z.grad is not None
            torch.testing.assert_close(found[number], z.grad, rtol=1e-12, atol=1e-12)
