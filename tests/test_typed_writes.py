"""Writes in place and through views, and numbers made of pending sums: right and wrong programs for `gm.typed`."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]


@pytest.fixture(autouse=True)
def _found_is_looked_at_and_not_raised() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.CheckWarning)
        yield


PROGRAMS: dict[str, tuple[Callable[[], None], set[str]]] = {}


def program(*findings: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A program, with the kinds of findings that it has to have, and no others."""

    def noted(run: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[run.__name__] = (run, {*findings})
        return run

    return noted


def same(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def own(*shape: int, seed: int = 0) -> Tensor:
    return same(*shape, seed=100 * (1 + gm.rank()) + seed)


def partial(*shape: int, seed: int = 0) -> Tensor:
    return gm.assert_type(own(*shape, seed=seed), gm.P)


def summed(x: Tensor) -> Tensor:
    return gm.all_reduce(x, dst=gm.I)


@program("counts-many-times")
def wrong_setitem_row() -> None:
    y = partial(4, 3)
    y[1:3] = same(3)
    summed(y)


@program("counts-many-times")
def wrong_diag_add() -> None:
    y = partial(4, 4)
    y.diagonal().add_(1e-3)
    summed(y)


@program()
def right_diag_zero() -> None:
    y = partial(4, 4)
    y.diagonal().zero_()
    summed(y)


@program("counts-many-times")
def wrong_transposed_view() -> None:
    y = partial(4, 3)
    y.T[0].copy_(same(4))
    summed(y)


@program()
def right_cols_from_partial() -> None:
    y = partial(4, 3)
    z = partial(4, 3, seed=1)
    y[:, 1] = z[:, 0] * 2
    summed(y)


@program("counts-many-times")
def wrong_data() -> None:
    y = partial(4)
    y.data[0] = 3.0
    summed(y)


@program()
def right_data() -> None:
    y = partial(4)
    y.data.mul_(2)
    summed(y)


@program()
def right_fill_buffer() -> None:
    y = partial(2, 3)
    z = partial(2, 3, seed=2)
    out = torch.empty(4, 3)
    out[:2] = y
    out[2:] = z
    summed(out)


@program()
def right_reused_buffer() -> None:
    out = same(4, 3).clone()
    y = partial(2, 3)
    z = partial(2, 3, seed=2)
    out[:2] = y
    out[2:] = z
    summed(out)


@program("counts-many-times")
def wrong_buffer_half_replicated() -> None:
    y = partial(2, 3)
    out = torch.empty(4, 3)
    out[:2] = y
    out[2:] = same(2, 3)
    summed(out)


@program()
def right_view_of_the_partial_half() -> None:
    y = partial(2, 3)
    out = torch.empty(4, 3)
    out[:2] = y
    out[2:] = same(2, 3)
    summed(out[:2])


@program()
def right_overwritten_whole() -> None:
    y = partial(4)
    y.copy_(same(4))
    y.exp()


@program()
def right_scatter_zero() -> None:
    y = partial(4)
    y.scatter_(0, torch.tensor([1, 2]), 0.0)
    summed(y)


@program("counts-many-times")
def wrong_scatter_one() -> None:
    y = partial(4)
    y.scatter_(0, torch.tensor([1, 2]), 1.0)
    summed(y)


@program("counts-many-times")
def wrong_index_put() -> None:
    y = partial(4)
    y.index_put_((torch.tensor([1]),), same(1))
    summed(y)


@program()
def right_index_add_partial() -> None:
    acc = torch.zeros(4)
    acc.index_add_(0, torch.tensor([0, 0, 3]), partial(3))
    summed(acc)


@program()
def right_zero_accumulator() -> None:
    acc = torch.tensor([0.0, 0.0, 0.0, 0.0])
    acc += partial(4)
    acc[0] += partial(1)[0]
    summed(acc)


@program("counts-many-times")
def wrong_masked_fill() -> None:
    y = partial(4)
    y.masked_fill_(torch.tensor([True, False, True, False]), 1.0)
    summed(y)


@program()
def right_masked_fill0() -> None:
    y = partial(4)
    y.masked_fill_(torch.tensor([True, False, True, False]), 0.0)
    summed(y)


@program("nonlinear-on-partial")
def wrong_relu_view() -> None:
    y = partial(4)
    y[:2].relu_()
    summed(y)


@program("partial-read")
def wrong_item() -> None:
    partial(4).sum().item()


@program("partial-read")
def wrong_float_fmt() -> None:
    print(f"{partial(4).sum():.3f}")


@program("partial-read")
def wrong_tolist() -> None:
    partial(4).tolist()


@program("partial-read")
def wrong_numpy() -> None:
    partial(4).numpy()


@program("partial-read")
def wrong_if() -> None:
    y = partial(1)
    if y:
        pass


@program()
def right_item_after() -> None:
    summed(partial(4)).sum().item()


@program()
def right_print() -> None:
    y = partial(4)
    str(y)
    summed(y)


@program()
def right_where() -> None:
    m = torch.tensor([True, False, True, False])
    summed(torch.where(m, partial(4), 0.0)) + summed(torch.where(m, torch.zeros(()), partial(4)))


@program("partial-times-varying")
def wrong_where_own_mask() -> None:
    summed(torch.where(own(4) > 0, partial(4), 0.0))


@program("counts-many-times")
def wrong_where_one() -> None:
    summed(torch.where(torch.tensor([True, False, True, False]), partial(4), 1.0))


@program()
def right_addmm_beta0() -> None:
    b = same(3).requires_grad_()
    summed(torch.addmm(b, partial(2, 4), same(4, 3), beta=0))


@program("counts-many-times")
def wrong_addmm() -> None:
    b = same(3).requires_grad_()
    summed(torch.addmm(b, partial(2, 4), same(4, 3)))


@program()
def right_addmm_inplace() -> None:
    y = partial(2, 3)
    y.addmm_(partial(2, 4, seed=3), same(4, 3), alpha=0.5)
    summed(y)


@program("counts-many-times")
def wrong_addmm_inplace() -> None:
    y = partial(2, 3)
    y.addmm_(same(2, 4), same(4, 3, seed=1))
    summed(y)


@program("counts-many-times")
def wrong_out() -> None:
    y = partial(4)
    out = torch.empty(8)
    torch.add(y, y, out=out[:4])
    torch.add(same(4), 1, out=out[4:])
    summed(out)


@program()
def right_index_zero() -> None:
    y = partial(4)
    summed(y[torch.zeros(2, dtype=torch.long)])


@program()
def right_nothing_masked_then_wrong_type() -> None:
    y = partial(4)
    y = y.masked_fill(torch.zeros(4, dtype=torch.bool), 0.0)
    summed(y)


@program("counts-many-times")
def wrong_nothing_masked() -> None:
    y = partial(4)
    y = y.masked_fill(torch.zeros(4, dtype=torch.bool), 1.0)
    summed(y)


@program()
def right_interleaved() -> None:
    y = partial(8)
    e = y[::2]
    o = y[1::2]
    o.copy_(same(4))
    summed(e)


@program("counts-many-times")
def wrong_interleaved() -> None:
    y = partial(8)
    o = y[1::2]
    o.copy_(same(4))
    summed(y.view(2, 4))


@program()
def right_foreach_views() -> None:
    y = partial(8)
    torch._foreach_mul_([y[:4], y[4:]], 2.0)
    summed(y)


@program("counts-many-times")
def wrong_foreach_views() -> None:
    y = partial(8)
    torch._foreach_add_([y[:4], y[4:]], [same(4), same(4)])
    summed(y)


@program()
def right_unbind_write() -> None:
    y = partial(4, 3)
    for row in y.unbind(0):
        row.mul_(3)
    summed(y)


@program("counts-many-times")
def wrong_unbind_write() -> None:
    y = partial(4, 3)
    for i, row in enumerate(y.unbind(0)):
        row.sub_(same(3, seed=i))
    summed(y)


@program()
def right_grad_through_setitem() -> None:
    w = same(3, 2).requires_grad_()
    x = own(4, 3)
    y = gm.assert_type(x @ gm.replicate(w), gm.P)
    y = y.clone()
    y[0] = 0.0
    summed(y).square().sum().backward()


@program("counts-many-times")
def wrong_complex() -> None:
    y = gm.assert_type(torch.view_as_complex(own(4, 2)), gm.P)
    torch.view_as_real(y)[..., 0].add_(1.0)
    summed(y)


@program()
def right_swap_rows() -> None:
    y = partial(4, 3)
    t = y[0].clone()
    y[0] = y[1]
    y[1] = t
    summed(y)


@program()
def right_bias_once() -> None:
    y = partial(4, 3)
    b = gm.convert(same(3).requires_grad_(), src=gm.I, dst=gm.P)
    y[0] += b
    summed(y)


@program()
def right_mul_zero_slice() -> None:
    y = partial(4, 3)
    y[2:] *= 0
    summed(y)


@program("product-of-partials")
def wrong_mul_partial_slice() -> None:
    y = partial(4, 3)
    y[2:] *= partial(2, 3, seed=4)
    summed(y)


@program()
def right_lerp() -> None:
    y = partial(4)
    y.lerp_(partial(4, seed=1), 0.3)
    summed(y)


@program()
def right_lerp_weight0() -> None:
    y = partial(4)
    y.lerp_(same(4), 0.0)
    summed(y)


@program()
def right_lerp_weight1() -> None:
    y = partial(4)
    y.lerp_(same(4), 1.0)
    y.square()


@program("counts-many-times")
def wrong_lerp_weight_between() -> None:
    y = partial(4)
    y.lerp_(same(4), 0.3)
    summed(y)


@program()
def right_add_alpha0() -> None:
    y = partial(4)
    y.add_(same(4), alpha=0)
    summed(y)


@program()
def right_detached_copy_written() -> None:
    y = partial(4)
    c = y.clone()
    c[0] = 1.0
    summed(y)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_write_and_a_number_have_the_findings_that_are_due(name: str, threads: Ranks) -> None:
    run, wanted = PROGRAMS[name]

    def body() -> tuple[set[str], list[str]]:
        with gm.typed() as types:
            run()
        return {finding.kind for finding in types.findings}, types.notes

    assert threads(2)(body) == [(wanted, [])] * 2
    assert bool(wanted) == name.startswith("wrong")


def test_write_through_a_view_is_reported_with_its_line(threads: Ranks) -> None:
    def body() -> list[tuple[str, str, str, str]]:
        with gm.typed() as types:
            y = partial(4, 3) * 2
            y[1] = same(3)
            summed(y)
        return [
            (one.op, linecache.getline(one.file, one.line).strip(), one.types, one.took)
            for one in types.findings
        ]

    writes = threads(2)(body)
    assert writes == [[("aten.copy_", "y[1] = same(3)", "P[4, 3], R[3]", "")]] * 2


def test_a_parameter_that_was_written_and_whose_memory_was_freed_is_not_read(threads: Ranks) -> None:
    """As FSDP frees the gathered parameters after use."""

    def body() -> tuple[list[Any], list[str]]:
        with gm.typed() as types:
            weight = torch.nn.Parameter(torch.arange(1.0, 100.0))
            weight.detach()[:1] = 3.0
            weight.untyped_storage().resize_(0)
        return types.findings, types.notes

    assert threads(2)(body) == [([], [])] * 2
