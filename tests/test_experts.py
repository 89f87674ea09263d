"""Experts over ranks: what each token gets, and every derivative, are those of one process that has all experts."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm
from gradmesh.ops.sizes import balanced

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]
WIDTH = 3


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: of the values.
        tokens: how many each rank has.
        experts: how many each rank has.
        k: how many work on each token.
        normalize: whether their weights have the sum 1.
        balance: the weight of the balance loss.
        hot: whether the router likes one expert far more than the others.
        idle: a rank whose loss leaves its tokens out; -1: there is none.
        ordered: whether it runs inside `gm.ordered()`.
        capacity: the capacity factor; None: nothing is dropped.
        batched: whether tokens have two dims.
        constant: an expert whose results do not depend on its rows; -1: there is none.
    """

    seed: int
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    k: int
    normalize: bool = True
    balance: float = 0.0
    hot: bool = False
    idle: int = -1
    ordered: bool = True
    capacity: float | None = None
    batched: bool = False
    constant: int = -1


def random_program(seed: int) -> tuple[int, Program]:
    """How many ranks, and a program for them."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4])
    total = draw.choice([1, 2, 5, 8])
    experts = balanced(total, ranks)
    if draw.random() < 0.3:
        cuts = sorted(draw.randrange(total + 1) for _ in range(ranks - 1))
        experts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    tokens = tuple(draw.choice([0, 1, 3, 6]) for _ in range(ranks))
    return ranks, Program(
        seed,
        tokens if sum(tokens) or draw.random() < 0.2 else (*tokens[1:], 2),
        experts,
        draw.randint(1, min(3, total)),
        draw.random() < 0.5,
        draw.choice([0.0, 0.5]),
        draw.random() < 0.3,
        draw.choice([-1, -1, draw.randrange(ranks)]),
        draw.random() < 0.5,
        draw.choice([None, None, 0.25, 0.5, 1.0, 1.5]),
        draw.random() < 0.3,
        draw.choice([-1, -1, draw.randrange(total)]),
    )


class Dense(nn.Module):
    """All experts on one process."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        total = sum(program.experts)
        self.router = nn.Linear(WIDTH, total, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(total))
        draw = torch.Generator().manual_seed(program.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
            if program.hot:
                self.router.bias[-1] += 20


class Expert(nn.Module):
    """A linear layer and an activation, or, as the constant expert, its bias for each row."""

    def __init__(self, linear: nn.Linear, *, constant: bool) -> None:
        super().__init__()
        self.linear, self.constant = linear, constant

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return torch.tanh(self.linear.bias.expand(len(x), -1) if self.constant else self.linear(x))


def _accepted(chosen: Tensor, experts: int, factor: float | None) -> Tensor:
    """Which (token, expert) pairs are within the capacity, one by one: first choices first, then tokens in order."""
    if factor is None:
        return torch.ones_like(chosen, dtype=torch.bool)
    capacity = math.ceil(factor * chosen.numel() / experts)
    accepted, filled = torch.zeros_like(chosen, dtype=torch.bool), [0] * experts
    for j in range(chosen.shape[1]):
        for token, expert in enumerate(chosen[:, j].tolist()):
            accepted[token, j] = filled[expert] < capacity
            filled[expert] += 1
    return accepted


def _tokens(program: Program) -> Tensor:
    draw = torch.Generator().manual_seed(program.seed + 1)
    return torch.randn(sum(program.tokens), WIDTH, generator=draw, dtype=torch.float64)


def _dense(program: Program) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The objective, and the first and second slopes by the tokens and by each parameter."""
    model, x = Dense(program), _tokens(program).requires_grad_()
    scores = model.router(x)
    weights, chosen = scores.softmax(-1).topk(program.k)
    if program.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * _accepted(chosen, len(model.experts), program.capacity)
    each_expert = enumerate(model.experts)
    every = torch.stack([Expert(e, constant=n == program.constant)(x) for n, e in each_expert], 1)  # type: ignore[arg-type]
    y = (every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(1)
    counts = [(1.0 + rank) * (rank != program.idle) for rank in range(len(program.tokens))]
    each = torch.cat([torch.full((n, 1), c) for n, c in zip(program.tokens, counts, strict=True)])
    loss = (each * y**3).sum()
    if program.balance and len(x):
        total = len(model.experts)
        share = torch.bincount(chosen.reshape(-1), minlength=total).double() / chosen.numel()
        loss = loss + program.balance * (total * (share * scores.softmax(-1).mean(0)).sum()) ** 2
    leaves = [x, *model.parameters()]
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, leaves, create_graph=True, **options)
    second = torch.autograd.grad(torch.stack([(slope**2).sum() for slope in first]).sum(), leaves, **options)
    return loss.detach(), [slope.detach() for slope in first], list(second)


def deviation(program: Program) -> float:
    """How far a rank's parts are from those of one process."""
    value, *right = _dense(program)
    dense, axis = Dense(program), gm.axis()
    layer = gm.nn.ExpertParallel(
        gm.nn.Replicated(dense.router),
        lambda number: Expert(dense.experts[number], constant=number == program.constant),  # type: ignore[arg-type]
        program.experts,
        program.k,
        normalize=program.normalize,
        capacity_factor=program.capacity,
    )
    rows, own = axis.slice(program.tokens), axis.slice(program.experts)
    x = _tokens(program)[rows].requires_grad_()
    tokens = x.view(-1, 3 if len(x) % 3 == 0 else 1, WIDTH) if program.batched else x
    with gm.ordered() if program.ordered else contextlib.nullcontext():
        scores = layer.router(tokens)
        y = layer.routed(tokens, scores)
        assert y.shape == tokens.shape
        loss = y.sum() * 0 if axis.rank == program.idle else (1 + axis.rank) * (y**3).sum()
        reduced = gm.all_reduce(loss.detach(), dst=gm.I)
        if program.balance:
            # The same on every rank, and counts once by itself.
            balance = program.balance * gm.nn.balance_loss(scores, scores.topk(program.k).indices) ** 2
            loss, reduced = loss + balance, reduced + balance.detach()
        leaves = [x, *layer.parameters()]
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        grad = gm.grad if program.ordered else torch.autograd.grad
        first = grad(loss, leaves, create_graph=True, **options)
        second = grad(torch.stack([(slope**2).sum() for slope in first]).sum(), leaves, **options)
    far = [float((reduced.detach() - value).abs())]
    for got, (by_x, weight, bias, *experts) in zip((first, second), right, strict=True):
        expected = [by_x[rows], weight, bias, *experts[2 * own.start : 2 * own.stop]]
        far += [float((a - b).detach().abs().max()) for a, b in zip(got, expected, strict=True) if b.numel()]
    return max(far)


@pytest.mark.parametrize("seed", range(20))
def test_random_layers_have_the_value_and_both_derivatives_of_one_process(
    threads: Threads, seed: int
) -> None:
    ranks, program = random_program(seed)
    assert max(threads(ranks)(deviation, program)) < 1e-9


@pytest.mark.slow
def test_many_random_layers_have_the_value_and_both_derivatives_of_one_process(threads: Threads) -> None:
    for seed in range(100, 900):
        ranks, program = random_program(seed)
        assert max(threads(ranks)(deviation, program)) < 1e-9, program


@pytest.mark.processes
def test_a_layer_on_processes_is_that_of_one_process(processes: Callable[[int], Run]) -> None:
    assert max(processes(2)(deviation, Program(3, (4, 1), (1, 2), 2, balance=0.3))) < 1e-9


def test_an_audit_finds_nothing_on_the_way_there_and_back() -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        chosen = torch.tensor([[0, 2], [2, 1], [2, 0]])[: 2 + gm.rank()]
        plan = gm.nn.ExpertDispatch(chosen, 3)
        weights = torch.linspace(0.5, 1.5, chosen.numel(), dtype=torch.float64).view_as(chosen)

        def there_and_back(x: Tensor) -> Tensor:
            return plan.combine(plan.send(x), weights)

        return there_and_back, torch.ones(len(chosen), 2, dtype=torch.float64, requires_grad=True)

    assert not gm.verify.audit(build, world_size=2).findings


def test_gradcheck_passes_for_the_balance_loss_which_is_over_all_ranks() -> None:
    def inputs(rank: int) -> tuple[Tensor]:
        return (torch.randn(2 + rank, 4, generator=torch.Generator().manual_seed(rank)),)

    def loss(scores: Tensor) -> Tensor:
        return gm.nn.balance_loss(scores, scores.topk(2).indices)

    assert gm.verify.gradcheck(loss, inputs, world_size=3, objective="replicated", order=2, forward=True)


def test_rows_come_in_the_order_of_ranks_and_tokens(threads: Threads) -> None:
    def order() -> tuple[list[float], list[int]]:
        plan = gm.nn.ExpertDispatch(torch.tensor([[1], [0], [1]]), 2)
        return plan.send(10.0 * gm.rank() + torch.arange(3.0)).tolist(), plan.counts

    assert threads(2)(order) == [([1.0, 11.0], [2]), ([0.0, 2.0, 10.0, 12.0], [4])]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "an expert that is none": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[4]]), 4),
        "an expert index in chosen is out of range",
    ),
    "choices without a dim": (lambda: gm.nn.ExpertDispatch(torch.tensor([0]), 4), "k experts for each token"),
    "non-numeric choices": (
        lambda: gm.nn.ExpertDispatch(torch.ones(2, 1), 4),
        "k experts for each token",
    ),
    "no experts": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 0),
        "experts cannot be distributed over the ranks",
    ),
    "experts of other ranks": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), (1, 1, 1)),
        "experts cannot be distributed over the ranks",
    ),
    "more choices than experts": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Identity(), 2, k=3),
        "k is out of range",
    ),
    "other tokens": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 2).send(torch.ones(2, 1)),
        "the number of rows is not the number of tokens",
    ),
    "other rows": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 2).combine(torch.ones(5, 1), torch.ones(1, 1)),
        "not the number of rows that send",
    ),
    "non-numeric experts": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), "ab"),  # type: ignore[arg-type]
        "experts cannot be distributed over the ranks",
    ),
    "experts of a layer that are not dealt": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Identity(), (3, -1), 1),
        "experts cannot be distributed over the ranks",
    ),
    "a router of other experts": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 1), lambda _: nn.Identity(), 2, 2)(torch.ones(1, 1)),
        "one score for each of 2 experts",
    ),
    "a balance of experts that there are not": (
        lambda: gm.nn.balance_loss(torch.ones(1, 3), torch.tensor([[4]])),
        "an expert index in chosen is out of range",
    ),
    "a balance of negative experts": (
        lambda: gm.nn.balance_loss(torch.ones(1, 3), torch.tensor([[-1]])),
        "an expert index in chosen is out of range",
    ),
    "a balance of non-numeric choices": (
        lambda: gm.nn.balance_loss(torch.ones(1, 3), torch.ones(1, 1)),
        "as int64",
    ),
    "a layer of experts that is replicated": (
        lambda: gm.nn.Replicated(gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Linear(1, 1), 2, 1)),
        "already sharded or replicated over this axis",
    ),
    "a capacity below 0": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 2, capacity_factor=-1.0),
        "capacity_factor is not a positive number",
    ),
    "a non-numeric capacity of a layer": (
        lambda: gm.nn.ExpertParallel(
            nn.Linear(1, 2), lambda _: nn.Identity(), 2, 1, capacity_factor=float("nan")
        ),
        "capacity_factor is not a positive number",
    ),
    "scores of a layer's other tokens": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Identity(), 2, 1).routed(
            torch.ones(2, 3, 1), torch.ones(2, 2, 2)
        ),
        "each token of x [2, 3, 1]",
    ),
    "scores of other tokens": (
        lambda: gm.nn.balance_loss(torch.ones(2, 3), torch.tensor([[0]])),
        "of the same tokens",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_raise_on_every_rank(threads: Threads, what: str) -> None:
    fn, words = WRONG[what]

    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            fn()
        return str(error.value)

    for text in threads(2)(refused):
        assert words in text


def test_under_autocast_a_rank_without_experts_takes_part(threads: Threads) -> None:
    def found() -> tuple[tuple[int, ...], float]:
        layer: Any = gm.nn.ExpertParallel(
            gm.nn.Replicated(nn.Linear(3, 4)), lambda _: nn.Linear(3, 3, bias=False), (0, 4), 2
        )
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.ones(2, 3))
        y.float().sum().backward()
        slopes = [
            each.weight.grad.sum().item() for each in layer.experts.values() if each.weight.grad is not None
        ]
        return tuple(y.shape), sum(slopes)

    # Each of the 4 tokens counts once, in 9 elements, over its experts.
    for (shape, slope), right in zip(threads(2)(found), (0.0, 36.0), strict=True):
        assert shape == (2, 3)
        assert slope == pytest.approx(right, rel=2e-2)


def test_ranks_may_choose_different_numbers_of_experts(threads: Threads) -> None:
    def found() -> float:
        chosen = torch.tensor([[0], [1]]) if gm.rank() else torch.tensor([[0, 1], [1, 2]])
        return gm.nn.balance_loss(torch.zeros(2, 3), chosen).item()

    assert threads(2)(found) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("tokens", [(2, 2, 2), (6, 0, 0), (0, 1, 5)])
def test_a_rank_without_experts_takes_part_in_every_derivative_by_the_tokens(
    threads: Threads, tokens: tuple[int, ...], ordered: bool, k: int
) -> None:
    program = Program(5, tokens, (1, 1, 0), k, ordered=ordered)
    assert max(threads(3)(deviation, program)) < 1e-9


def test_first_gradients_by_the_tokens_of_more_ranks_than_experts(threads: Threads) -> None:
    def slopes() -> tuple[list[float], float]:
        torch.manual_seed(0)
        router, expert = nn.Linear(3, 2), nn.Linear(3, 3)
        layer = gm.nn.ExpertParallel(gm.nn.Replicated(router), lambda _: expert, 2, 1)
        x = torch.ones(2, 3, requires_grad=True)
        ((1 + gm.rank()) * layer(x).square().sum()).backward()
        right = torch.ones(2, 3, requires_grad=True)
        ((1 + gm.rank()) * expert(right).square().sum()).backward()
        assert x.grad is not None
        assert right.grad is not None
        return (x.grad - right.grad).abs().flatten().tolist(), float(right.grad.abs().sum())

    for apart, size in threads(3)(slopes):
        assert max(apart) < 1e-6
        assert size > 0.1


def test_dropped_tokens_do_not_depend_on_the_number_of_ranks(threads: Threads) -> None:
    chosen = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1], [2, 0], [0, 1]])
    # ceil(1.0 * 12 / 3) = 4 rows for each expert: expert 0 has 4 first choices, so that no second choice is accepted.
    right = [[True, True], [True, True], [True, False], [True, True], [True, False], [True, True]]

    def found(sizes: tuple[int, ...]) -> tuple[list[list[bool]], list[int]]:
        plan = gm.nn.ExpertDispatch(chosen[gm.axis().slice(sizes)], 3, capacity_factor=1.0)
        return plan.kept.tolist(), plan.counts

    for sizes in ((6,), (3, 3), (1, 5), (2, 0, 4), (0, 2, 2, 2)):
        results = threads(len(sizes))(found, sizes)
        assert [row for kept, _ in results for row in kept] == right
        assert [n for _, counts in results for n in counts] == [4, 4, 2]


def test_tokens_over_the_capacity_get_zeros_and_no_gradient(threads: Threads) -> None:
    def found() -> tuple[list[list[float]], list[list[float]]]:
        router = nn.Linear(1, 2)
        nn.init.zeros_(router.weight)
        nn.init.constant_(router.bias, 0.0)
        with torch.no_grad():
            router.bias[0] = 1.0  # every token chooses expert 0
        layer = gm.nn.ExpertParallel(
            gm.nn.Replicated(router), lambda _: nn.Identity(), 2, 1, capacity_factor=1.0
        )
        x = torch.tensor([[1.0], [2.0]], requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert x.grad is not None
        return y.tolist(), x.grad.tolist()

    # 4 tokens and 2 experts: expert 0 accepts the first 2 of all ranks' tokens, which are rank 0's.
    ones, zeros = [[1.0], [1.0]], [[0.0], [0.0]]
    assert threads(2)(found) == [([[1.0], [2.0]], ones), (zeros, zeros)]


def test_the_balance_loss_without_tokens_on_any_rank_is_zero_with_zero_gradients(threads: Threads) -> None:
    def found() -> tuple[float, float]:
        bias = torch.zeros(3, requires_grad=True)
        scores = torch.zeros(0, 3) + bias
        loss = gm.nn.balance_loss(scores, scores.topk(2).indices)
        loss.backward()
        assert bias.grad is not None
        return loss.item(), float(bias.grad.abs().sum())

    assert threads(2)(found) == [(0.0, 0.0)] * 2
