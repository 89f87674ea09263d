"""`no_sync` defers the gradient sums of leaves: gradients as without it, bytes of one micro-batch."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.verify import simulate
from tests.conftest import Run
from tests.no_sync_programs import dense, draw, run
from tools.no_sync import MODELS, counted, deviation

Ranks = Callable[[int], Run]
T = torch.float64


def held(seed: int, *, wild: bool = False) -> bool:
    """Hold a random program against one process; whether it ran, and was not refused on every rank."""
    program = draw(seed, wild=wild)
    wanted, (found, _) = dense(program), run(program)
    refused = [each for each in found if isinstance(each, str)]
    if refused:
        assert wild, f"{program}: {refused[0]}"
        assert len(refused) == len(found), f"{program}: some ranks alone refuse: {refused[0]}"
        return False
    for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
        for leaf, (w, g) in enumerate(zip(want, got, strict=True)):
            has = torch.zeros_like(w) if g is None else torch.as_tensor(g)
            near = (has - w).abs().max() <= 1e-12 * max(1.0, float(w.abs().max()))
            assert near, f"{program}: leaf {leaf} of rank {rank}"
    return True


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_gradients_are_those_of_one_process(first: int) -> None:
    assert all(map(held, range(first, first + 10)))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_ranks_that_do_different_things_are_right_or_refused_on_every_rank(first: int) -> None:
    assert 5 < sum(held(seed, wild=True) for seed in range(first, first + 20)) < 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_many_programs_are_those_of_one_process(first: int) -> None:
    assert all(map(held, range(first, first + 500)))
    assert 100 < sum(held(seed, wild=True) for seed in range(first, first + 500)) < 500


# ---- a model by hand: who has what, and what goes over the wire --------------------------------------------------


def block(off: bool) -> contextlib.AbstractContextManager[Any]:
    return gm.no_sync() if off else contextlib.nullcontext()


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=T, generator=torch.Generator().manual_seed(seed))


class Layers(nn.Module):
    """Parameters that every rank has, that are cut over the ranks, and that one rank has."""

    def __init__(self) -> None:
        super().__init__()
        rank = gm.rank()
        self.whole = nn.Parameter(made(4, 3))
        self.bias = nn.Parameter(made(3, seed=1))
        self.even = nn.Parameter(made(4, 3, seed=2 + rank))
        self.columns = nn.Parameter(made(3, 2, seed=10 + rank))
        self.uneven = nn.Parameter(made(1 + rank, 3, seed=20 + rank))
        self.root = nn.Parameter(made(3, seed=30))

    def forward(self, x: Tensor) -> Tensor:
        ranks = gm.axis().size
        y = x @ gm.replicate(self.whole) + gm.replicate(self.bias)
        y = y @ gm.all_gather(self.even).view(-1, 3)[:3].sin()
        y = y @ gm.all_gather(self.columns, dim=1).tanh()[:, :3]
        y = y * gm.all_gather(self.uneven, sizes=[1 + r for r in range(ranks)]).sum(0)
        return y + gm.broadcast(self.root)


def train(k: int, off: bool) -> list[list[float]]:
    model = Layers()
    for step in range(k):
        with block(off and step < k - 1):
            loss = model(made(2, 4, seed=100 * step + gm.rank())).square().mean()
        loss.backward()
    return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


MESSAGES = {
    "count": 6 * 4,  # which of the six sums this rank has something of
    "sum": (12 + 3) * 8,
    "even": (2 * 12 + 3 * 4) * 8,
    "uneven": 9 * 8,
    "to the root": 3 * 8,
}


@pytest.mark.parametrize("k", [1, 3])
def test_bytes_are_those_of_one_micro_batch(k: int) -> None:
    with_it, without = (simulate(train, 2, args=(k, off)) for off in (True, False))
    ours, theirs = (
        [event.payload for event in done.events.select(rank=0, phase="backward")]
        for done in (with_it, without)
    )
    for one, other in zip(with_it.results, without.results, strict=True):
        assert len(one) == 6
        for mine, same in zip(one, other, strict=True):
            assert mine == pytest.approx(same, rel=1e-12, abs=1e-12)
    if k == 1:
        assert ours == theirs
    else:
        assert ours == list(MESSAGES.values())
        assert sum(ours) - MESSAGES["count"] == sum(theirs) / k


@pytest.mark.parametrize("model", MODELS)
def test_the_pages_bytes_go_down_with_the_number_of_micro_batches(model: str) -> None:
    (_, much, plain), (few, little, ours) = counted(model, 3, False), counted(model, 3, True)
    assert few <= 6
    assert little - 4 * len(ours[0]) == much / 3
    assert deviation(ours, plain) < (1e-6 if model == "of all kinds" else 1e-15)


@pytest.mark.processes
def test_gradients_on_processes_are_those_without(processes: Ranks) -> None:
    ranks = processes(2)
    for one, other in zip(ranks(train, 3, True), ranks(train, 3, False), strict=True):
        assert len(one) == 6
        for mine, same in zip(one, other, strict=True):
            assert mine == pytest.approx(same, rel=1e-12, abs=1e-12)


# ---- steps, clearing, taking -------------------------------------------------------------------------------------


def a_step_too_early() -> tuple[str, list[float], str]:
    w = nn.Parameter(torch.ones(3, 2))
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    with gm.no_sync() as deferred:
        gm.replicate(w).sum().backward()
    other.sum().backward()
    torch.optim.SGD([other], lr=1.0).step()  # another optimizer's affair
    with pytest.raises(gm.OrderError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(gm.OrderError) as again:
        optimizer.step()
    deferred.clear()
    optimizer.step()
    return str(caught.value), w.flatten().tolist(), str(again.value)


def test_optimizer_step_with_deferred_sums_raises_until_they_are_dropped(threads: Ranks) -> None:
    for text, weights, again in threads(2)(a_step_too_early):
        assert "gradmesh.no_sync: optimizer.step() called with deferred gradient reductions pending" in text
        assert "shape [3, 2]: replicate on axis 'world'" in text
        assert "test_no_sync.py" in text
        assert "in a_step_too_early" in text
        assert "deferred.clear()" in text
        assert again == text
        assert weights == [1.0] * 6


def steps_after_the_sum() -> list[float]:
    w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    seen = []
    for step in range(6):
        with block(step % 3 < 2) as deferred:
            loss = (gm.replicate(w) * (step + gm.rank())).sum()
        loss.backward()
        if step == 4:  # this one turns out to be the last
            deferred.sync()
            assert len(deferred) == 0
        if step in (2, 4, 5):
            optimizer.step()
            optimizer.zero_grad()
            seen.append(w.item())
    return seen


def test_every_step_has_the_sum_of_its_micro_batches(threads: Ranks) -> None:
    # Each micro-batch gives step from rank 0 and step + 1 from rank 1.
    assert threads(2)(steps_after_the_sum) == [[-9.0, -25.0, -36.0]] * 2


def a_forward_alone() -> float:
    w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    with gm.no_sync():
        gm.replicate(w)  # looked at, and left
    optimizer.step()
    gm.replicate(w).sum().backward()
    optimizer.step()
    return w.item()


def test_forward_without_backward_defers_nothing(threads: Ranks) -> None:
    assert threads(2)(a_forward_alone) == [-2.0, -2.0]


def all_forwards_first() -> tuple[bool, float]:
    """As in a pipeline: the last micro-batch goes backward first."""
    w = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=0.0)
    losses = []
    with gm.no_sync() as deferred:
        for step in range(2):
            losses.append((gm.replicate(w) * (1 + gm.rank() + step)).sum())
    losses.append((gm.replicate(w) * (3 + gm.rank())).sum())
    for loss in reversed(losses):
        loss.backward()
    with pytest.raises(gm.OrderError):
        optimizer.step()
    deferred.sync()
    optimizer.step()
    assert w.grad is not None
    return len(deferred) == 0, w.grad.item()


def test_backward_after_the_sum_is_deferred_again(threads: Ranks) -> None:
    assert threads(2)(all_forwards_first) == [(True, 15.0), (True, 15.0)]


def all_forwards_first_in_any_order() -> list[Any]:
    """Sums deferred again come in a different order on each rank."""
    w, v = (nn.Parameter(torch.ones(n)) for n in (2, 3))
    with gm.no_sync() as deferred:
        losses = [(gm.replicate(x) * (i + 1)).sum() for i, x in enumerate((w, v))]
    (gm.replicate(w).sum() + gm.replicate(v).sum()).backward()
    for loss in losses if gm.rank() else losses[::-1]:
        loss.backward()
    deferred.sync()
    return [x.grad.tolist() for x in (w, v) if x.grad is not None]


def test_order_of_deferred_sums_is_that_of_the_forward(threads: Ranks) -> None:
    assert threads(2)(all_forwards_first_in_any_order) == [[[4.0] * 2, [6.0] * 3]] * 2


def one_axis_of_two() -> list[Any]:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([a, b], lr=0.0)
    with gm.use_mesh(gm.mesh(dp=2, tp=2)):
        with gm.no_sync() as deferred:
            (gm.replicate(a, "dp") + gm.replicate(b, "tp")).sum().backward()
        gm.replicate(a, "dp").sum().backward()
    before = b.grad, len(deferred)
    with pytest.raises(gm.OrderError, match=r"replicate on axis 'tp'") as caught:
        optimizer.step()
    deferred.sync()
    optimizer.step()
    assert a.grad is not None
    assert b.grad is not None
    return [*before, "'dp'" in str(caught.value), a.grad.item(), b.grad.item()]


def test_the_sums_of_an_axis_are_taken_when_a_pass_comes_to_that_axis(threads: Ranks) -> None:
    assert threads(4)(one_axis_of_two) == [[None, 1, False, 4.0, 2.0]] * 4


# ---- which rank has what -----------------------------------------------------------------------------------------


def some_ranks_alone(ordered: bool) -> list[Any]:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    for step in range(2):
        with block(step < 1), gm.ordered() if ordered else contextlib.nullcontext():
            xs = [gm.replicate(x) for x in (a, b, c)]
            # The first is used by rank 0 alone, the second by rank 1, the third by no rank.
            loss = xs[gm.rank()].sum() * (step + 1)
            gm.backward(loss) if ordered else loss.backward()
    return [x.grad if x.grad is None else x.grad.tolist() for x in (a, b, c)]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_leaf_that_no_rank_uses_has_no_gradient(ordered: bool, threads: Ranks) -> None:
    assert threads(2)(some_ranks_alone, ordered) == [[[3.0, 3.0], [3.0, 3.0], None]] * 2


def ranks_that_part() -> str:
    w, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    with gm.no_sync() as deferred:
        x = gm.all_gather(w)
        if gm.rank():
            gm.replicate(v)
        x.sum().backward()
    try:
        deferred.sync()
    except gm.MismatchError as error:
        return str(error)
    finally:
        deferred.clear()
    return "nothing"


def test_ranks_with_different_deferred_sums_raise(threads: Ranks) -> None:
    for text in threads(2)(ranks_that_part):
        assert (
            "reductions deferred by no_sync(): all_gather(dim=0, dst=gm.R, sizes=equal) of float32[2]" in text
        )
        assert "replicate() of float32[3]" in text


def one_rank_outside() -> str:
    w = nn.Parameter(torch.ones(2))
    try:
        with gm.no_sync() if gm.rank() else contextlib.nullcontext():
            gm.replicate(w).sum().backward()
        gm.replicate(w).sum().backward()
        gm.all_gather(w.detach())
    except gm.GradmeshError as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_outside_of_the_block_is_refused() -> None:
    assert simulate(one_rank_outside, 2, seed=0).results == ["MismatchError"] * 2


def leaves_on_some_ranks(verb: str) -> list[Any]:
    """The operand is a parameter on rank 0 alone: no rank defers the sum."""
    w = nn.Parameter(torch.ones(2))
    for step in range(2):
        with block(step < 1):
            operand = w if gm.rank() == 0 else torch.zeros(2)
            y = gm.broadcast(operand) if verb == "broadcast" else gm.all_gather(operand)
        y.sum().backward()
        if gm.rank() == 0:
            assert w.grad is not None
            assert w.grad.tolist() == [2.0 * (step + 1)] * 2
    return [w.grad if w.grad is None else w.grad.tolist()]


@pytest.mark.parametrize("verb", ["broadcast", "all_gather"])
def test_a_leaf_of_one_rank_alone_is_summed_at_once(verb: str, threads: Ranks) -> None:
    assert threads(2)(leaves_on_some_ranks, verb) == [[[4.0, 4.0]], [None]]


def a_leaf_at_the_root_unchecked() -> list[Any]:
    with gm.check(0):
        return leaves_on_some_ranks("broadcast")


def test_a_leaf_at_the_root_alone_is_summed_at_once_where_nothing_is_compared(threads: Ranks) -> None:
    assert threads(2)(a_leaf_at_the_root_unchecked) == [[[4.0, 4.0]], [None]]


# ---- passes and graphs of all kinds ------------------------------------------------------------------------------


def asked_for(ordered: bool) -> list[Any]:
    """A gradient that is handed out is whole at once, also one with a graph."""
    w, found = nn.Parameter(torch.full((1,), 2.0, dtype=T)), []
    with gm.no_sync() as deferred, gm.ordered() if ordered else contextlib.nullcontext():
        loss = (gm.replicate(w) ** 3 * (1 + gm.rank())).sum()
        take: Any = gm.grad if ordered else torch.autograd.grad
        (g,) = take(loss, w, create_graph=True)
        (h,) = take(g.sum(), w)
        found += [g.item(), h.item(), w.grad, len(deferred)]
    deferred.clear()
    return found


@pytest.mark.parametrize("ordered", [True, False])
def test_a_gradient_that_is_asked_for_is_whole(ordered: bool, threads: Ranks) -> None:
    # The gradient is the same on both ranks and counts once: its own is the sum of 6 w and 12 w at w = 2.
    assert threads(2)(asked_for, ordered) == [[36.0, 36.0, None, 1]] * 2


def asked_for_outside() -> list[Any]:
    w = nn.Parameter(torch.ones(1))
    with gm.no_sync() as deferred:
        gm.replicate(w).sum().backward()
    (g,) = torch.autograd.grad((gm.replicate(w) * 3).sum(), w)
    before = g.item(), w.grad
    gm.replicate(w).sum().backward()
    assert w.grad is not None
    return [*before, w.grad.item(), len(deferred)]


def test_autograd_grad_leaves_deferred_sums_pending(threads: Ranks) -> None:
    assert threads(2)(asked_for_outside) == [[6.0, None, 4.0, 0]] * 2


def a_gradient_that_is_a_leaf() -> list[Any]:
    """The backward of a call made outside is not deferred, though its operand is a leaf."""
    x, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))
    with gm.no_sync() as deferred:
        y = gm.all_gather(x)
        (g,) = torch.autograd.grad(y, x, v, create_graph=True)
        before = g.tolist(), len(deferred)
        (g * (1 + gm.rank())).sum().backward()
    deferred.clear()
    assert v.grad is not None
    return [*before, v.grad.tolist()]


def test_backward_is_deferred_only_if_its_forward_is_in_the_block(threads: Ranks) -> None:
    assert threads(2)(a_gradient_that_is_a_leaf) == [[[2.0, 2.0], 1, [1.0, 1.0, 2.0, 2.0]]] * 2


def in_forward_mode() -> list[Any]:
    w = nn.Parameter(torch.full((1,), 3.0))
    with gm.no_sync() as deferred, forward_ad.dual_level():
        y = gm.replicate(w) * forward_ad.make_dual(torch.full((1,), 2.0), torch.ones(1))
        y.sum().backward()
        tangent = forward_ad.unpack_dual(y).tangent
    deferred.sync()
    assert tangent is not None
    assert w.grad is not None
    return [tangent.item(), w.grad.item(), len(deferred)]


def test_forward_mode_goes_along(threads: Ranks) -> None:
    assert threads(2)(in_forward_mode) == [[3.0, 4.0, 0]] * 2


def with_a_graph() -> list[Any]:
    w = nn.Parameter(torch.full((1,), 2.0, dtype=T))
    with gm.no_sync() as deferred:
        (gm.replicate(w) ** 2 * (1 + gm.rank())).sum().backward(create_graph=True)
    grad = w.grad
    assert grad is not None
    w.grad = None
    deferred.clear()
    return [grad.item(), grad.requires_grad]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_with_a_graph_sums_at_once(threads: Ranks) -> None:
    assert threads(2)(with_a_graph) == [[12.0, True]] * 2


def other_inputs() -> list[Any]:
    """A pass that skips the leaf adds nothing to the deferred sums."""
    w, x = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with gm.no_sync() as deferred, gm.ordered():
        y = gm.replicate(w) * x
        (force,) = gm.grad(y.sum(), x, retain_graph=True)
        gm.backward(y.sum(), inputs=[x])
    deferred.sync()
    return [force.tolist(), w.grad]


def test_pass_that_skips_a_leaf_defers_nothing_for_it(threads: Ranks) -> None:
    assert threads(2)(other_inputs) == [[[1.0, 1.0], None]] * 2


def checkpointed(reentrant: bool, inside: bool, ordered: bool) -> list[Any]:
    w = nn.Parameter(torch.full((2,), 0.5, dtype=T))

    def layer(x: Tensor) -> Tensor:
        return (gm.replicate(w) * x).sin()

    for step in range(3):
        x = torch.full((2,), 1.0 + step + gm.rank(), dtype=T, requires_grad=True)
        with gm.ordered() if ordered else contextlib.nullcontext():
            with block(step < 2) as deferred:
                loss = checkpoint(layer, x, use_reentrant=reentrant).sum()
                if inside:
                    gm.backward(loss) if ordered else loss.backward()
            if not inside:
                gm.backward(loss) if ordered else loss.backward()
        if step < 2 and (inside or not reentrant):
            assert w.grad is None
            assert len(deferred) == 1
    assert w.grad is not None
    return w.grad.tolist()


@pytest.mark.parametrize(
    ("reentrant", "inside", "ordered"),
    [
        (False, True, False),
        (False, False, False),
        (False, False, True),
        (True, True, False),
        (True, False, False),
    ],
)
def test_checkpoint_defers_the_sums_of_its_first_pass(
    reentrant: bool, inside: bool, ordered: bool, threads: Ranks
) -> None:
    w = nn.Parameter(torch.full((2,), 0.5, dtype=T))
    sum((w * (1.0 + step + rank)).sin().sum() for step in range(3) for rank in range(2)).backward()  # type: ignore[union-attr]
    assert w.grad is not None
    for found in threads(2)(checkpointed, reentrant, inside, ordered):
        assert found == pytest.approx(w.grad.tolist(), rel=1e-12)


class Recomputing(torch.autograd.Function):
    """A checkpoint by hand, which takes the gradient off detached copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return gm.replicate(x) * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            y = gm.replicate(x) * w
        y.backward(grad)
        return x.grad, w.grad


def of_detached_inputs(how: str, activation: bool, off: bool) -> list[Any]:
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=T))
    v = nn.Parameter(torch.tensor([0.5, 0.7], dtype=T))
    for step in range(3):
        with block(off and step < 2):
            x = w * 2 if activation else w
            if how == "by hand":
                y: Tensor = Recomputing.apply(x, v)
            else:
                y = checkpoint(lambda x, v: gm.replicate(x) * v, x, v, use_reentrant=True)
            (y * (1.0 + step + gm.rank())).sum().backward()
    torch.optim.SGD([w, v], lr=0.0).step()
    return [p.grad.tolist() for p in (w, v) if p.grad is not None]


@pytest.mark.parametrize("how", ["reentrant", "by hand"])
@pytest.mark.parametrize("activation", [True, False])
def test_a_recomputation_on_detached_inputs_has_every_micro_batchs_gradient(
    how: str, activation: bool, threads: Ranks
) -> None:
    factor, weights = 2.0 if activation else 1.0, range(1, 4)
    for rank, (w, v) in enumerate(threads(2)(of_detached_inputs, how, activation, True)):
        # The step's loss is (step + 1) times the product on rank 0, and (step + 2) times on rank 1.
        assert w == pytest.approx([factor * 15 * 0.5, factor * 15 * 0.7])
        own = sum(weights) + 3 * rank
        assert v == pytest.approx([factor * own * 1.0, factor * own * 2.0])


def stage_inputs(verb: str) -> list[Any]:
    """What a pipeline stage has received, and sends the gradient of back before the block ends."""
    w, seen = nn.Parameter(torch.ones(2, dtype=T)), []
    buffer = torch.ones(2, dtype=T, requires_grad=True)  # kept for all micro-batches, as pipelines do
    for step in range(3):
        with block(step < 2) as deferred:
            made_now = torch.ones(2, dtype=T).requires_grad_()
            for x in (buffer, made_now):
                (getattr(gm, verb)(x).sum() * gm.replicate(w).sum() * (step + gm.rank())).backward()
                assert x.grad is not None
                seen.append(x.grad.tolist())
            buffer.grad = None
            assert step == 2 or len(deferred) == 1
    assert w.grad is not None
    return [seen, w.grad.tolist()]


@pytest.mark.parametrize("verb", ["replicate", "all_gather"])
def test_a_received_input_has_its_gradient_inside_the_block(verb: str, threads: Ranks) -> None:
    whole = {"replicate": 2, "all_gather": 4}[verb]
    inputs = [[2.0 * (2 * step + 1)] * 2 for step in range(3) for _ in range(2)]
    assert threads(2)(stage_inputs, verb) == [[inputs, [2.0 * whole * (1 + 3 + 5)] * 2]] * 2


def run_again_inside() -> list[Any]:
    """The forward ran outside, and what a checkpoint runs again in the block is not deferred."""
    w = nn.Parameter(torch.ones(1))
    x = torch.ones(1, requires_grad=True)
    loss = checkpoint(lambda x: (gm.replicate(w) * x).sin(), x, use_reentrant=False).sum()
    with gm.no_sync() as deferred:
        loss.backward()
    assert w.grad is not None
    return [w.grad.item() == pytest.approx(2 * torch.ones(1).cos().item()), len(deferred)]


def test_checkpoint_recomputation_defers_nothing() -> None:
    assert (
        gm.launch(run_again_inside, 2, backend="threads") == [[True, 0]] * 2
    )  # on ranks that have deferred nothing yet


def failing_on_the_way() -> list[Any]:
    w, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with gm.no_sync() as deferred:
        gm.replicate(w).sum().backward()

    def fail(_: Tensor) -> None:
        raise ValueError("on the way")

    x = v * 1
    x.register_hook(fail)
    with pytest.raises(ValueError, match="on the way"):
        # The node of w has run, and asked for the sums at the end of a pass that never comes there.
        (gm.replicate(w).sum() + (x * gm.replicate(w).detach()).sum()).backward()
    assert len(deferred) == 1
    gm.replicate(w).sum().backward()
    assert w.grad is not None
    return [w.grad.tolist()[0] in (4.0, 6.0), len(deferred)]


def test_a_pass_that_fails_leaves_nothing_stuck(threads: Ranks) -> None:
    assert threads(2)(failing_on_the_way) == [[True, 0]] * 2


def hooked() -> list[Any]:
    w, seen, after = nn.Parameter(torch.ones(1)), list[float](), list[float]()
    w.register_hook(lambda g: seen.append(g.item()))
    w.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.item()))
    for step in range(2):
        with block(step < 1):
            gm.replicate(w).sum().backward()
    return [seen, after]


def test_a_leaf_with_hooks_is_summed_at_once(threads: Ranks) -> None:
    assert threads(2)(hooked) == [[[2.0, 2.0], [2.0, 4.0]]] * 2


def hooked_later() -> list[Any]:
    w, seen, after = nn.Parameter(torch.ones(1)), list[float](), list[float]()
    with gm.no_sync():
        gm.replicate(w).sum().backward()
    w.register_hook(lambda g: seen.append(g.item()))
    w.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.item()))
    (gm.replicate(w) * 3).sum().backward()
    return [seen, after]


def test_later_hooks_see_the_sum_with_deferred_gradients(threads: Ranks) -> None:
    assert threads(2)(hooked_later) == [[[6.0, 2.0], [6.0, 8.0]]] * 2


def hooked_between() -> list[Any]:
    w, seen = nn.Parameter(torch.ones(1)), list[float]()
    with gm.no_sync() as deferred:
        loss = gm.replicate(w).sum()
        w.register_hook(lambda g: seen.append(g.item()))
        loss.backward()
    deferred.clear()
    assert w.grad is not None
    return [seen, w.grad.item()]


def test_a_hook_that_comes_between_forward_and_backward_sees_the_sum(threads: Ranks) -> None:
    assert threads(2)(hooked_between) == [[[2.0], 2.0]] * 2


def memory_of_their_own() -> list[bool]:
    xs = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for step in range(2):
        with block(step < 1):
            loss = sum((gm.replicate(x) * 2).sum() for x in xs)
        assert isinstance(loss, Tensor)
        loss.backward()
    grads = [x.grad for x in xs if x.grad is not None]
    places = {g.untyped_storage().data_ptr() for g in grads}
    return [len(places) == 3, all(g.untyped_storage().nbytes() == 8 for g in grads)]


def test_every_gradient_has_separate_memory(threads: Ranks) -> None:
    assert threads(2)(memory_of_their_own) == [[True, True]] * 2


def the_callers_gradient() -> float:
    w, given = nn.Parameter(torch.ones(2)), torch.ones(2)
    with gm.no_sync() as deferred:
        gm.replicate(w).backward(given)
    given.zero_()  # what was handed in is the caller's again
    deferred.sync()
    assert w.grad is not None
    return w.grad.sum().item()


def test_stored_gradient_is_a_copy(threads: Ranks) -> None:
    assert threads(2)(the_callers_gradient) == [4.0, 4.0]


# ---- dtypes ------------------------------------------------------------------------------------------------------


def of_dtype(dtype: torch.dtype, wire: torch.dtype | None) -> list[Any]:
    xs = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    for step in range(3):
        with block(step < 2):
            ys = [gm.replicate(xs[0], backward_dtype=wire), gm.all_gather(xs[1], backward_dtype=wire)]
            factor = torch.tensor(1j if dtype.is_complex else 1.0, dtype=dtype) * (1 + gm.rank())
            loss = (ys[0] * factor).sum() + (ys[1] * factor).sum()
        loss.backward(torch.ones_like(loss))
    return [[x.grad.dtype, x.grad.tolist()] for x in xs if x.grad is not None]


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.complex64, None),
        (torch.complex128, torch.complex64),
    ],
)
def test_any_dtype_is_deferred(dtype: torch.dtype, wire: torch.dtype | None, threads: Ranks) -> None:
    value = -9j if dtype.is_complex else 9.0
    assert threads(2)(of_dtype, dtype, wire) == [[[dtype, [value] * 3]] * 2] * 2


# ---- blocks, threads, wrappers, compilers ------------------------------------------------------------------------


def nested() -> list[Any]:
    w = nn.Parameter(torch.ones(1))
    with gm.no_sync() as outer:
        with gm.no_sync() as inner:
            gm.replicate(w).sum().backward()
        gm.replicate(w).sum().backward()
        between = w.grad, len(inner), len(outer)
    gm.replicate(w).sum().backward()
    assert w.grad is not None
    return [*between, w.grad.item()]


def test_a_block_in_a_block_is_the_same_one(threads: Ranks) -> None:
    assert threads(2)(nested) == [[None, 1, 1, 6.0]] * 2


def two_threads() -> list[Any]:
    """Each thread of a rank trains in a group of its own; one of them in the block."""
    groups = [dist.new_group(), dist.new_group()]
    ws = [nn.Parameter(torch.ones(2)) for _ in groups]
    errors: list[str] = []
    turn = threading.Barrier(2)

    def train(number: int) -> None:
        try:
            w, group = ws[number], groups[number]
            for step in range(3):
                turn.wait(60)
                with block(number == 0 and step < 2):
                    (gm.replicate(w, group) * (1 + number)).sum().backward()
                turn.wait(60)
                assert (w.grad is None) == (number == 0 and step < 2)
        except BaseException:
            errors.append(traceback.format_exc())

    others = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    return [errors, *(w.grad.tolist() for w in ws if w.grad is not None)]


@pytest.mark.processes
def test_block_is_thread_local(processes: Ranks) -> None:
    assert processes(2)(two_threads) == [[[], [6.0, 6.0], [12.0, 12.0]]] * 2


def in_ddp() -> list[Any]:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=T))

        def forward(self, x: Tensor) -> Tensor:
            return (gm.replicate(self.w) * x).sum()

    found = []
    for off in (False, True):
        model = DistributedDataParallel(Summing())
        for step in range(2):
            with block(off and step < 1), model.no_sync() if step < 1 else contextlib.nullcontext():
                model(torch.full((2,), 1.0 + step + gm.rank(), dtype=T)).backward()
        found.append(model.module.w.grad.tolist())
    return found


@pytest.mark.processes
def test_inside_ddp_sums_are_taken_at_once(processes: Ranks) -> None:
    for without, with_it in processes(2)(in_ddp):
        assert with_it == without == [8.0, 8.0]


class Gathered(nn.Module):
    """A parameter that fully_shard manages, and a verb on what it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return gm.replicate(self.w).sum()


def in_fsdp() -> str:
    model = Gathered()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        with gm.no_sync() as deferred:
            model().backward()
        model().backward()
    except gm.OrderError as error:
        return str(error)
    finally:
        deferred.clear()
    return "nothing"


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_a_wrapper_frees_is_refused(processes: Ranks) -> None:
    for text in processes(2)(in_fsdp):
        assert "was freed before its deferred gradient reduction" in text
        assert "shape [4]" in text


def compiled() -> list[Any]:
    torch._dynamo.reset()
    w = nn.Parameter(torch.full((2,), 0.5))
    program = torch.compile(
        lambda w, x: (gm.replicate(w) * x).sin().sum(), fullgraph=True, backend="aot_eager"
    )
    for step in range(2):
        with block(step < 1):
            program(w, torch.ones(2) + gm.rank()).backward()
    torch.optim.SGD([w], lr=1.0).step()
    x = torch.zeros(2, requires_grad=True)

    def entering(x: Tensor) -> Tensor:
        with gm.no_sync():
            return x * 2

    with pytest.raises(Exception, match=r"no_sync") as caught:
        torch.compile(entering, fullgraph=True, backend="aot_eager")(x)
    return [w.tolist(), type(caught.value).__name__]


@pytest.mark.processes
def test_a_compiled_program_sums_at_once_and_cannot_enter(processes: Ranks) -> None:
    w = nn.Parameter(torch.full((2,), 0.5))
    (2 * (w.sin() + (2 * w).sin())).sum().backward()
    assert w.grad is not None
    for weights, _ in processes(2)(compiled):
        assert weights == pytest.approx((0.5 - w.grad).tolist())


def transformed() -> list[Any]:
    w = torch.full((2,), 3.0)
    with gm.no_sync() as deferred:
        grad = torch.func.grad(lambda w: (gm.replicate(w) ** 2).sum())(w)
    return [grad.tolist(), len(deferred)]


def test_a_transform_sums_at_once(threads: Ranks) -> None:
    assert threads(2)(transformed) == [[[12.0, 12.0], 0]] * 2


def async_and_coalesced() -> list[Any]:
    """Async calls are summed in each pass; sync calls on the same leaf are deferred."""
    w, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen = []
    for step in range(3):
        with block(step < 2):
            with gm.coalesce():
                started = [gm.replicate(x, async_op=True) for x in (w, v)]
            gathered = gm.all_gather(w, async_op=True)
            now = gm.replicate(w) * 10
            loss = (started[0].wait() + started[1].wait() + now).sum() + gathered.wait().sum()
        loss.backward()
        assert w.grad is not None
        assert v.grad is not None
        seen.append([w.grad[0].item(), v.grad[0].item()])
    return seen


def test_async_calls_are_summed_in_each_pass(threads: Ranks) -> None:
    assert threads(2)(async_and_coalesced) == [[[4.0, 2.0], [8.0, 4.0], [72.0, 6.0]]] * 2


def frozen_meanwhile() -> list[Any]:
    w, v, u = (nn.Parameter(torch.ones(1)) for _ in range(3))
    with gm.no_sync() as deferred:
        (gm.replicate(w) + gm.replicate(v) + gm.replicate(u)).sum().backward()
    for x in (w, u):
        x.requires_grad_(False)
    u.grad = torch.ones(1)
    deferred.sync()
    return [x.grad.item() for x in (w, v, u) if x.grad is not None]


def test_leaf_frozen_meanwhile_keeps_its_earlier_gradients(threads: Ranks) -> None:
    assert threads(2)(frozen_meanwhile) == [[2.0, 2.0, 3.0]] * 2


def one_frozen_for_the_other(off: bool) -> list[Any]:
    """As of two models in turn: the sums are taken while one of them is frozen."""
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    for step in range(3):
        with block(off and step < 2):
            other.requires_grad_(False)
            (gm.replicate(one) * gm.replicate(other) * (1 + step + gm.rank())).sum().backward()
            other.requires_grad_(True)
            (gm.replicate(other) * (10 + step)).sum().backward()
    return [x.grad.item() for x in (one, other) if x.grad is not None]


@pytest.mark.parametrize("off", [True, False])
def test_sums_that_are_taken_while_a_leaf_is_frozen_reach_it(off: bool, threads: Ranks) -> None:
    assert threads(2)(one_frozen_for_the_other, off) == [[15.0, 66.0]] * 2


def in_a_closure() -> list[str]:
    w, found = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([w], lr=1.0)

    def closure() -> float:
        with gm.no_sync():
            loss = gm.replicate(w).sum()
        loss.backward()
        return loss.item()

    with gm.no_sync() as deferred:
        pass
    for _ in range(2):
        with pytest.raises(gm.OrderError, match="deferred gradient reductions pending") as caught:
            optimizer.step(closure)
        found.append(type(caught.value).__name__)
        deferred.clear()
    return found


def test_closure_that_leaves_sums_deferred_raises(threads: Ranks) -> None:
    assert threads(2)(in_a_closure) == [["OrderError"] * 2] * 2


def a_closure_of_micro_batches(off: bool) -> list[float]:
    w = nn.Parameter(torch.ones(3, dtype=T))
    optimizer = torch.optim.LBFGS([w], lr=0.1, max_iter=4)

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for step in range(3):
            with block(off and step < 2):
                loss = ((gm.replicate(w) - made(3, seed=step + 10 * gm.rank())) ** 2).sum()
            loss.backward()
            total += gm.all_reduce(loss.detach(), dst=gm.I).item()
        return total

    optimizer.step(closure)
    return w.tolist()


def test_a_closure_of_micro_batches_steps_as_without_the_block(threads: Ranks) -> None:
    plain = threads(2)(a_closure_of_micro_batches, False)
    assert plain[0] != [1.0] * 3
    for one, other in zip(threads(2)(a_closure_of_micro_batches, True), plain, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def checked() -> list[float]:
    w = nn.Parameter(torch.ones(2))
    with gm.check("full"):
        for step in range(2):
            with block(step < 1):
                loss = (gm.replicate(w) * (1.0 + gm.rank())).sum() + (gm.broadcast(w) * gm.rank()).sum()
            loss.backward()
    assert w.grad is not None
    return w.grad.tolist()


def test_the_full_check_goes_along(threads: Ranks) -> None:
    assert threads(2)(checked) == [[8.0, 8.0], [6.0, 6.0]]


def alone() -> list[Any]:
    w = nn.Parameter(torch.ones(2))
    with gm.no_sync() as deferred:
        gm.replicate(w).sum().backward()
    assert w.grad is not None
    return [w.grad.tolist(), len(deferred)]


def test_nothing_is_deferred_on_one_rank(threads: Ranks) -> None:
    assert threads(1)(alone) == [[[1.0, 1.0], 0]]
