"""Experts over ranks: what each token gets, and every derivative, are those of one process that has all experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm
from gradmesh.axis import balanced

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
    """

    seed: int
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    k: int
    normalize: bool = True
    balance: float = 0.0
    hot: bool = False
    idle: int = -1


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
        tokens if sum(tokens) else (*tokens[1:], 2),
        experts,
        draw.randint(1, min(3, total)),
        draw.random() < 0.5,
        draw.choice([0.0, 0.5]),
        draw.random() < 0.3,
        draw.choice([-1, -1, draw.randrange(ranks)]),
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
    every = torch.stack([torch.tanh(expert(x)) for expert in model.experts], 1)
    y = (every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(1)
    counts = [(1.0 + rank) * (rank != program.idle) for rank in range(len(program.tokens))]
    each = torch.cat([torch.full((n, 1), c) for n, c in zip(program.tokens, counts, strict=True)])
    loss = (each * y**3).sum()
    if program.balance:
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
        lambda number: nn.Sequential(dense.experts[number], nn.Tanh()),
        program.experts,
        program.k,
        normalize=program.normalize,
    )
    rows, own = axis.slice(program.tokens), axis.slice(program.experts)
    x = _tokens(program)[rows].requires_grad_()
    with gm.ordered():
        scores = layer.router(x)
        y = layer.routed(x, scores)
        loss = y.sum() * 0 if axis.rank == program.idle else (1 + axis.rank) * (y**3).sum()
        told = gm.all_reduce(loss.detach(), dst=gm.I)
        if program.balance:
            # The same on every rank, and counts once by itself.
            balance = program.balance * gm.nn.balance_loss(scores, scores.topk(program.k).indices) ** 2
            loss, told = loss + balance, told + balance.detach()
        leaves = [x, *layer.parameters()]
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        first = gm.grad(loss, leaves, create_graph=True, **options)
        second = gm.grad(torch.stack([(slope**2).sum() for slope in first]).sum(), leaves, **options)
    far = [float((told.detach() - value).abs())]
    for got, (by_x, weight, bias, *experts) in zip((first, second), right, strict=True):
        expected = [by_x[rows], weight, bias, *experts[2 * own.start : 2 * own.stop]]
        far += [float((a.detach() - b).abs().max()) for a, b in zip(got, expected, strict=True) if b.numel()]
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

    assert not gm.verify.audit(build).findings


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
    "an expert that is none": (lambda: gm.nn.ExpertDispatch(torch.tensor([[4]]), 4), "that there are not"),
    "choices without a dim": (lambda: gm.nn.ExpertDispatch(torch.tensor([0]), 4), "k experts for each token"),
    "choices that are no numbers": (
        lambda: gm.nn.ExpertDispatch(torch.ones(2, 1), 4),
        "k experts for each token",
    ),
    "no experts": (lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 0), "not dealt"),
    "experts of other ranks": (lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), (1, 1, 1)), "not dealt"),
    "more choices than experts": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Identity(), 2, k=3),
        "k is no number",
    ),
    "other tokens": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 2).send(torch.ones(2, 1)),
        "one row for each token",
    ),
    "other rows": (
        lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), 2).combine(torch.ones(5, 1), torch.ones(1, 1)),
        "one row for each one sent",
    ),
    "experts that are no number": (lambda: gm.nn.ExpertDispatch(torch.tensor([[0]]), "ab"), "not dealt"),  # type: ignore[arg-type]
    "experts of a layer that are not dealt": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Identity(), (3, -1), 1),
        "not dealt",
    ),
    "a router of other experts": (
        lambda: gm.nn.ExpertParallel(nn.Linear(1, 1), lambda _: nn.Identity(), 2, 2)(torch.ones(1, 1)),
        "one score for each expert",
    ),
    "a balance of experts that there are not": (
        lambda: gm.nn.balance_loss(torch.ones(1, 3), torch.tensor([[4]])),
        "that there are not",
    ),
    "a balance of negative experts": (
        lambda: gm.nn.balance_loss(torch.ones(1, 3), torch.tensor([[-1]])),
        "that there are not",
    ),
    "a balance of choices that are no numbers": (
        lambda: gm.nn.balance_loss(torch.ones(1, 3), torch.ones(1, 1)),
        "as int64",
    ),
    "a layer of experts that is replicated": (
        lambda: gm.nn.Replicated(gm.nn.ExpertParallel(nn.Linear(1, 2), lambda _: nn.Linear(1, 1), 2, 1)),
        "its own way over these ranks",
    ),
    "scores of other tokens": (
        lambda: gm.nn.balance_loss(torch.ones(2, 3), torch.tensor([[0]])),
        "of the same tokens",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_right_is_refused_on_every_rank(threads: Threads, what: str) -> None:
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
