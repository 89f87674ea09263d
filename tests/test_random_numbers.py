"""Ranks that are threads have a default random generator each, as ranks that are processes do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh._torch.threads import DRAWING


def drawn(seed: int) -> list[Tensor]:
    """Random tensors from every kind of call that draws without a generator, after seeding."""
    torch.manual_seed(seed)
    layer = nn.Linear(6, 6)
    half = torch.full((7,), 0.5)
    return [
        layer.weight.detach(),
        nn.functional.dropout(torch.ones(40)),
        nn.functional.rrelu(torch.linspace(-1, 1, 9), training=True),
        torch.randn(3),
        torch.rand_like(half),
        torch.randint(9, (4,)),
        torch.randperm(11),
        torch.normal(half, half),
        torch.normal(0.0, half),
        torch.multinomial(half, 3),
        torch.bernoulli(half),
        torch.poisson(9 * half),
        torch.distributions.Gamma(half, half).sample(),
        torch.distributions.Dirichlet(half).sample(),
        torch.distributions.Binomial(5, half).sample(),
        *(torch.empty(3).exponential_(), torch.empty(3).cauchy_(), torch.empty(3).log_normal_()),
        torch.empty(3).geometric_(0.5),
        torch.func.vmap(lambda x: x + torch.rand(2), randomness="different")(torch.zeros(3)),
    ]


def many(first: int) -> list[list[Tensor]]:
    return [drawn(seed) for seed in range(first, first + 20)]


def equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_ranks_with_equal_seeds_draw_equal_numbers() -> None:
    expected = many(0)
    for ranks in (gm.launch(many, 4, backend="threads", args=(0,)) for _ in range(3)):
        assert all(equal(of_rank, expected) for of_rank in ranks)


def test_rank_draws_equal_those_of_its_seed_on_one_process() -> None:
    ranks = gm.launch(lambda: many(100 * gm.rank()), 3, backend="threads")
    assert all(equal(of_rank, many(100 * rank)) for rank, of_rank in enumerate(ranks))


def test_ranks_that_do_not_seed_differ_and_the_launching_threads_seed_determines_them() -> None:
    def launched() -> list[float]:
        torch.manual_seed(5)
        first = gm.launch(lambda: torch.rand(()).item(), 3, backend="threads")
        return first + gm.launch(lambda: torch.rand(()).item(), 3, backend="threads")

    one, other = launched(), launched()
    assert one == other
    assert len(set(one)) == 6


def test_a_rank_leaves_the_generator_of_the_launching_thread_alone() -> None:
    torch.manual_seed(3)
    gm.launch(lambda: drawn(gm.rank()), 2, backend="threads")
    after = torch.rand(4)
    torch.manual_seed(3)
    gm.launch(lambda: None, 2, backend="threads")
    assert torch.equal(torch.rand(4), after)


def test_checkpoint_recomputes_with_the_random_numbers_of_its_rank() -> None:
    def on_each_rank() -> bool:
        torch.manual_seed(7 + gm.rank())
        x = torch.ones(50, requires_grad=True)
        masks: list[Tensor] = []

        def noisy(x: Tensor) -> Tensor:
            masks.append(torch.rand(50))
            return x * masks[-1]

        for reentrant in (False, True):
            checkpoint(noisy, x, use_reentrant=reentrant).sum().backward()
            torch.rand(gm.rank() + 1)
        return torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])

    assert all(gm.launch(on_each_rank, 3, backend="threads"))


def test_states_are_saved_and_restored_per_rank() -> None:
    def on_each_rank() -> bool:
        torch.manual_seed(gm.rank())
        state, seed = torch.get_rng_state(), torch.initial_seed()
        first = torch.rand(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
        second = torch.rand(3)
        torch.set_rng_state(state)
        return seed == gm.rank() and torch.equal(torch.rand(6), torch.cat([first, second]))

    assert all(gm.launch(on_each_rank, 3, backend="threads"))


def test_the_default_generator_of_torch_random_may_be_passed_on() -> None:
    def on_each_rank() -> float:
        torch.manual_seed(5)
        default: Any = torch.random.default_generator  # type: ignore[attr-defined]
        assert isinstance(default, torch.Generator)
        return torch.rand((), generator=default).item()

    expected = torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    assert gm.launch(on_each_rank, 3, backend="threads") == [expected] * 3
    assert on_each_rank() == expected


def test_every_operator_whose_cpu_kernel_takes_a_generator_is_listed() -> None:
    taking = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        draws = any("Generator" in str(argument.type) for argument in schema.arguments)
        if draws and name.startswith("aten::") and torch._C._dispatch_has_kernel(name):
            implicit = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") and not implicit:
                taking.add(name.removeprefix("aten::"))
    assert taking == set(DRAWING)


@pytest.mark.processes
def test_processes_draw_the_same_after_the_same_seed() -> None:
    assert all(equal([of_rank], [drawn(4)]) for of_rank in gm.launch(drawn, 2, backend="gloo", args=(4,)))
