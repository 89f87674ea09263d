"""The level "full": values that are declared the same, gradients that may be summed too often, what is not finite."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import gradmesh as gm
from gradmesh.transport.call_checks import checksum
from tests.seldom import seldom

Ranks = Callable[[int], Callable[..., list[Any]]]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def found(body: Callable[[int], object]) -> tuple[str, str]:
    """The error of a body at the level "full", and its warning.

    Warnings are errors here. On threads they are by the configuration of pytest: how they are caught is one for all.
    """
    own_process = dist.get_backend() != "threads"
    with warnings.catch_warnings() if own_process else contextlib.nullcontext():
        if own_process:
            warnings.simplefilter("error", gm.CheckWarning)
        try:
            with gm.check("full"):
                kept = body(gm.rank())  # noqa: F841  a parameter is looked at for as long as it lives
        except gm.MismatchError as problem:
            return str(problem), ""
        except gm.CheckWarning as warning:
            return "", str(warning)
    return "", ""


def declared_invariant(rank: int) -> None:
    """The ranks' losses differ, and so does the gradient that dst=I takes for the same."""
    y = gm.all_gather(leaf(3, seed=rank), dst=gm.I)
    ((1 + rank) * y**2).sum().backward()


def invariant(rank: int) -> None:
    (gm.all_gather(leaf(3, seed=rank), dst=gm.I) ** 2).sum().backward()


def summed(rank: int) -> None:
    """Every rank repeats one loss behind dst=R, so that the gradient is W times too large."""
    (gm.all_gather(leaf(3, seed=rank)) ** 2).sum().backward()


def terms(rank: int) -> None:
    ((1 + rank) * gm.all_gather(leaf(3, seed=rank)) ** 2).sum().backward()


def not_replicated(rank: int) -> None:
    gm.replicate(leaf(3, seed=rank))
    gm.all_gather(torch.ones(1))


def infinite(rank: int) -> None:
    gm.all_gather(torch.tensor([1.0, float("nan") if rank else 2.0]))


def swapped(rank: int) -> None:
    """Two calls of one kind and one shape change places on a rank, which nothing but their lines tells."""
    x, y = torch.ones(2), torch.zeros(2)
    if rank:
        gm.all_gather(x)
        gm.all_gather(y)
    else:
        gm.all_gather(y)
        gm.all_gather(x)


def summed_loss(rank: int) -> torch.Tensor:
    """Each rank's leaf has its own values."""
    x = leaf(3, seed=rank)
    gm.all_reduce((x**2).sum(), dst=gm.I).backward()
    return x


def missing_replicate(rank: int) -> torch.Tensor:
    """A parameter that is equal on every rank meets what differs."""
    w = leaf(3)
    (0.5 * gm.all_reduce(((1 + rank) * w**2).sum(), dst=gm.I)).backward()
    return w


def replicated(rank: int) -> torch.Tensor:
    w = leaf(3)
    gm.all_reduce(((1 + rank) * gm.replicate(w) ** 2).sum(), dst=gm.I).backward()
    return w


def summed_by_hand(rank: int) -> torch.Tensor:
    w = leaf(3)
    gm.all_reduce(((1 + rank) * w**2).sum(), dst=gm.I).backward()
    assert w.grad is not None
    w.grad = gm.all_reduce(w.grad, dst=gm.I)
    return w


def stepped(rank: int, *, replicates: bool) -> None:
    """The optimizer uses the gradients inside of the block, and then they are dropped."""
    w = leaf(3)
    optimizer = torch.optim.SGD([w], lr=0.1)
    gm.all_reduce(((1 + rank) * (gm.replicate(w) if replicates else w) ** 2).sum(), dst=gm.I).backward()
    optimizer.step()
    optimizer.zero_grad()


def shards_that_begin_alike(rank: int) -> list[torch.Tensor]:
    """Each rank has a shard of its own, whose initial values happen to be those of the others."""
    shards = [torch.zeros(3), torch.ones(3), torch.tensor(1.0)]
    for shard in shards:
        gm.all_reduce(((1 + rank) * shard.requires_grad_() + rank).pow(2).sum(), dst=gm.I).backward()
    return shards


def different_graphs(rank: int) -> list[torch.Tensor]:
    """The ranks have different numbers of parameters behind one loss."""
    w, own = leaf(3), [leaf(2, seed=seed) for seed in range(rank)]
    terms = [(gm.replicate(w) ** 2).sum(), *((x**2).sum() for x in own)]
    gm.all_reduce((1 + rank) * sum(terms, torch.zeros(())), dst=gm.I).backward()
    return [w, *own]


CASES: dict[str, tuple[Callable[[int], object], str, str]] = {
    "a gradient that differs behind dst=I": (declared_invariant, "dst=gm.R", ""),
    "a gradient that is the same behind dst=I": (invariant, "", ""),
    "a gradient that is the same behind dst=R": (summed, "", "dst=gm.I"),
    "a gradient that differs behind dst=R": (terms, "", ""),
    "a parameter that is not the same": (not_replicated, "checksum", ""),
    "calls that changed places": (swapped, "", "at different source lines"),
    "a value that is not finite": (infinite, "", "on rank 1"),
    "a summed loss": (summed_loss, "", ""),
    "a missing replicate": (missing_replicate, "", "(missing-sum)"),
    "a parameter that is replicated": (replicated, "", ""),
    "a gradient that is summed by hand": (summed_by_hand, "", ""),
    "a step with a missing replicate": (partial(stepped, replicates=False), "", "gm.replicate(parameter)"),
    "a step with replicate": (partial(stepped, replicates=True), "", ""),
    "shards that begin alike": (shards_that_begin_alike, "", ""),
    "a loss of different graphs": (different_graphs, "", ""),
}


def held(name: str, run: Callable[..., list[Any]]) -> None:
    body, error, warning = CASES[name]
    for text, warned in run(found, body):
        assert bool(text) == bool(error), text
        assert error in text
        assert bool(warned) == bool(warning), warned
        assert warning in warned
        assert not warned or "test_check_full.py" in warned
        if error:
            assert "rank 0: " in text
            assert "test_check_full.py" in text


@pytest.mark.parametrize("name", CASES)
def test_values_are_compared_as_they_are_declared(name: str, threads: Ranks) -> None:
    held(name, threads(2))


@pytest.mark.processes
@pytest.mark.parametrize("name", seldom(CASES, list(CASES)[::3]))
def test_between_processes_values_are_compared_as_they_are_declared(name: str, processes: Ranks) -> None:
    held(name, processes(2))


def afterwards() -> tuple[str, list[list[float]]]:
    """At the level of calls nothing is said of values; after an error the group goes on."""
    error, _ = found(declared_invariant)
    x = leaf(3, seed=gm.rank())
    ((1 + gm.rank()) * gm.all_gather(x, dst=gm.I) ** 2).sum().backward()
    return error, gm.all_gather(torch.tensor([1.0 + gm.rank()])).tolist()


def test_the_level_holds_inside_the_block_alone(threads: Ranks) -> None:
    for error, after in threads(2)(afterwards):
        assert error
        assert after == [1.0, 2.0]


def unchecked(rank: int) -> None:
    with gm.check(0):
        gm.replicate(torch.ones(2 + rank, requires_grad=True))


def test_a_level_of_nothing_compares_nothing(threads: Ranks) -> None:
    assert threads(2)(found, unchecked) == [("", ""), ("", "")]


@pytest.mark.parametrize("level", [2, "calls", None, True])
def test_another_level_is_refused(level: Any) -> None:
    with pytest.raises(gm.ArgumentError, match="invalid check level"), gm.check(level):
        pass


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2000), st.integers(0, 10_000), st.sampled_from([torch.float64, torch.float32, torch.int8])
)
def test_one_element_that_differs_or_moves_gives_another_number(
    size: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 100, (size,), generator=generator).to(dtype)
    place = seed % size
    y = x.clone()
    y[place] += 1
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(y)
    assert checksum(torch.cat([torch.zeros(1, dtype=dtype), x])[1:]) == checksum(x)
    if size > 1 and x[0] != x[1]:
        assert checksum(torch.cat([x[1:2], x[:1], x[2:]])) != checksum(x)
    assert checksum(torch.zeros(size, dtype=dtype)) == 0


def odd_tensors() -> list[list[int]]:
    """What has no elements, no memory, or no arithmetic."""
    with gm.check("full"):
        empty = torch.zeros(0, requires_grad=True)
        gm.all_gather(empty).sum().backward()
        halves = gm.all_gather(torch.ones(2, dtype=torch.complex32))
        return [list(gm.all_gather(empty).shape), list(halves.shape)]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_that_are_empty_or_cannot_be_added_are_looked_at_too(threads: Ranks) -> None:
    assert threads(2)(odd_tensors) == [[[0], [4]]] * 2
