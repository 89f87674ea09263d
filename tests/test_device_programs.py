"""Every law, verb and layer on a simulated device: values and gradients of the CPU, and how often the host waits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.ops.registry import REGISTRY
from tests import contract, device_programs
from tests import simulated_device as sd
from tests.device_programs import LAYERS, VERBS, leaf

pytestmark = pytest.mark.device
Simulated = Callable[[int], Callable[..., list[Any]]]
alone = pytest.mark.skipif(sd.ON_CUDA, reason="is about the simulated device alone")

# ---- the host

WAITS: dict[str, int] = {
    "ExpertDispatch": 1,  # the numbers of rows
    "ExpertDispatch, capacity_factor": 1,
    "ExpertParallel": 1,
    "GraphPlan": 27,  # the construction; plan.exchange and the others none
}
"""How often the host waits in a forward on two ranks; nowhere else, and in no backward."""


WAITS_ALONE: dict[str, int] = {
    **WAITS,
    'all_gather, sizes="auto"': 1,
    'all_gather, sizes="balanced"': 1,
    "scatter": 1,
    "exchange": 1,
    "clip_loss": 1,
    "clip_loss, ring": 2,
    "cached_gradients": 2,
    "vocab_parallel_cross_entropy": 1,
    "clip_grad_norm_, norm_type=0": 1,
}
"""The same, where the group has no backend for CPU tensors."""


def compared(
    names: Sequence[str],
    run: Callable[..., list[Any]],
    delay: float,
    second_order: bool,
    waits: dict[str, int] = WAITS,
    backend: str = sd.BACKEND,
) -> None:
    on_cpu = run(device_programs.on_each_rank, list(names), second_order, default=False)
    on_device = run(device_programs.on_each_rank, list(names), second_order, delay=delay, backend=backend)
    wrong = []
    for expected, got in zip(on_cpu, on_device, strict=True):
        for name in names:
            pairs = list(zip(expected[name].values, got[name].values, strict=True))
            assert pairs, name
            if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs):
                wrong.append(f"{name}: {pairs}")
            assert expected[name].waits == (0, 0)
            if sd.ON_CUDA and name == "GraphPlan":  # whose operators wait otherwise often there
                assert got[name].waits[0] < 4 * waits[name]
            elif got[name].waits != (waits.get(name, 0), 0):
                wrong.append(f"{name}: the host waits {got[name].waits} times, at {got[name].lines}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "names", [VERBS, pytest.param(LAYERS, marks=pytest.mark.slow)], ids=["verbs", "layers"]
)
def test_two_derivatives_are_those_of_the_cpu_and_the_host_does_not_wait(
    names: dict[str, Any], simulated: Simulated
) -> None:
    compared([*names], simulated(2), 0.0, True)


@alone
def test_sizes_are_read_once_where_the_group_has_no_cpu_backend(simulated: Simulated) -> None:
    names = [name for name in WAITS_ALONE if name != "GraphPlan"]
    compared([*names, "all_gather"], simulated(2), 0.0, False, WAITS_ALONE, sd.ALONE)


LATE = [
    *("all_gather", "reduce_scatter, dim=1, sizes=(1, 2)", 'all_reduce, "max"', "halo_exchange", "scan"),
    *(
        "neighbor_all_to_all",
        "exchange",
        "async all_gather",
        "coalesce",
        "no_sync",
        "ordered",
        "send and recv",
        "calls without a gradient in a checkpoint",
    ),
    *(
        "objective",
        "ring_attention",
        "clip_loss, ring",
        "cached_gradients",
        "ExpertDispatch, capacity_factor",
    ),
    *("GraphPlan, its use", "HaloConv1d", "clip_grad_norm_", "linear_cross_entropy", "SyncBatchNorm"),
]
"""Programs in which several calls and kernels depend on each other."""


def test_late_kernels_change_no_value(simulated: Simulated) -> None:
    compared(LATE, simulated(2), 0.002, False)


@pytest.mark.slow
@pytest.mark.parametrize("second_order", [False, True])
def test_late_kernels_change_no_value_of_any_program(second_order: bool, simulated: Simulated) -> None:
    compared([*VERBS, *LAYERS], simulated(2), 0.002, second_order)


def of_both_devices(first: str) -> list[Tensor]:
    """Ordered calls of operands on the CPU and on the device in turn, one of them under vmap, in a checkpoint too."""
    x = leaf(4, 3)
    y = leaf(4, 3, seed=1).detach().cpu().requires_grad_()
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "vmap": torch.func.vmap(lambda row: gm.all_reduce(row, dst=gm.R).sin()),
        "plain": lambda z: gm.shift(z).sin(),
        "checkpoint": lambda z: checkpoint(lambda t: gm.shift(gm.shift(t).sin()), z, use_reentrant=False),
    }
    with gm.ordered():
        made = [calls[first](z) for z in (y, x, y * 2, x * 2)]
        gm.backward(torch.stack([(1 + gm.rank()) * (z**2).sum().to(x.device) for z in made]).sum())
    assert x.grad is not None
    assert y.grad is not None
    return [x.grad.cpu(), y.grad]


@pytest.mark.parametrize("first", ["vmap", "plain", "checkpoint"])
def test_ordered_calls_may_change_devices(first: str, simulated: Simulated) -> None:
    on_device, on_cpu = (
        simulated(2)(of_both_devices, first),
        simulated(2)(of_both_devices, first, default=False),
    )
    for got, expected in zip(on_device, on_cpu, strict=True):
        torch.testing.assert_close(got, expected)


# ---- second derivatives


def counted_on(rank: int, times: int = 200) -> None:
    """Have the thread that runs backward on the device number more nodes on one rank, and the other one elsewhere."""
    x = leaf(2)
    y = x.sin()
    for _ in range(times):
        if gm.rank() == rank:
            torch.autograd.grad(y.sum(), x, create_graph=True)
        else:
            x.sin().exp().sum()


def twice_through_a_checkpoint(rank: int) -> list[Tensor]:
    def region(x: Tensor) -> Tensor:
        weights = torch.arange(3, dtype=torch.float64)  # on the default device, when it is recomputed too
        return gm.all_gather((gm.shift(x).sin() * weights).exp()).sin()

    counted_on(rank)
    x, scale = leaf(4, 3), 1 + gm.rank()
    with gm.ordered():
        first = checkpoint(region, x, use_reentrant=False)
        second = checkpoint(region, x * x, use_reentrant=False)
        (grad,) = gm.grad((first**2).sum() * scale + second.sum(), x, create_graph=True)
        again = gm.shift(grad) * first[:4] if gm.rank() else gm.shift(grad)
        gm.backward((again**2).sum() * scale + (second.sum() if gm.rank() else 0))
    assert x.grad is not None
    return [grad.detach().cpu(), x.grad.cpu()]


def twice(rank: int, on_this_thread: bool) -> list[Tensor]:
    counted_on(rank)
    x = leaf(4, 3)
    with torch.autograd.set_multithreading_enabled(not on_this_thread):
        (own,) = torch.autograd.grad((gm.all_gather(x).sin() ** 2).sum(), x, create_graph=True)
        y = gm.shift((own * x).sin())
        (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        loss = (1 + gm.rank()) * ((grad**2).sum() + (gm.scan(x) ** 2).sum() + (own**2).sum())
        loss.backward()
    assert x.grad is not None
    return [grad.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("rank", [0, 1])
def test_second_derivatives_do_not_depend_on_what_a_rank_has_done_before(
    rank: int, simulated: Simulated
) -> None:
    for program in (twice_through_a_checkpoint, functools.partial(twice, on_this_thread=True)):
        on_device = simulated(2)(program, rank)
        on_cpu = simulated(2)(program, rank, default=False)
        for got, expected in zip(on_device, on_cpu, strict=True):
            torch.testing.assert_close(got, expected)


def gradient_beside_a_call(on_this_thread: bool) -> str:
    """The error of a sum of a first derivative and of a call, on ranks whose threads have numbered other nodes."""
    said = [""]

    def program() -> None:
        counted_on(0, 1000)
        x = leaf(4, 3)
        try:
            with torch.autograd.set_multithreading_enabled(not on_this_thread):
                (own,) = torch.autograd.grad((gm.all_gather(x).sin() ** 2).sum(), x, create_graph=True)
                y = gm.scan(x)
                ((own**2).sum() + (y**2).sum()).backward()
            gm.barrier()  # waits for the comparison
        except gm.errors.MismatchError as error:
            said[0] = str(error)

    with contextlib.suppress(RuntimeError):  # of the kernel whose collective was aborted, at the end
        sd.on_device(program)
    return said[0]


@alone
def test_error_of_second_derivatives_outside_of_ordered_names_the_remedy_which_helps() -> None:
    if reason := sd.why_not():
        pytest.skip(reason)
    wrong = gm.launch(gradient_beside_a_call, 2, backend=sd.POOL, args=(False,), timeout=60)
    assert all("with torch.autograd.set_multithreading_enabled(False)" in text for text in wrong), wrong
    assert gm.launch(gradient_beside_a_call, 2, backend=sd.POOL, args=(True,), timeout=60) == ["", ""]


# ---- dtypes


def drawn(dtype: torch.dtype) -> Tensor:
    draws = torch.Generator().manual_seed(gm.rank())
    x = 9 * torch.randn(4, 3, dtype=torch.complex128, generator=draws, device="cpu")
    return (x if dtype.is_complex else x.real).to(dtype).to(torch.get_default_device())


def complex_calls(dtype: torch.dtype) -> list[Tensor]:
    """Values and gradients of a call for each primitive of the transport."""
    x, rank = drawn(dtype).requires_grad_(), gm.rank()
    with gm.ordered():
        results = [
            gm.all_reduce(x, dst=gm.R),
            gm.reduce(x, root=1),
            gm.reduce_scatter(x),
            gm.reduce_scatter(x, sizes=(1, 3)),
            gm.all_gather(x.conj()),
            gm.all_to_all(x, split_sizes=((2, 2), (1, 3))[rank], concat_sizes=((2, 1), (2, 3))[rank]),
            gm.broadcast(x.T, root=1),
            gm.shift(x),
        ]
        losses = [((1 + rank) * y * y.conj()).real.sum() + (y**2).imag.sum() for y in results]
        gm.backward(torch.stack(losses).sum())
    assert x.grad is not None
    return [y.detach().cpu() for y in [*results, x.grad]]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_sent_where_the_backend_has_none(
    dtype: torch.dtype, simulated: Simulated
) -> None:
    on_device, on_cpu = simulated(2)(complex_calls, dtype), simulated(2)(complex_calls, dtype, default=False)
    for got, expected in zip(on_device, on_cpu, strict=True):
        torch.testing.assert_close(got, expected)


def copied(dtype: torch.dtype) -> list[list[int]]:
    x = drawn(dtype)
    return [
        y.cpu().contiguous().view(torch.uint8).tolist() for y in (gm.all_gather(x), gm.broadcast(x.T, root=1))
    ]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fnuz], ids=str)
def test_dtypes_that_the_backend_lacks_are_sent_as_bytes(dtype: torch.dtype, simulated: Simulated) -> None:
    assert simulated(2)(copied, dtype) == simulated(2)(copied, dtype, default=False)


def refused() -> str:
    group: Any = gm.axis().group
    with pytest.raises(TypeError) as caught:
        group.allreduce([torch.zeros(2, dtype=torch.complex64)])
    return str(caught.value)


@alone
def test_the_backend_has_no_complex_dtype(simulated: Simulated) -> None:
    assert all("complex64" in text for text in simulated(2)(refused))


# ---- graphs

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce, mean": lambda x: gm.all_reduce(x, dst=gm.I, op="mean"),
    "all_gather, dim=1": lambda x: gm.all_gather(x, dim=1),
    "all_gather, sizes": lambda x: gm.all_gather(x[: 1 + gm.rank()], sizes=(1, 2)),
    "reduce_scatter": gm.reduce_scatter,
    "all_to_all": lambda x: gm.all_to_all(x, split_dim=1, concat_dim=0),
    "broadcast": lambda x: gm.broadcast(x, root=1),
    "shift": gm.shift,
    "halo_exchange": gm.halo_exchange,
    "scan": gm.scan,
    "replicate": gm.replicate,
    "async all_gather": lambda x: gm.all_gather(x, async_op=True).wait(),
}


def replayed(names: list[str]) -> dict[str, list[list[Tensor]]]:
    """Values and gradients of a captured verb for two operands, each behind those without a graph."""
    found: dict[str, list[list[Tensor]]] = {}
    for name in names:

        def made(x: Tensor, verb: Callable[[Tensor], Tensor] = PLAIN[name]) -> list[Tensor]:
            y = verb(x)
            return [y, *torch.autograd.grad(y.sin().sum() * (1 + gm.rank()), x)]

        x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
        made(x)  # NCCL connects the ranks at the first call of a kind
        with sd.captured() as graph:
            results = made(x)
        found[name] = []
        for seed in range(2):
            draws = torch.Generator().manual_seed(2 * seed + gm.rank())
            drawn = torch.randn(2, 4, dtype=torch.float64, generator=draws, device="cpu").to(x.device)
            found[name].append([y.detach().cpu() for y in made(drawn.requires_grad_())])
            with torch.no_grad():
                x.copy_(drawn)
            graph.replay()
            found[name].append([y.detach().cpu() for y in results])
        del graph, results  # CUDA does not allow it during the next capture
    return found


def test_plain_verbs_and_their_backward_can_be_captured_and_replayed(simulated: Simulated) -> None:
    for found in simulated(2)(replayed, [*PLAIN]):
        for name, runs in found.items():
            assert runs[0][0].count_nonzero(), name
            torch.testing.assert_close(runs[1], runs[0])
            torch.testing.assert_close(runs[3], runs[2])
            assert not torch.equal(runs[0][0], runs[2][0]), name


def waits_in_a_capture() -> list[str]:
    said = []
    for wait in (
        lambda: torch.ones(1).cpu(),
        lambda: torch.ones(1, device="cpu").to(sd.NAME, non_blocking=True),
        lambda: gm.nn.ExpertDispatch(torch.zeros(2, 1, dtype=torch.int64), 2),
    ):
        with sd.captured(), pytest.raises(RuntimeError) as caught:
            wait()
        said.append(str(caught.value))
    return said


@alone
def test_a_wait_and_a_copy_from_the_host_cannot_be_captured(simulated: Simulated) -> None:
    for copy_out, copy_in, dispatch in simulated(1)(waits_in_a_capture):
        assert "copy to host" in copy_out
        assert "memory of the host is copied" in copy_in
        assert "during a capture" in dispatch


# ---- the laws

QUICK = (
    "returns_fresh_memory_and_only_reads",
    "has_its_adjoint_as_backward",
    "has_itself_as_forward_derivative",
)


def on_rows(laws: Sequence[str], rows: Sequence[int]) -> int:
    axis = gm.axis()
    chosen = [law for law in contract.LAWS if law.__name__ in laws]
    return sum(contract.on_examples_of(axis, law, rows) for law in chosen)


def test_every_op_has_its_derivatives_on_a_device_whose_kernels_are_late(simulated: Simulated) -> None:
    counts = simulated(2)(on_rows, QUICK, range(len(REGISTRY)), delay=0.0005)
    assert max(counts) >= len(QUICK) * len(REGISTRY)


THIRD = ["keeps_the_law", "is_a_loop_under_vmap", "matches_dense_autograd_to_third_order"]


@pytest.mark.slow
@pytest.mark.parametrize("law", THIRD)
def test_a_few_ops_have_every_derivative(law: str, simulated: Simulated) -> None:
    assert max(simulated(2)(on_rows, [law], range(0, len(REGISTRY), 7))) > 0


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0] if sd.ON_CUDA else [0.0, 0.002])
@pytest.mark.parametrize("size", sd.SIZES)
@pytest.mark.parametrize("law", [law.__name__ for law in contract.LAWS])
def test_every_op_keeps_every_law(law: str, size: int, delay: float, simulated: Simulated) -> None:
    rows = range(len(REGISTRY)) if delay == 0 else range(0, len(REGISTRY), 4)
    assert max(simulated(size)(on_rows, [law], rows, delay=delay)) > 0
