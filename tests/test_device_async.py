"""Async calls on device tensors: they run while their stream computes, and no memory is reused too early."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.runtime.state import rank_state
from tests import simulated_device as sd
from tests.device_programs import leaf

Simulated = Callable[[int], Callable[..., list[Any]]]
LATE = 0.05
"""Seconds of a collective, or of a kernel on a slow stream."""


def group() -> sd.SimulatedGroup:
    found: Any = gm.axis().group
    return found


@contextlib.contextmanager
def slow_collectives(seconds: float = LATE) -> Iterator[sd.SimulatedGroup]:
    if sd.ON_CUDA:  # they take as long as they take
        yield group()
        return
    group().seconds = seconds
    try:
        yield group()
    finally:
        torch.accelerator.synchronize()
        group().seconds = 0.0


def finished(stream: torch.Stream) -> None:
    stream.record_event().synchronize()


def while_it_runs() -> tuple[bool, bool, list[float], bool]:
    """Whether the current stream was done before the call, and before its wait was."""
    current = torch.accelerator.current_stream()
    with slow_collectives():
        x = torch.full((2,), 1.0 + gm.rank())
        pending = gm.all_gather(x, async_op=True)
        y = x * 2
        finished(current)
        early = pending.done()
        z = pending.wait()
        waited = current.query()
        return early, waited, (z + y.repeat(2)).tolist(), pending.done()


def test_the_current_stream_computes_while_the_call_runs(simulated: Simulated) -> None:
    first, second = simulated(2)(while_it_runs)
    assert first == (False, False, [3.0, 3.0, 4.0, 4.0], True)
    assert second == (False, False, [5.0, 5.0, 6.0, 6.0], True)


def the_host_does_not_wait() -> tuple[float, list[int]]:
    with slow_collectives():
        x = torch.ones(2, requires_grad=True)
        started = time.perf_counter()
        with sd.counted() as waits:
            y = gm.all_gather(x, async_op=True).wait()
            y.sum().backward()
        return time.perf_counter() - started, [waits.total()]


@pytest.mark.timed
def test_neither_wait_nor_backward_blocks_the_host(simulated: Simulated) -> None:
    for seconds, waits in simulated(2)(the_host_does_not_wait):
        assert seconds < LATE
        assert waits == [0]


def in_backward() -> dict[str, int]:
    """The calls that were launched when the gradient of what lies between start and wait is computed."""
    found = dict[str, int]()
    x = leaf(4)
    pending = gm.all_gather(x, async_op=True)
    between = x.sin()
    y = pending.wait()
    between.register_hook(lambda grad: found.update(group().launched))
    group().launched.clear()
    ((y**2).sum() + (between * 3).sum()).backward()
    return found


def test_in_backward_the_adjoint_is_started_at_the_place_of_wait(simulated: Simulated) -> None:
    assert simulated(2)(in_backward) == 2 * [{"_reduce_scatter_base": 1}]


# ---- memory


def operand_is_kept(dropped: bool) -> Tensor:
    """Nothing but the call keeps the operand, whose memory would be overwritten at once."""
    with slow_collectives():
        pending = gm.all_gather(torch.full((3,), 1.0 + gm.rank()), async_op=True)
        if dropped and gm.rank() == 0:
            pending.drop()
            del pending
            others = [torch.full((3,), 7.0) for _ in range(3)]
            return others[0].cpu()
        others = [torch.full((3,), 7.0) for _ in range(3)]
        found = pending.wait()
        return found.cpu() if others else found


@pytest.mark.device
@pytest.mark.parametrize("dropped", [False, True])
def test_the_operand_lives_until_the_call_has_read_it(dropped: bool, simulated: Simulated) -> None:
    first, second = simulated(2)(operand_is_kept, dropped)
    assert second.tolist() == [1.0] * 3 + [2.0] * 3
    assert dropped or first.tolist() == second.tolist()


def result_on_another_stream() -> list[float]:
    """A slow stream reads the result while a later call would get its memory."""
    slow = torch.Stream(device=sd.NAME)
    sd.core().set_stream_delay(slow.stream_id, LATE)
    pending = gm.all_gather(torch.full((3,), 1.0 + gm.rank()), async_op=True)
    slow.wait_stream(torch.accelerator.current_stream())
    with slow:
        y = pending.wait()
        z = y + 1
        del y, pending
    later = [gm.all_gather(torch.full((3,), 9.0), async_op=True) for _ in range(3)]
    for each in later:
        each.wait()
    with slow:
        return z.tolist()


def test_the_result_lives_until_the_stream_that_waited_has_read_it(simulated: Simulated) -> None:
    assert simulated(2)(result_on_another_stream) == 2 * [[2.0] * 3 + [3.0] * 3]


def waited_for_on_another_stream() -> list[float]:
    """The operand is freed by a wait on another stream than the one that it belongs to."""
    side = torch.Stream(device=sd.NAME)
    with slow_collectives():
        pending = gm.all_gather(torch.full((3,), 1.0 + gm.rank()), async_op=True)
        with side:
            y = pending.wait()
        others = [torch.full((3,), 7.0) for _ in range(3)]
        with side:
            return y.tolist() if others else []


def test_the_operand_lives_until_it_was_read_whichever_stream_waits(simulated: Simulated) -> None:
    assert simulated(2)(waited_for_on_another_stream) == 2 * [[1.0] * 3 + [2.0] * 3]


def messages() -> tuple[list[float], int]:
    for number in range(3):
        if gm.rank() == 0:
            gm.send(torch.full((2,), float(number)), to=1)
        else:
            received = gm.recv(torch.empty(2), source=0)
    found = [] if gm.rank() == 0 else received.tolist()
    gm.barrier()  # the messages have arrived
    if gm.rank() == 0:
        gm.send(torch.ones(2), to=1)
    else:
        gm.recv(torch.empty(2), source=0)
    return found, len(rank_state().posted)


@pytest.mark.device
def test_sent_messages_are_freed_once_they_were_sent(simulated: Simulated) -> None:
    (_, kept), (received, _) = simulated(2)(messages)
    assert received == [2.0, 2.0]
    assert kept <= 1  # the last one may be on its way


def write_before_wait() -> str:
    x = torch.ones(3)
    pending = gm.all_gather(x, async_op=True)
    x.add_(1)
    with pytest.raises(gm.OrderError, match="modified in place before wait") as caught:
        pending.wait()
    pending.drop()
    return type(caught.value).__name__


@pytest.mark.device
def test_a_write_to_the_operand_before_wait_raises(simulated: Simulated) -> None:
    assert simulated(2)(write_before_wait) == 2 * ["OrderError"]


# ---- streams


def on_side_stream() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward on a slow side stream, backward called on the default one; and the same on the default one alone."""

    def program(x: Tensor) -> Tensor:
        pending = gm.all_gather(x * 2, async_op=True)
        between = x.exp()
        return (pending.wait() ** 3).sum(0) * between

    found = []
    for side in (None, torch.Stream(device=sd.NAME)):
        x = leaf(2, 3)
        if side is not None:
            sd.core().set_stream_delay(side.stream_id, 0.005)
            side.wait_stream(torch.accelerator.current_stream())
        with side or contextlib.nullcontext():
            loss = program(x).square().sum()
        if side is not None:
            torch.accelerator.current_stream().wait_stream(side)
        loss.backward()
        assert x.grad is not None
        found += [loss.detach().cpu(), x.grad.cpu()]
    return found[0], found[1], found[2], found[3]


def test_backward_is_right_for_a_forward_on_a_side_stream(simulated: Simulated) -> None:
    for loss, grad, loss_on_side, grad_on_side in simulated(2)(on_side_stream):
        assert torch.equal(loss, loss_on_side)
        assert torch.equal(grad, grad_on_side)


def futures() -> tuple[list[float], list[float]]:
    with slow_collectives():
        x = torch.full((2,), 1.0 + gm.rank())
        future = gm.all_reduce(x, dst=gm.R, async_op=True).future()
        doubled = future.then(lambda done: 2 * done.value())
        return doubled.wait().tolist(), future.wait().tolist()


@pytest.mark.device
def test_futures_have_the_value(simulated: Simulated) -> None:
    assert simulated(2)(futures) == 2 * [([6.0, 6.0], [3.0, 3.0])]


# ---- messages


def coalesced() -> tuple[dict[str, int], dict[str, int]]:
    x, y, z = leaf(4, 3), leaf(2, seed=1), leaf(3, seed=2).detach().float().requires_grad_()
    group().launched.clear()
    with gm.coalesce():
        pending = [gm.all_reduce(t, dst=gm.R, async_op=True) for t in (x, y, z, z * 2)]
        pending += [gm.all_gather(t, async_op=True) for t in (x, y)]
    results = [each.wait() for each in pending]
    forward = dict(group().launched)
    group().launched.clear()
    torch.autograd.backward([r.sum() for r in results])
    return forward, dict(group().launched)


def test_coalesce_sends_one_message_for_each_kind_and_dtype(simulated: Simulated) -> None:
    expected = {"allreduce": 2, "_allgather_base": 1}, {"allreduce": 2, "_reduce_scatter_base": 1}
    assert simulated(2)(coalesced) == [expected, expected]


# ---- time

HOPS, KERNELS, KERNEL, RING = 4, 8, 0.004, 0.05
ELEMENTS, SEQUENCE = ((2048, 2048), (1, 8, 8192, 64)) if sd.ON_CUDA else ((8,), (1, 2, 16, 8))


def set_kernel_delay(seconds: float) -> None:
    """On a GPU kernels take as long as they take."""
    if not sd.ON_CUDA:
        sd.core().set_stream_delay(0, seconds)


@functools.cache
def kernels() -> int:
    """How many kernels take as long as a call; on a GPU this is measured."""
    if not sd.ON_CUDA:
        return KERNELS
    x, times = leaf(*ELEMENTS).detach(), []
    for run in (lambda: gm.all_reduce(x, dst=gm.R), x.sin):
        run()
        torch.accelerator.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            run()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - started)
    return int(gm.all_reduce(torch.tensor([times[0] / times[1]]), op="max", dst=gm.R)) or 1


def chain(calls: bool, work: bool, async_op: bool) -> float:
    """Seconds of calls in a row, each beside the work of one step, forward and backward."""
    x, w, each = leaf(*ELEMENTS), leaf(*ELEMENTS, seed=1), kernels()
    set_kernel_delay(KERNEL)
    with slow_collectives(KERNELS * KERNEL):
        gm.barrier()
        started = time.perf_counter()
        y, z = x, w
        for _ in range(HOPS):
            pending = gm.all_reduce(y, dst=gm.R, async_op=True) if calls and async_op else None
            if work:
                for _ in range(each):
                    z = z.sin()
            if pending is not None:
                y = pending.wait()
            elif calls:
                y = gm.all_reduce(y, dst=gm.R)
        torch.autograd.grad([y, z], [x, w], [torch.ones_like(y), torch.ones_like(z)], allow_unused=True)
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
    set_kernel_delay(-1)
    return seconds


def attention(calls: bool, work: bool, ahead: bool) -> float:
    """Seconds of ring attention, forward and backward; `ahead`: as it is, not with every call waited for at once."""
    q, k, v = (leaf(*SEQUENCE, seed=seed) for seed in range(3))
    set_kernel_delay(KERNEL if work else 0.0)
    with slow_collectives(RING if calls else 0.0), pytest.MonkeyPatch.context() as patched:
        if not ahead:
            patched.setattr("gradmesh.nn.attention.runs_async", lambda op, x: False)
        gm.barrier()
        started = time.perf_counter()
        gm.nn.ring_attention(q, k, v).sum().backward()
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
    set_kernel_delay(-1)
    return seconds


def seconds_of(program: Callable[[bool, bool, bool], float]) -> dict[str, float]:
    """The shortest of three times each, in turn."""
    modes = {
        "work": (False, True, True),
        "calls": (True, False, True),
        "both": (True, True, True),
        "one after another": (True, True, False),
    }
    program(True, True, True)
    times = [{name: program(*mode) for name, mode in modes.items()} for _ in range(3)]
    return {name: min(each[name] for each in times) for name in modes}


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "exposed"),
    [
        (chain, 0.0),
        (attention, RING),
    ],  # nothing is left to compute when the gradients of keys and values return
)
def test_a_program_takes_as_long_as_its_work_or_its_calls(
    program: Callable[[bool, bool, bool], float], exposed: float, simulated: Simulated
) -> None:
    for seconds in simulated(2)(seconds_of, program):
        print({name: round(each, 3) for name, each in seconds.items()})
        most = max(seconds["work"], seconds["calls"])
        assert seconds["both"] - exposed < 1.1 * most, seconds
        assert seconds["one after another"] > 1.15 * seconds["both"], seconds
