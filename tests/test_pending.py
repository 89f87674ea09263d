"""Async calls: the same results and derivatives as sync ones, and no gradient is silently lost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.autograd.pending import start_op
from gradmesh.autograd.rule import apply
from gradmesh.ops.base import LinearOp
from gradmesh.ops.mean import Mean
from gradmesh.ops.registry import REGISTRY
from gradmesh.transport.comm_thread import async_axis
from gradmesh.verify import CostModel, Link, simulate
from tests import contract
from tests.forking import Forking

Ranks = Callable[[int], Callable[..., list[Any]]]
T = torch.float64


def random(*shape: int, seed: int = 0, dtype: torch.dtype = T) -> Tensor:
    """Another one on each rank."""
    source = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, generator=source, dtype=dtype)


def beside(op: LinearOp) -> LinearOp:
    """The op of an async call."""
    return Mean(beside(op.op)) if isinstance(op, Mean) else replace(op, axis=async_axis(op.axis))


def derivatives(run: Callable[[Tensor], Tensor], shape: Sequence[int], *, ordered: bool) -> list[Tensor]:
    """The value of a program, the gradient of a loss that differs from rank to rank, and a second one."""
    x = random(*shape).requires_grad_()
    weight = random(*shape, seed=1).requires_grad_()

    def loss(y: Tensor) -> Tensor:
        return (y.sin() * (1 + torch.arange(y.numel(), dtype=T).view(y.shape))).sum() * (1 + gm.rank())

    if not ordered:
        y = run(x * weight)
        (g,) = torch.autograd.grad(loss(y), x, create_graph=True)
        (g.square().sum() * (2 + gm.rank())).backward()
    else:
        with gm.ordered():
            y = run(x * weight)
            (g,) = gm.grad(loss(y), x, create_graph=True)
            gm.backward(g.square().sum() * (2 + gm.rank()))
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), g.detach(), x.grad, weight.grad]


def is_the_same_async(op: LinearOp, shape: Sequence[int]) -> None:
    if op.axis.size == 1:
        return
    for ordered in (False, True):
        at_once = derivatives(functools.partial(apply, op), shape, ordered=ordered)
        apart = derivatives(lambda x: start_op(beside(op), x).wait(), shape, ordered=ordered)
        for one, other in zip(at_once, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("row", range(len(REGISTRY)), ids=contract.row_ids())
def test_every_async_op_equals_the_sync_op_to_second_order_in_any_order(row: int, threads: Ranks) -> None:
    assert max(threads(3)(contract.on_examples, is_the_same_async, [row])) > 0


@pytest.mark.processes
def test_every_async_op_equals_the_sync_op_on_processes(processes: Ranks) -> None:
    assert max(processes(2)(contract.on_examples, is_the_same_async, range(len(REGISTRY)))) > 0


VERBS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, **how: gm.all_gather(x, **how),
    "all_gather auto": lambda x, **how: gm.all_gather(x[: 1 + gm.rank()], sizes="auto", **how),
    "all_gather of several": lambda x, **how: gm.all_gather({"a": x, "b": [x[0], x.float()]}, **how),
    "all_gather of uneven": lambda x, **how: gm.all_gather([x, x + 1], sizes=[4] * gm.world_size(), **how),
    "all_reduce": lambda x, **how: gm.all_reduce(x, dst=gm.R, **how),
    "all_reduce I": lambda x, **how: gm.all_reduce(x, dst=gm.I, **how),
    "all_reduce mean": lambda x, **how: gm.all_reduce(x, op="mean", dst=gm.R, **how),
    "all_reduce in two precisions": lambda x, **how: gm.all_reduce(
        x, dst=gm.R, comm_dtype=torch.float32, backward_dtype=torch.bfloat16, **how
    ),
    "all_reduce max": lambda x, **how: gm.all_reduce(x, op="max", dst=gm.R, **how),
    "all_reduce min of integers": lambda x, **how: gm.all_reduce(x.long(), op="min", dst=gm.R, **how),
    "all_reduce prod": lambda x, **how: gm.all_reduce(x, op="prod", dst=gm.R, **how),
    "all_reduce logsumexp": lambda x, **how: gm.all_reduce(x, op="logsumexp", dst=gm.R, **how),
    "all_reduce of several": lambda x, **how: gm.all_reduce((x, x.float(), x[0]), dst=gm.R, **how),
    "all_to_all": lambda x, **how: gm.all_to_all(x.repeat(gm.world_size(), 1), **how),
    "broadcast": lambda x, **how: gm.broadcast(x, root=1, **how),
    "broadcast I": lambda x, **how: gm.broadcast(x, root=1, dst=gm.I, **how),
    "convert": lambda x, **how: gm.convert(x, src=gm.R, dst=gm.P, **how),
    "exchange": lambda x, **how: gm.exchange([x[: 1 + r] for r in range(gm.world_size())], **how),
    "exscan": lambda x, **how: gm.exscan(x, **how),
    "gather": lambda x, **how: gm.gather(x, **how),
    "halo_exchange": lambda x, **how: gm.halo_exchange(x, **how),
    "neighbor_all_to_all": lambda x, **how: gm.neighbor_all_to_all(
        x,
        send_rows={(gm.rank() + 1) % gm.world_size(): torch.tensor([2, 0])},
        receive_counts={(gm.rank() - 1) % gm.world_size(): 2},
        **how,
    ),
    "permute": lambda x, **how: gm.permute(x, pairs=[(0, 1)], **how),
    "reduce": lambda x, **how: gm.reduce(x, **how),
    "reduce_scatter": lambda x, **how: gm.reduce_scatter(x.repeat(gm.world_size(), 1), **how),
    "replicate": lambda x, **how: gm.replicate(x, **how),
    "scan": lambda x, **how: gm.scan(x, **how),
    "scatter": lambda x, **how: gm.scatter(x.repeat(2, 1) if gm.rank() == 0 else x[:0], **how),
    "shard": lambda x, **how: gm.shard(x, src=gm.R, **how),
    "shift": lambda x, **how: gm.shift(x, **how),
    "shift of several": lambda x, **how: gm.shift([x, x.float()], **how),
}


def listed(y: Any) -> list[Tensor]:
    if isinstance(y, Tensor):
        return [y]
    return [t for part in (y.values() if isinstance(y, dict) else y) for t in listed(part)]


def as_verb(name: str, **how: bool) -> list[Tensor]:
    x = random(4, 2).requires_grad_()
    with gm.ordered():
        made = VERBS[name](x, **how)
        results = listed(made.wait() if isinstance(made, gm.Pending) else made)
        used = [y for y in results if y.requires_grad]
        gm.backward(sum((y.double() ** 2).sum() * (i + 1 + gm.rank()) for i, y in enumerate(used)) or None)
    return [*(y.detach() for y in results), *([] if x.grad is None else [x.grad])]


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_returns_a_pending_of_its_result_with_async_op(name: str, threads: Ranks) -> None:
    for at_once, apart in zip(
        threads(2)(as_verb, name), threads(2)(as_verb, name, async_op=True), strict=True
    ):
        torch.testing.assert_close(apart, at_once, rtol=1e-14, atol=0)


def test_async_op_on_every_public_verb() -> None:
    """No verb is left out above."""
    from gradmesh.verbs import collectives

    named = {name.split(" ")[0] for name in VERBS} | {"send", "recv"}
    assert named == set(collectives.__all__) - {"sizes"}


def one_rank_alone() -> list[Any]:
    """A world of one, where nothing is sent."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    pending = gm.all_gather(x, async_op=True)
    assert pending.done()
    pending.wait().square().sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_on_one_rank_a_call_is_over_at_once(threads: Ranks) -> None:
    assert threads(1)(one_rank_alone) == [[4.0, 6.0]]


# ---- what overlap in backward is


def test_backward_is_launched_at_the_wait_and_waited_for_at_the_call() -> None:
    def step() -> None:
        x = random(3).requires_grad_()
        pending = gm.all_gather(x, async_op=True)
        y = gm.shift(x.exp())  # meanwhile
        (pending.wait().sum() * y.sum()).backward()

    run = simulate(step, 2, model=CostModel(Link(latency_us=2_000_000, gbytes_per_s=1)))
    seen = {(e.verb, e.phase): e for e in run.events.select(rank=0)}
    gather, forward = seen["all_gather", "forward"], seen["shift", "forward"]
    scatter, backward = seen["reduce_scatter", "backward"], seen["shift", "backward"]
    assert forward.called < gather.end  # type: ignore[operator]  # both end
    assert backward.called < scatter.end  # type: ignore[operator]
    assert scatter.origin == gather.number


def two_axes(apart: bool) -> float:
    x = random(1000).requires_grad_()
    made = [gm.shift(x, name, async_op=apart) for name in ("a", "b")]
    y = sum(one.wait() if isinstance(one, gm.Pending) else one for one in made)
    y.sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return x.grad.sum().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_modelled_time_of_async_calls_is_that_of_the_longest(seed: int) -> None:
    model = CostModel(Link(latency_us=1000, gbytes_per_s=100))
    seconds = []
    for apart in (False, True):
        run = simulate(
            functools.partial(two_axes, apart), 4, mesh={"a": 2, "b": 2}, seed=seed, model=model, compute=0
        )
        assert run.results == [2000.0] * 4
        seconds.append(run.seconds)
    assert 1.9 < seconds[0] / seconds[1] < 2.1


def raw_calls_between() -> list[float]:
    """Calls of torch on the same group, on the ranks at different places."""
    x = random(5).requires_grad_()
    other = torch.ones(5) * (1 + gm.rank())
    for _ in range(20):
        pending = gm.all_gather(x, async_op=True)
        if gm.rank() == 0:
            dist.all_reduce(other)
            y = pending.wait()
        else:
            y = pending.wait()
            dist.all_reduce(other)
        other /= 3
    y.sum().backward()
    assert x.grad is not None
    return [other[0].item(), x.grad[0].item()]


@pytest.mark.processes
def test_async_calls_and_torch_collectives_do_not_interfere(processes: Ranks) -> None:
    first, second = processes(2)(raw_calls_between)
    assert first == second
    assert first[1] == 2.0


def test_async_calls_and_torch_collectives_do_not_interfere_on_threads(threads: Ranks) -> None:
    first, second = threads(2)(raw_calls_between)
    assert first == second


def sync_call_between(operand: Callable[[], Tensor]) -> list[float]:
    """An async call before a sync one on rank 0, after it on rank 1, which a sync one could not be."""
    gm.all_gather(operand(), async_op=True).wait()
    x = random(2)
    if gm.rank() == 0:
        pending = gm.all_gather(x, async_op=True)
        summed = gm.all_reduce(x, dst=gm.R)
        return [*pending.wait().tolist(), *summed.tolist()]
    summed = gm.all_reduce(x, dst=gm.R)
    return [*gm.all_gather(x, async_op=True).wait().tolist(), *summed.tolist()]


def on_meta() -> Tensor:
    return torch.empty(2, dtype=T, device="meta")


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(2, dtype=T)


@pytest.mark.processes
@pytest.mark.parametrize("operand", [on_meta, fake])
def test_calls_are_async_after_the_same_call_of_a_tensor_without_data(
    operand: Callable[[], Tensor], threads: Ranks, processes: Ranks
) -> None:
    for ranks in (threads, processes):
        first, second = ranks(2)(sync_call_between, operand)
        assert first == second


# ---- Pending


def what_a_pending_has() -> None:
    x = random(3).requires_grad_()
    pending = gm.all_gather(x, async_op=True)
    future = pending.future().then(lambda done: done.value() * 2)
    y = pending.wait()
    assert pending.wait() is y
    assert pending.done()
    doubled = future.wait()
    torch.testing.assert_close(doubled, 2 * y.detach())
    assert not doubled.requires_grad
    more = [gm.shift(x.detach() + i, async_op=True) for i in range(3)]
    together = torch.futures.wait_all([one.future() for one in more])
    assert [t.shape for t in together] == [x.shape] * 3
    several = gm.all_reduce([x.detach(), x.detach().float()], dst=gm.R, async_op=True)
    assert [t.dtype for t in several.future().wait()] == [T, torch.float32]
    with pytest.raises(gm.OrderError, match="has no future"):
        gm.all_reduce(x.detach(), op="max", dst=gm.R, async_op=True).future()


def test_a_pending_gives_one_result_and_a_future_of_the_value_alone(threads: Ranks) -> None:
    def on_rank() -> None:
        what_a_pending_has()
        with pytest.raises(gm.OrderError, match="never waited for"):
            gm.shift(random(2))

    threads(2)(on_rank)


def failed(fn: Callable[..., Any], size: int = 2, backend: str = "threads", *args: object) -> str:
    with pytest.raises(gm.RankError) as caught:
        gm.launch(fn, size, backend=backend, args=args, timeout=60)
    return str(caught.value)


def drops_one() -> None:
    gm.all_gather(random(2), async_op=True)
    gm.shift(random(2))


def holds_one() -> gm.Pending[Tensor]:
    return gm.all_gather(random(2), async_op=True)


def joins_with_one() -> None:
    x = random(2).requires_grad_()
    with gm.ordered():
        kept = gm.all_gather(x, async_op=True)
        gm.backward(x.sum())
        kept.wait()


@pytest.mark.parametrize(
    ("fn", "line", "said"),
    [
        (drops_one, 1, "waited for"),
        (holds_one, 1, "waited for"),
        (joins_with_one, 3, "pending async collectives"),
    ],
)
def test_a_call_that_is_never_waited_for_is_an_error_that_names_its_line(
    fn: Callable[..., Any], line: int, said: str
) -> None:
    text = failed(fn)
    assert said in text
    assert f"test_pending.py:{fn.__code__.co_firstlineno + line}" in text


def test_a_call_left_behind_an_error_is_none(threads: Ranks) -> None:
    def on_rank() -> float:
        pendings = [gm.all_gather(random(2 + gm.rank()), async_op=True), gm.shift(random(2), async_op=True)]
        with pytest.raises(gm.MismatchError):
            pendings[0].wait()
        del pendings
        return gm.all_reduce(torch.tensor(1.0), dst=gm.R).item()

    assert threads(2)(on_rank) == [2.0, 2.0]


USES: dict[str, Callable[[Any, Tensor], object]] = {
    "a product": lambda pending, _: pending * 2,
    "a product from the right": lambda pending, _: 2 * pending,
    "a sum": lambda pending, x: pending + x,
    "a sum from the right": lambda pending, x: x + pending,
    "a function of torch": lambda pending, _: torch.sin(pending),
    "a list of tensors": lambda pending, x: torch.cat([x, pending]),
    "a keyword": lambda pending, x: torch.add(x, other=pending),
    "an attribute": lambda pending, _: pending.shape,
    "a method": lambda pending, _: pending.sum(),
    "an element": lambda pending, _: pending[0],
    "a number": lambda pending, _: float(pending),
    "a loop": lambda pending, _: list(pending),
    "an operand of a verb": lambda pending, _: gm.replicate(pending),
}


def used_before_the_wait(name: str) -> str:
    x = random(3)
    pending = gm.all_gather(x, async_op=True)
    with pytest.raises(gm.GradmeshError) as caught:
        USES[name](pending, x)
    assert not hasattr(pending, "shape")
    assert not hasattr(pending, "no_such_name")
    pending.wait()
    return str(caught.value)


@pytest.mark.parametrize("name", USES)
def test_a_pending_that_is_used_as_a_tensor_is_an_error_that_says_wait(name: str, threads: Ranks) -> None:
    for text in threads(2)(used_before_the_wait, name):
        assert ".wait()" in text
        assert "test_pending.py" in text


def test_another_grad_mode_at_the_wait_is_refused(threads: Ranks) -> None:
    def on_rank() -> None:
        x = random(2).requires_grad_()
        with torch.no_grad():
            pending = gm.all_gather(x, async_op=True)
        with pytest.raises(gm.OrderError, match="in another grad mode"):
            pending.wait()
        pending = gm.all_gather(x, async_op=True)
        with torch.no_grad(), pytest.raises(gm.OrderError, match="in another grad mode"):
            pending.wait()
        assert pending.wait().requires_grad

    # The first one is never waited for: the launch raises.
    with pytest.raises(gm.RankError, match="never waited for"):
        gm.launch(on_rank, 2, backend="threads")


def test_an_operand_that_is_written_meanwhile_is_refused(threads: Ranks) -> None:
    def on_rank() -> None:
        x = random(2)
        pending = gm.all_gather(x, async_op=True)
        x.add_(1)
        with pytest.raises(gm.OrderError, match="was modified in place before"):
            pending.wait()

    with pytest.raises(gm.RankError, match="never waited for"):
        gm.launch(on_rank, 2, backend="threads")


def test_deadlock_of_async_calls_is_reported_with_their_lines() -> None:
    def on_rank() -> None:
        x = random(2)
        gm.all_gather(x, async_op=True).wait()
        if gm.rank() == 0:
            gm.all_gather(x, async_op=True).wait()
        else:
            gm.all_gather(x)

    start_op = time.monotonic()
    text = failed(on_rank)
    assert time.monotonic() - start_op < 10
    assert "DeadlockError" in text
    first = on_rank.__code__.co_firstlineno
    assert f"test_pending.py:{first + 4} in on_rank  (call 2 of group '0 async'" in text
    assert f":{first + 6}" in text


def test_a_rank_that_has_returned_is_named() -> None:
    def on_rank() -> None:
        gm.all_gather(random(2), async_op=True).wait()
        if gm.rank() == 0:
            gm.all_gather(random(2), async_op=True).wait()

    assert "rank 1 has returned" in failed(on_rank)


@pytest.mark.processes
def test_calls_that_do_not_fit_are_refused_on_every_rank_at_the_wait(processes: Ranks) -> None:
    for text in processes(2)(_do_not_fit):
        assert "all_gather" in text
        assert "shift" in text
        assert "test_pending.py" in text


def _do_not_fit() -> str:
    x = random(2)
    pending = gm.all_gather(x, async_op=True) if gm.rank() else gm.shift(x, async_op=True)
    with pytest.raises(gm.MismatchError) as caught:
        pending.wait()
    assert gm.all_reduce(torch.tensor(1.0), dst=gm.R, async_op=True).wait().item() == 2
    return str(caught.value)


def test_rank_whose_async_call_raises_notifies_the_others(threads: Ranks) -> None:
    def on_rank() -> str:
        x = random(2)
        if gm.rank() == 0:
            with pytest.raises(gm.ArgumentError):
                gm.all_gather(x, dim=7, async_op=True)
            return ""
        pending = gm.all_gather(x, async_op=True)
        with pytest.raises(gm.MismatchError) as caught:
            pending.wait()
        return str(caught.value)

    assert "dim is out of range" in threads(2)(on_rank)[1]


# ---- ranks that do different things


def who_uses_what(apart: bool, ordered: bool, requires: int, rooted: bool) -> list[Any]:
    """One rank's operand requires grad or not, and one rank does not use the result."""
    x = random(3).requires_grad_(gm.rank() == requires)
    w = random(3, seed=3).requires_grad_()

    def run(x: Tensor) -> Tensor:
        made = (
            gm.broadcast(x, root=1, async_op=apart) if rooted else gm.all_reduce(x, dst=gm.R, async_op=apart)
        )
        return made.wait() if isinstance(made, gm.Pending) else made

    if ordered:
        with gm.ordered():
            y = run(x)
            gm.backward((y * w).sum() if gm.rank() == 0 else None)
    else:
        (run(x) * w).sum().mul(1 + gm.rank()).backward()
    return [None if t.grad is None else t.grad.tolist() for t in (x, w)]


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("requires", [0, 1])
@pytest.mark.parametrize("ordered", [False, True])
def test_ranks_may_differ_in_requires_grad_and_used_results(
    ordered: bool, requires: int, rooted: bool, threads: Ranks
) -> None:
    at_once = threads(2)(who_uses_what, False, ordered, requires, rooted)
    assert threads(2)(who_uses_what, True, ordered, requires, rooted) == at_once


def test_a_gradient_that_no_rank_has_is_none(threads: Ranks) -> None:
    def on_rank(apart: bool) -> bool:
        x = random(3).requires_grad_()
        made = gm.all_gather(x, async_op=apart)
        y = made.wait() if isinstance(made, gm.Pending) else made
        (g,) = torch.autograd.grad((y * x.detach().sum()).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(g.sum(), x, allow_unused=True)  # constant
        return again is None

    assert threads(2)(on_rank, True) == threads(2)(on_rank, False)


def test_batched_gradients_and_transforms_are_right(threads: Ranks) -> None:
    def on_rank(apart: bool) -> list[Any]:
        x = random(3).requires_grad_()

        def run(x: Tensor) -> Tensor:
            made = gm.all_gather(x, async_op=apart)
            return made.wait() if isinstance(made, gm.Pending) else made

        y = run(x)
        (many,) = torch.autograd.grad(y, x, torch.eye(y.numel(), dtype=T), is_grads_batched=True)
        hessian = torch.func.hessian(lambda x: run(x).pow(3).sum())(x.detach())
        _, tangent = torch.func.jvp(run, (x.detach(),), (x.detach().exp(),))
        mapped = torch.vmap(run)(torch.stack([x.detach(), x.detach() + 1]))
        return [t.tolist() for t in (many, hessian, tangent, mapped)]

    assert threads(2)(on_rank, True) == threads(2)(on_rank, False)


# ---- checkpoints


def checkpointed(apart: bool, ordered: bool) -> list[Any]:
    x, w = random(3).requires_grad_(), random(3, seed=5).requires_grad_()

    def region(x: Tensor) -> Tensor:
        made = gm.all_gather(x * w, async_op=apart)
        y = (made.wait() if isinstance(made, gm.Pending) else made).sin()
        again = gm.shift(y, async_op=apart)
        return (again.wait() if isinstance(again, gm.Pending) else again).exp()

    def loss() -> Tensor:
        return checkpoint(region, x, use_reentrant=False).sum() * (1 + gm.rank())

    if ordered:
        with gm.ordered():
            gm.backward(loss() if gm.rank() == 0 else 0 * loss())
    else:
        loss().backward()
    return [t.grad.tolist() for t in (x, w)]  # type: ignore[union-attr]


@pytest.mark.parametrize("ordered", [False, True])
def test_both_halves_in_a_checkpoint_are_right(ordered: bool, threads: Ranks) -> None:
    assert threads(2)(checkpointed, True, ordered) == threads(2)(checkpointed, False, ordered)


def test_checkpoint_with_wait_but_no_launch_raises(threads: Ranks) -> None:
    def on_rank() -> None:
        x = random(3).requires_grad_()
        pending = gm.all_gather(x.exp(), async_op=True)

        refused: list[str] = []

        def region(t: Tensor) -> Tensor:
            try:
                pending.wait()  # once it was waited for elsewhere, this is its result as any other tensor
            except gm.OrderError as error:
                refused.append(str(error))
            return t.exp()

        loss = checkpoint(region, x, use_reentrant=False).sum()
        (loss * pending.wait().sum()).backward()
        assert len(refused) == 1
        assert "in different checkpointed regions" in refused[0]

    threads(2)(on_rank)


def test_checkpoint_with_launch_but_no_wait_raises() -> None:
    def on_rank() -> None:
        x, kept = random(3).requires_grad_(), []

        def region(t: Tensor) -> Tensor:
            kept.append(gm.all_gather(t.exp(), async_op=True))
            return t.exp()

        checkpoint(region, x, use_reentrant=False)
        kept[0].wait().sum().backward()

    assert "in different checkpointed regions" in failed(on_rank)


# ---- messages


def messages_in_any_order() -> list[float]:
    x = random(2).requires_grad_()
    with gm.ordered():
        if gm.rank() == 0:
            for factor in (1.0, 10.0, 100.0):
                gm.send(x * factor, to=1, async_op=True).wait()
            gm.backward(None)
        else:
            first, second, third = (
                gm.recv(torch.empty(2, dtype=T), source=0, async_op=True) for _ in range(3)
            )
            late, early = third.wait(), first.wait()
            gm.backward((late + 2 * second.wait() + 3 * early).sum())
    return [] if x.grad is None else x.grad.tolist()


def test_messages_are_matched_in_any_order_of_waits(threads: Ranks) -> None:
    assert threads(2)(messages_in_any_order) == [[123.0, 123.0], []]


def test_a_compiled_function_takes_async_op(threads: Ranks) -> None:
    def on_rank() -> list[Any]:
        def run(x: Tensor) -> Tensor:
            pending = gm.all_gather(x, async_op=True)
            return (pending.wait() * x.sum()).sum()

        x, other = random(3).requires_grad_(), random(3).requires_grad_()
        run(x).backward()
        torch.compile(run, fullgraph=True, backend="aot_eager")(other).backward()
        return [x.grad, other.grad]

    for eager, compiled in threads(1)(on_rank):
        torch.testing.assert_close(eager, compiled)


def test_pending_calls_may_be_left_after_a_library_error(threads: Ranks) -> None:
    def on_rank() -> float:
        kept = gm.all_gather(random(2), async_op=True)
        with pytest.raises(gm.MismatchError):
            gm.all_gather(random(2 + gm.rank()))
        del kept
        return gm.all_reduce(torch.tensor(1.0), dst=gm.R).item()

    assert threads(2)(on_rank) == [2.0, 2.0]


def test_a_call_that_is_dropped_is_made_and_not_missed(threads: Ranks) -> None:
    def on_rank() -> list[float]:
        try:
            pending = gm.all_gather(random(2), async_op=True)
            raise ValueError("of the program's own")
        except ValueError:
            pending.drop()
        del pending
        return gm.all_gather(torch.tensor([1.0 + gm.rank()]), async_op=True).wait().tolist()

    assert threads(2)(on_rank) == [[1.0, 2.0]] * 2


def test_pending_receive_cannot_be_polled(threads: Ranks) -> None:
    def on_rank() -> float:
        if gm.rank() == 0:
            gm.send(torch.ones(2), to=1)
            return 1.0
        pending = gm.recv(torch.empty(2), source=0, async_op=True)
        with pytest.raises(gm.OrderError, match="cannot be polled"):
            pending.done()
        return float(pending.wait()[0])

    assert threads(2)(on_rank) == [1.0, 1.0]


def groups_that_are_destroyed() -> int:
    for _ in range(4):
        group = dist.new_group([0, 1])
        assert gm.all_gather(torch.ones(1), group, async_op=True).wait().tolist() == [1, 1]
        dist.destroy_process_group(group)
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.processes
def test_async_groups_are_freed_with_their_parent_groups(processes: Ranks) -> None:
    before = max(processes(2)(groups_that_are_destroyed))
    assert max(processes(2)(groups_that_are_destroyed)) == before


def test_single_rank_program_reports_unwaited_calls_at_its_end(forking: Forking) -> None:
    code = "import torch, gradmesh as gm; gm.init(); p = gm.all_gather(torch.ones(2), async_op=True)"
    done = forking.run(code)
    assert done.returncode == 0
    assert "never waited for" in done.stderr
    assert "all_gather at <string>:1" in done.stderr
