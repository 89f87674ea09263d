"""Backward collectives are never taken for each other: a program is right, or refused on every rank.

`USES` is the table of docs/order.md, "What holds by itself, and what needs ordered()": a cell each.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]
T = torch.float64


@dataclass(frozen=True)
class Use:
    """How the ranks' losses use two outputs, `a` and `b`, that all of them have.

    Attributes:
        loss: this rank's loss; None: it has none.
        first: whether the gradient is right outside of `ordered()`; else it is refused.
        second: whether the gradient of a function of it is.
    """

    loss: Callable[[int, Tensor, Tensor], Tensor | None]
    first: bool
    second: bool


USES = {
    "every rank uses both": Use(lambda r, a, b: (a**3).sum() + (1 + r) * (b**3).sum(), True, True),
    "every rank uses both, in another order": Use(
        lambda r, a, b: (a**3).sum() + b.exp().sum() if r else b.exp().sum() + (a**3).sum(), True, True
    ),
    "each rank uses another one linearly": Use(
        lambda r, a, b: a.sum() + (b**3).sum() if r else (a**3).sum() + b.sum(), True, True
    ),
    "every rank uses both linearly": Use(lambda r, a, b: ((1 + r) * a).sum() + b.sum(), True, True),
    "each rank uses another one": Use(lambda r, a, b: (b**3).sum() if r else (a**3).sum(), False, False),
    "a rank leaves one out": Use(
        lambda r, a, b: (b**3).sum() if r else (a**3).sum() + (b**2).sum(), False, False
    ),
    "a rank has no loss": Use(lambda r, a, b: None if r else (2 + a.sum()) * (b**2).sum(), False, False),
}


def operand(rank: int) -> Tensor:
    return torch.tensor([0.5 + rank, 0.8], dtype=T, requires_grad=True)


def outputs(x: Tensor, rooted: bool = False) -> tuple[Tensor, Tensor]:
    if rooted:
        return gm.gather(x.sin(), root=1), gm.reduce(x**2, root=0)
    return gm.all_gather(x.sin()), gm.all_gather(x**2)


def dense(name: str, order: int, rooted: bool = False) -> list[list[float]]:
    """The gradients of all ranks, from the sum of the losses in one process."""
    xs = [operand(rank) for rank in range(2)]
    a, b = torch.cat([x.sin() for x in xs]), torch.cat([x**2 for x in xs])
    outputs = [(a, b)] * 2
    if rooted:  # what is gathered is on rank 1 alone, and the sum on rank 0
        total = xs[0] ** 2 + xs[1] ** 2
        outputs = [(a[:0], total), (a, 0 * total.detach())]
    losses = [USES[name].loss(rank, *outputs[rank]) for rank in range(2)]
    grads = torch.autograd.grad(sum(x for x in losses if x is not None), xs, create_graph=True)  # type: ignore[arg-type]
    if order == 2:
        grads = torch.autograd.grad(sum((g**3).sum() for g in grads), xs)  # type: ignore[arg-type]
    return [g.tolist() for g in grads]


def gradient(name: str, order: int, inside: bool, rooted: bool = False) -> object:
    """This rank's gradient, or what it raised."""
    x, rank = operand(gm.rank()), gm.rank()
    try:
        if inside:
            with gm.ordered():
                loss = USES[name].loss(rank, *outputs(x, rooted))
                if order == 1:
                    gm.backward(loss)
                else:
                    (first,) = gm.grad(loss, x, create_graph=True)
                    gm.backward((first**3).sum())
            assert x.grad is not None
            return x.grad.tolist()
        loss = USES[name].loss(rank, *outputs(x, rooted))
        grads: tuple[Tensor, ...] = (torch.zeros(()),)
        if loss is not None:
            grads = torch.autograd.grad(loss, x, create_graph=order == 2)
            if order == 2:
                grads = torch.autograd.grad((grads[0] ** 3).sum(), x)
        gm.barrier() if gm.axis().size == 1 else gm.all_gather(
            torch.zeros(1)
        )  # what a training step goes on with
        return grads[0].tolist()
    except gm.MismatchError as error:
        return str(error)


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", USES)
def test_inside_ordered_every_use_has_the_gradient_of_the_sum_of_the_losses(
    name: str, order: int, rooted: bool, threads: Ranks
) -> None:
    got, wanted = threads(2)(gradient, name, order, True, rooted), dense(name, order, rooted)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-11, atol=1e-11)


def held(name: str, order: int, run: Callable[..., list[Any]], rooted: bool = False) -> None:
    use = USES[name]
    got = run(gradient, name, order, False, rooted)
    if use.first if order == 1 else use.second:
        wanted = torch.tensor(dense(name, order, rooted))
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-11, atol=1e-11)
        return
    for text in got:
        assert isinstance(text, str), "a gradient came where the ranks' backward calls do not fit"
        assert "rank 0: " in text
        assert "rank 1: " in text
        assert "the backward of call" in text
        assert "test_pairing.py" in text
        assert "gradmesh.ordered()" in text


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", USES)
def test_outside_of_ordered_a_use_is_right_or_refused_on_every_rank(
    name: str, order: int, rooted: bool, threads: Ranks
) -> None:
    held(name, order, threads(2), rooted)


@pytest.mark.processes
@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("name", USES)
def test_between_processes_a_use_is_right_or_refused_on_every_rank(
    name: str, rooted: bool, processes: Ranks
) -> None:
    held(name, 1, processes(2), rooted)
    held(name, 2, processes(2), rooted)


# ---- who takes part


def frozen_on_one_rank(inside: bool) -> list[float]:
    """Only rank 1's operand requires grad; rank 0 uses the result as well."""
    rank = gm.rank()
    x = operand(rank).requires_grad_(rank == 1) if rank else operand(0).detach()
    with gm.ordered() if inside else torch.enable_grad():
        y = gm.all_gather(x)
        loss = ((1 + rank) * y**3).sum()
        gm.backward(loss) if inside else loss.backward()
    return [] if x.grad is None else x.grad.tolist()


@pytest.mark.parametrize("inside", [False, True])
def test_a_rank_whose_operand_requires_no_grad_takes_part_in_backward(inside: bool, threads: Ranks) -> None:
    got = threads(2)(frozen_on_one_rank, inside)
    assert got[0] == []
    assert got[1] == pytest.approx([9 * 1.5**2, 9 * 0.8**2])


@pytest.mark.processes
def test_between_processes_a_rank_whose_operand_requires_no_grad_takes_part_in_backward(
    processes: Ranks,
) -> None:
    got = processes(2)(frozen_on_one_rank, False)
    assert got[1] == pytest.approx([9 * 1.5**2, 9 * 0.8**2])


def second_order_frozen_on_one_rank(inside: bool) -> list[float]:
    """As before; rank 1 differentiates its gradient once more, and rank 0 the part that it has in that."""
    rank = gm.rank()
    x = operand(rank) if rank else operand(0).detach()
    w = torch.tensor(1.5, dtype=T, requires_grad=True)
    with gm.ordered() if inside else torch.enable_grad():
        y = gm.all_gather(x)
        loss = ((1 + rank) * w * y**3).sum()
        find = gm.grad if inside else torch.autograd.grad
        (first,) = find(loss, x if rank else w, create_graph=True)
        loss = (first**2).sum()
        gm.backward(loss) if inside else loss.backward()
    return [] if x.grad is None else x.grad.tolist()


def dense_second_order_frozen() -> list[float]:
    x, rest = operand(1), operand(0).detach()
    ws = [torch.tensor(1.5, dtype=T, requires_grad=True) for _ in range(2)]
    y = torch.cat([rest, x])
    losses = [((1 + rank) * ws[rank] * y**3).sum() for rank in range(2)]
    (of_w,) = torch.autograd.grad(losses[0], ws[0], create_graph=True)
    (of_x,) = torch.autograd.grad(losses[0] + losses[1], x, create_graph=True)
    (found,) = torch.autograd.grad((of_w**2).sum() + (of_x**2).sum(), x)
    return found.tolist()


def test_a_rank_whose_operand_requires_no_grad_takes_part_in_the_second_backward(threads: Ranks) -> None:
    assert threads(2)(second_order_frozen_on_one_rank, True)[1] == pytest.approx(dense_second_order_frozen())


def no_grad_on_one_rank(inside: bool) -> tuple[str, object]:
    x = operand(gm.rank())
    with (
        pytest.raises(gm.MismatchError, match="other ranks cannot") as caught,
        gm.ordered() if inside else torch.enable_grad(),
        torch.set_grad_enabled(gm.rank() == 1),
    ):
        gm.all_gather(x)
    return str(caught.value), gm.all_gather(torch.tensor([gm.rank()])).tolist()


@pytest.mark.parametrize("inside", [False, True])
def test_no_grad_on_one_rank_alone_is_refused_on_every_rank(inside: bool, threads: Ranks) -> None:
    for text, after in threads(2)(no_grad_on_one_rank, inside):
        assert "rank 0: under torch.no_grad()" in text
        assert "rank 1: its operand requires grad" in text
        assert after == [0, 1]


@pytest.mark.processes
def test_between_processes_no_grad_on_one_rank_alone_is_refused_on_every_rank(processes: Ranks) -> None:
    for text, _ in processes(2)(no_grad_on_one_rank, False):
        assert "rank 0: under torch.no_grad()" in text


def gathered_without_a_gradient() -> tuple[bool, bool]:
    with torch.no_grad():
        first = gm.all_gather(operand(gm.rank()))
    return first.requires_grad, gm.all_gather(torch.ones(2)).requires_grad


def test_result_requires_no_grad_if_no_rank_differentiates(threads: Ranks) -> None:
    assert threads(2)(gathered_without_a_gradient) == [(False, False)] * 2


def create_graph_on_one_rank() -> str:
    x = operand(gm.rank())
    y = gm.all_gather(x)
    with pytest.raises(gm.MismatchError) as caught:
        torch.autograd.grad((y**3).sum(), x, create_graph=gm.rank() == 1)
    return str(caught.value)


def test_a_graph_of_the_backward_on_one_rank_alone_is_refused_on_every_rank(threads: Ranks) -> None:
    for text in threads(2)(create_graph_on_one_rank):
        assert "other ranks cannot" in text


# ---- what sends nothing forward


def uses_another(rank: int) -> None:
    v, w = (torch.full((2,), 2.0, dtype=T, requires_grad=True) for _ in range(2))
    one, other = gm.replicate(v), gm.replicate(w)
    ((one if rank else other) ** 2).sum().backward()


def one_more(rank: int) -> None:
    if rank:
        gm.replicate(torch.ones(2, requires_grad=True))
    gm.all_gather(torch.ones(1))


def forward_alone(rank: int) -> None:
    gm.replicate(torch.ones((2, 3) if rank else (3, 2), requires_grad=True))
    gm.all_gather(torch.ones(1))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=T, requires_grad=True)


REPLICATED: dict[str, Callable[[int], object]] = {
    "shapes": lambda r: gm.replicate(ones(2, 3) if r else ones(3, 2)).sum().backward(),
    "another one": uses_another,
    "dims of shard": lambda r: gm.shard(ones(4, 4), dim=r).exp().sum().backward(),
    "sizes of shard": lambda r: gm.shard(ones(4 + 2 * r)).exp().sum().backward(),
    "forward": forward_alone,
    "one more": one_more,
}


def replicated(name: str) -> str:
    """Backward sums of values that were only relabelled in forward."""
    with pytest.raises(gm.MismatchError) as caught:
        REPLICATED[name](gm.rank())
    assert gm.all_gather(torch.tensor([gm.rank()])).tolist() == [0, 1]
    return str(caught.value)


@pytest.mark.parametrize("name", REPLICATED)
def test_local_call_is_compared_at_the_next_call_that_sends(name: str, threads: Ranks) -> None:
    for text in threads(2)(replicated, name):
        assert "rank 0: " in text
        assert "test_pairing.py" in text
        assert "replicate" in text or "shard" in text


@pytest.mark.processes
@pytest.mark.parametrize("name", REPLICATED)
def test_local_call_is_compared_between_processes(name: str, processes: Ranks) -> None:
    for text in processes(2)(replicated, name):
        assert "the ranks' calls do not match" in text


# ---- forward mode


def tangents(inside: bool, uses: str) -> object:
    rank, x = gm.rank(), operand(gm.rank())
    try:
        with gm.ordered() if inside else torch.enable_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(2, dtype=T))
            moved = [forward_ad.unpack_dual(y).tangent for y in outputs(dual)]
            used = moved[rank] if uses == "each another" else moved[0] if rank else None
            loss = None if used is None else (used**2).sum()
            if inside:
                gm.backward(loss)
            else:
                if loss is not None:
                    loss.backward()
                gm.all_gather(torch.zeros(1))
        return x.grad.tolist()  # type: ignore[union-attr]
    except gm.MismatchError as error:
        return str(error)


def dense_tangents(uses: str) -> list[list[float]]:
    xs = [operand(rank) for rank in range(2)]
    a, b = torch.cat([x.cos() for x in xs]), torch.cat([2 * x for x in xs])
    loss = (a**2).sum() + (b**2).sum() if uses == "each another" else (a**2).sum()
    return [g.tolist() for g in torch.autograd.grad(loss, xs)]


@pytest.mark.parametrize("uses", ["each another", "one none"])
def test_inside_ordered_the_collectives_of_tangents_are_links_too(uses: str, threads: Ranks) -> None:
    got = threads(2)(tangents, True, uses)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(dense_tangents(uses)), rtol=1e-11, atol=1e-11)


@pytest.mark.processes
def test_between_processes_the_collectives_of_tangents_are_links_too(processes: Ranks) -> None:
    got = processes(2)(tangents, True, "each another")
    torch.testing.assert_close(torch.tensor(got), torch.tensor(dense_tangents("each another")))


@pytest.mark.parametrize("uses", ["each another", "one none"])
def test_outside_of_ordered_tangents_that_ranks_use_differently_are_refused(
    uses: str, threads: Ranks
) -> None:
    for text in threads(2)(tangents, False, uses):
        assert "the backward of call" in text
        assert "the tangent of call" in text


def forward_over_reverse(inside: bool) -> list[float]:
    """The gradient's tangent, where one rank uses the output linearly and the other does not."""
    rank, x = gm.rank(), operand(gm.rank())
    with gm.ordered() if inside else torch.enable_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(2, dtype=T))
        y = gm.all_gather(dual)
        loss = (y**3).sum() if rank else y.sum()
        grad = gm.grad if inside else torch.autograd.grad
        (found,) = grad(loss, dual, create_graph=True)
        moved: Tensor = forward_ad.unpack_dual(found).tangent
        if inside:
            gm.join(found.sum())
        return moved.tolist()


@pytest.mark.parametrize("inside", [False, True])
def test_forward_over_reverse_is_right_where_one_rank_is_linear(inside: bool, threads: Ranks) -> None:
    got = threads(2)(forward_over_reverse, inside)
    torch.testing.assert_close(
        torch.tensor(got), torch.stack([6 * operand(rank).detach() for rank in range(2)]).float()
    )


# ---- a chain inside of a running backward


class Implicit(torch.autograd.Function):
    """A layer whose backward trains something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad(), gm.ordered():
            z = x.detach().requires_grad_()
            a, b = outputs(z)
            gm.backward(((b if gm.rank() else a) ** 3).sum())
        assert z.grad is not None
        return grad * z.grad


def implicit(around: bool) -> list[float]:
    x = operand(gm.rank())
    if around:
        with gm.ordered():
            gm.backward(gm.all_gather(Implicit.apply(x)).sum() / 2)
    else:
        Implicit.apply(x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("around", [False, True])
def test_block_opened_in_backward_has_a_separate_chain(around: bool, threads: Ranks) -> None:
    got = threads(2)(implicit, around)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(dense("each rank uses another one", 1)))


def region(x: Tensor) -> Tensor:
    return gm.all_gather((x @ x).sin())


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


def selective(inside: bool) -> bool:
    context = functools.partial(create_selective_checkpoint_contexts, save_products)
    x = torch.eye(3, dtype=T).mul_(1 + gm.rank()).requires_grad_()
    z = x.detach().clone().requires_grad_()
    with gm.ordered() if inside else torch.enable_grad():
        for _ in range(3 if not inside else 1):
            before = gm.shift(x)
            y = checkpoint(region, x, use_reentrant=False, context_fn=context)
            loss = (y**2).sum() + before.sum()
            gm.backward(loss) if inside else loss.backward()
    ((region(z) ** 2).sum() + gm.shift(z).sum()).backward()
    assert x.grad is not None
    assert z.grad is not None
    return torch.allclose(x.grad, (1 if inside else 3) * z.grad)


@pytest.mark.parametrize("inside", [False, True])
def test_a_selective_checkpoint_may_stand_anywhere_in_a_chain(inside: bool, threads: Ranks) -> None:
    assert threads(2)(selective, inside) == [True, True]


@pytest.mark.processes
def test_between_processes_a_selective_checkpoint_may_stand_anywhere_in_a_chain(processes: Ranks) -> None:
    assert processes(2)(selective, True) == [True, True]


def statistics_in_a_region(used: bool) -> list[float]:
    """A collective without a gradient, in a region that one rank has to run again, and the other need not."""
    x, rank = operand(gm.rank()), gm.rank()

    def inner(y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            mean = gm.all_reduce(y, op="mean", dst=gm.R)
        return mean, y.exp() if rank else y.cumsum(0)

    with gm.ordered():
        before = gm.shift(x)
        mean, y = checkpoint(inner, before, use_reentrant=False)
        gm.backward((mean * y).sum() if rank or used else None)
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("used", [True, False])
def test_a_collective_without_gradient_in_a_checkpoint_is_run_again_by_every_rank(
    used: bool, threads: Ranks
) -> None:
    got = threads(2)(statistics_in_a_region, used)
    xs = [operand(rank) for rank in range(2)]
    mean = (xs[0].detach() + xs[1].detach()) / 2
    loss = (mean * xs[0].exp()).sum() + (mean * xs[1].cumsum(0)).sum() * used
    expected = [g.tolist() for g in torch.autograd.grad(loss + 0 * xs[1].sum(), xs)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-11, atol=1e-11)


# ---- graphs


def twice_without_retaining() -> list[float]:
    x = operand(gm.rank())
    y = gm.all_gather(x)
    y.sum().backward()
    (2 * y).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_a_graph_that_saves_nothing_can_be_run_through_again(threads: Ranks) -> None:
    assert threads(2)(twice_without_retaining) == [[6.0, 6.0]] * 2


class Held:
    """What a node of the graph holds."""


class Hold(torch.autograd.Function):
    """The identity; its node holds an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def freed() -> tuple[bool, bool]:
    """Whether the graph of a call goes when its result does, with no help of the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        held = Held()
        alive = weakref.ref(held)
        x = operand(gm.rank())
        y = gm.all_gather(Hold.apply(x, held))
        (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g**3).sum(), x, create_graph=True)
        del held
        before = alive() is not None
        del y, g, h
        return before, alive() is None
    finally:
        gc.enable()


def test_a_call_keeps_its_graph_alive_no_longer_than_its_result(threads: Ranks) -> None:
    assert threads(2)(freed) == [(True, True)] * 2


def linear_behind_an_infinite_derivative() -> tuple[object, list[float]]:
    """A sum that every rank uses linearly, behind a root at 0: no gradient goes there the second time."""
    w = torch.tensor([0.0, 4.0], dtype=T, requires_grad=True)
    v = torch.tensor([2.0, 2.0], dtype=T, requires_grad=True)
    h = w.sqrt()
    y = gm.all_reduce(h * v, dst=gm.R)
    (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    (g**2).sum().backward()
    assert v.grad is not None
    return w.grad, v.grad.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_no_gradient_on_any_rank_gives_none_and_not_zeros(world: int, threads: Ranks) -> None:
    # g is W v on each rank, so that the gradient of the sum of all g^2 is 2 W^2 v.
    assert threads(world)(linear_behind_an_infinite_derivative) == [(None, [4.0 * world**2] * 2)] * world


def compressed() -> list[float]:
    """Hooks that compute on what is saved, as those that compress activations do."""

    def pack(saved: Tensor) -> tuple[Tensor, Tensor]:
        return saved, saved.abs().max()

    x = operand(gm.rank())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
        y = gm.all_gather(x)
        loss = (y**2).sum()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    g.sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_saved_tensors_can_be_used_in_computations(threads: Ranks) -> None:
    assert threads(2)(compressed) == [[4.0, 4.0]] * 2


def local_calls_without_a_gradient() -> list[float]:
    """One rank alone looks at parts of plain data."""
    for _ in range(1 + 5 * gm.rank()):
        gm.shard(torch.ones(4))
        gm.replicate(torch.ones(4))
    return gm.all_gather(torch.tensor([1.0 + gm.rank()])).tolist()


def test_local_calls_without_gradients_may_differ_between_ranks(threads: Ranks) -> None:
    assert threads(2)(local_calls_without_a_gradient) == [[1.0, 2.0]] * 2


def run_through_and_then_recorded() -> list[float]:
    x = operand(gm.rank())
    y = gm.all_gather(x)
    y.sum().backward()
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return g.tolist()


def test_a_graph_without_saved_tensors_can_be_recorded_the_second_time(threads: Ranks) -> None:
    assert threads(2)(run_through_and_then_recorded) == [[2.0, 2.0]] * 2
