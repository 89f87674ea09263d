"""The simulated device itself: values come late but right, and errors of streams and lifetimes show."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from tests import simulated_device as sd
from tests.simulated_device import build

Simulated = Callable[[int], Callable[..., list[Any]]]
LATE = 0.05
"""Seconds of a kernel or collective that the host or a stream must not have waited for."""


def side_stream() -> torch.Stream:
    return torch.Stream(device=sd.NAME)


def all_nan(x: Tensor) -> bool:
    return bool(x.cpu().isnan().all())


# ---- kernels


def values_are_late() -> tuple[bool, list[float], bool]:
    x = torch.ones(3)
    with sd.delayed(LATE):
        y = x + 1
        done = torch.accelerator.current_stream().record_event()
        early = done.query()
        return early, y.tolist(), done.query()


def test_values_are_late_and_right(simulated: Simulated) -> None:
    assert simulated(1)(values_are_late) == [(False, [2.0, 2.0, 2.0], True)]


def unsynchronised_read(wait: bool) -> Tensor:
    """A stream reads what another one, which is slow, is about to write."""
    side = side_stream()
    sd.core().set_stream_delay(0, LATE)
    try:
        x = torch.full((3,), 2.0)
        if wait:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x + 1
            return y.cpu()
    finally:
        torch.accelerator.synchronize()
        sd.core().set_stream_delay(0, -1)


@pytest.mark.timed
def test_a_read_on_another_stream_without_waiting_sees_no_value(simulated: Simulated) -> None:
    assert all_nan(simulated(1)(unsynchronised_read, False)[0])
    assert simulated(1)(unsynchronised_read, True)[0].tolist() == [3.0, 3.0, 3.0]


def freed_early(record: bool) -> Tensor:
    """A stream reads memory that was freed on another one before the kernel ran."""
    side = side_stream()
    x = torch.full((3,), 2.0)
    torch.accelerator.synchronize()
    sd.core().set_stream_delay(side.stream_id, LATE)
    with side:
        y = x + 1
        if record:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        found = y.cpu()
    assert (torch.empty(3).data_ptr() == address) is not record or record  # the next that is handed out
    return found


def test_memory_that_is_freed_early_is_poisoned(simulated: Simulated) -> None:
    assert all_nan(simulated(1)(freed_early, False)[0])
    assert simulated(1)(freed_early, True)[0].tolist() == [3.0, 3.0, 3.0]


def freed_memory() -> tuple[bool, bool, list[float]]:
    x = torch.full((5,), 2.0)
    with sd.delayed(0.01):
        y, address = x + 1, x.data_ptr()
        del x  # its kernels come first on this stream
        z = torch.empty(5)
        return z.data_ptr() == address, all_nan(z), y.tolist()


def test_freed_memory_is_handed_out_next_and_holds_nan(simulated: Simulated) -> None:
    assert simulated(1)(freed_memory) == [(True, True, [3.0] * 5)]


def in_order() -> list[float]:
    with sd.delayed(0.002):
        x = torch.zeros(1)
        for number in range(10):
            x.mul_(2).add_(number)
        return x.tolist()


def test_kernels_of_a_stream_run_in_order(simulated: Simulated) -> None:
    x = 0.0
    for number in range(10):
        x = 2 * x + number
    assert simulated(1)(in_order) == [[x]]


def in_two_streams() -> list[float]:
    """Back and forth between two streams with events."""
    side = side_stream()
    with sd.delayed(0.002):
        x = torch.ones(1)
        for _ in range(3):
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                x.mul_(3)
            torch.accelerator.current_stream().wait_stream(side)
            x.add_(1)
        return x.tolist()


def test_events_order_two_streams(simulated: Simulated) -> None:
    assert simulated(1)(in_two_streams) == [[40.0]]


def failing_kernel() -> str:
    x = torch.ones(3)
    x[torch.tensor([7])]
    with pytest.raises(RuntimeError, match="simulated device") as caught:
        x.cpu()
    return str(caught.value)


def operands_of_the_cpu() -> list[str]:
    x, own = torch.ones(3), torch.ones(3, device="cpu")
    refused = [
        lambda: x + own,
        lambda: torch.cat([x, own]),
        lambda: x.index_select(0, torch.tensor([1], device="cpu")),
        lambda: x.index_put_((torch.tensor([0]),), own[:1]),
        lambda: x.normal_(generator=torch.Generator()),
    ]
    said = []
    for call in refused:
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
    assert (x * torch.tensor(2.0, device="cpu"))[torch.tensor([1], device="cpu")].tolist() == [2.0]
    return said


@pytest.mark.skipif(sd.ON_CUDA, reason="is about the simulated device alone")
def test_operands_of_the_cpu_are_refused_as_on_a_gpu(simulated: Simulated) -> None:
    *tensors, generator = simulated(1)(operands_of_the_cpu)[0]
    assert all("same device" in text for text in tensors)
    assert "device type for generator" in generator


def test_the_error_of_a_kernel_is_raised_when_the_host_waits(simulated: Simulated) -> None:
    assert "out of bounds" in simulated(1)(failing_kernel)[0]


# ---- operators

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "max of a dim": lambda x: x.max(1),
    "max": lambda x: x.max(),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "softmax": lambda x: x.softmax(0),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(stable=True),
    "cat": lambda x: torch.cat([x, x.T.reshape(3, 4)]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "mask": lambda x: x[x > 0],
    "masked write": lambda x: x.clone().index_put_((x > 0,), torch.zeros((), device=x.device)),
    "nonzero": lambda x: (x > 0).nonzero(),
    "complex": lambda x: (torch.complex(x, -x).conj().imag + 1, torch.complex(x, x).conj() * 2),
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty(0, device=x.device)),
    "resized": lambda x: torch.empty(0, device=x.device).resize_(2).fill_(3),
    "strided": lambda x: x.T[1:, ::2].contiguous().flip(0).cumsum(0),
    "convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:, :3, None].expand(3, 3, 2)),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "scatter": lambda x: torch.zeros(3, 4, device=x.device).index_add_(
        0, torch.tensor([2, 0, 2], device=x.device), x
    ),
    "cast": lambda x: x.double().to(torch.bfloat16).float(),
    "fft": lambda x: torch.fft.rfft(x).abs(),
}


def operators() -> list[str]:
    wrong = []
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), device="cpu")
    for name, operator in OPERATORS.items():
        on_device, on_cpu = x.to(sd.NAME).requires_grad_(), x.clone().requires_grad_()
        got, expected = operator(on_device), operator(on_cpu)
        pairs: list[tuple[Any, Any]] = (
            [(got, expected)] if isinstance(got, Tensor) else list(zip(got, expected, strict=True))
        )
        if expected_grad := pairs[0][1].requires_grad:
            pairs[0][0].abs().sum().backward()
            pairs[0][1].abs().sum().backward()
            pairs.append((on_device.grad, on_cpu.grad))
        same = all(a.device.type == sd.NAME and torch.allclose(a.cpu(), b) for a, b in pairs)
        if not same:
            wrong.append(f"{name} {expected_grad}")
    return wrong


def test_operators_and_their_gradients_are_those_of_the_cpu(simulated: Simulated) -> None:
    assert simulated(1)(operators, default=False, delay=0.0005) == [[]]


# ---- the host

WAITS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "equal": (lambda x: torch.equal(x, x), 1),
    "mask": (lambda x: x[x > 0], 1),
    "bincount": (lambda x: torch.bincount(x.long()), 1),
    "synchronize": (lambda x: torch.accelerator.current_stream().synchronize(), 1),
    "copy to device": (lambda x: torch.tensor([1.0, 2.0], device=x.device), 1),
    "copy to device, not blocking": (
        lambda x: torch.ones(2, device="cpu").to(x.device, non_blocking=True),
        0,
    ),
    "bool of a tensor": (lambda x: bool((x > 0).all()), 1),
    "arithmetic": (lambda x: (x * 2 + 1).sum().sqrt().expand(3).contiguous(), 0),
    "index": (lambda x: x[torch.arange(2, device=x.device)], 0),
    "backward": (lambda x: x.clone().requires_grad_().square().sum().backward(), 0),
}


def waits_of_the_host() -> dict[str, int]:
    x, found = torch.ones(3), {}
    for name, (work, _) in WAITS.items():
        with sd.counted() as counts:
            work(x)
        found[name] = counts.total()
    return found


def test_waits_of_the_host_are_counted(simulated: Simulated) -> None:
    assert simulated(1)(waits_of_the_host) == [{name: n for name, (_, n) in WAITS.items()}]


def line_of_a_wait() -> dict[tuple[str, str], int]:
    with sd.counted() as counts:
        gm.nn.ExpertDispatch(torch.zeros(2, 1, dtype=torch.int64), 2)
        torch.ones(1).item()
    return dict(counts)


def test_waits_are_counted_by_line_of_gradmesh(simulated: Simulated) -> None:
    (found,) = simulated(1)(line_of_a_wait)
    lines = {line.partition(":")[0] for _, line in found}
    assert lines == {"nn/experts.py", "test"}
    assert found["_local_scalar_dense", "test"] == 1
    assert all(line.partition(":")[2].isdigit() for _, line in sd.waits(found))


# ---- collectives


def collective(wait: bool, keep: bool) -> tuple[float, Tensor]:
    """An all-gather that takes long: seconds of the host, and the result."""
    group: Any = gm.axis().group
    group.seconds = LATE
    try:
        x, out = torch.full((3,), 1.0 + gm.rank()), torch.empty(6)
        started = time.perf_counter()
        work = group.all_gather_single(out, x, None)
        if not keep:
            del x
            torch.empty(3).fill_(7)
        if wait:
            work.wait()
        seconds = time.perf_counter() - started
        return seconds, out.cpu()
    finally:
        torch.accelerator.synchronize()
        group.seconds = 0.0


@pytest.mark.timed
def test_waiting_for_a_collective_makes_the_stream_wait(simulated: Simulated) -> None:
    for seconds, found in simulated(2)(collective, True, True):
        assert found.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert seconds < LATE


def test_a_collective_that_is_not_waited_for_has_no_result_yet(simulated: Simulated) -> None:
    assert all(all_nan(found) for _, found in simulated(2)(collective, False, True))


def test_a_collective_whose_operand_was_freed_sends_other_values(simulated: Simulated) -> None:
    """The group keeps nothing alive, so that a caller that does not is found."""
    assert all(not set(found.tolist()) & {1.0, 2.0} for _, found in simulated(2)(collective, True, False))


def replayed_after_a_free() -> tuple[Tensor, Tensor, Tensor]:
    """What a graph computes of memory that is kept, freed in its capture, and of another one that is freed after it."""
    outside = torch.ones(64)
    with sd.captured() as graph:
        kept = torch.ones(64) + 1
        inside = torch.ones(64)
        memory, reads = sd.raw(inside), torch.zeros(64)
        del inside
        to = sd.raw(reads)
        sd.launch(lambda: to.copy_(memory))
        reads_outside = outside + 1
    del outside
    graph.replay()
    return kept.cpu(), reads.cpu(), reads_outside.cpu()


def test_a_replay_finds_no_value_in_memory_that_was_freed(simulated: Simulated) -> None:
    for kept, inside, outside in simulated(1)(replayed_after_a_free):
        assert torch.equal(kept, torch.full((64,), 2.0))
        assert all_nan(inside)
        assert all_nan(outside)


def from_cpu() -> tuple[list[float], str]:
    kind = dist.get_backend_config(gm.axis().group)
    return gm.all_gather(torch.ones(1, device="cpu")).tolist(), kind


def test_the_group_sends_cpu_tensors_too(simulated: Simulated) -> None:
    assert simulated(2)(from_cpu) == 2 * [([1.0, 1.0], "cpu:simulated,simulated:simulated")]


def alone() -> tuple[list[float], bool]:
    try:
        gm.all_gather(torch.ones(1, device="cpu"))
    except (AssertionError, RuntimeError):
        return gm.all_gather(torch.ones(1)).tolist(), True
    return [], False


def test_a_group_without_a_cpu_backend_sends_device_tensors_alone(simulated: Simulated) -> None:
    assert simulated(2)(alone, backend=sd.ALONE) == 2 * [([1.0, 1.0], True)]


# ---- where it is not available


def test_it_says_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert build.why_not() is None
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert build.why_not() == "no C++ compiler: /nowhere/c++ was not found"
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    assert build.why_not() == "the simulated device supports torch 2.11 to 2.15, not 2.16.0"
