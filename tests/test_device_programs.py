"""Every law, verb and layer on a simulated device: values and gradients of the CPU, and how often the host waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.ops.registry import REGISTRY
from tests import contract, device_programs
from tests import simulated_device as sd
from tests.device_programs import LAYERS, VERBS

pytestmark = pytest.mark.device
Simulated = Callable[[int], Callable[..., list[Any]]]

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
            if got[name].waits != (waits.get(name, 0), 0):
                wrong.append(f"{name}: the host waits {got[name].waits} times, at {got[name].lines}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("names", [VERBS, LAYERS], ids=["verbs", "layers"])
def test_two_derivatives_are_those_of_the_cpu_and_the_host_does_not_wait(
    names: dict[str, Any], simulated: Simulated
) -> None:
    compared([*names], simulated(2), 0.0, True)


@pytest.mark.skipif(sd.ON_CUDA, reason="needs a group of the simulated device alone")
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


@pytest.mark.parametrize("law", THIRD)
def test_a_few_ops_have_every_derivative(law: str, simulated: Simulated) -> None:
    assert max(simulated(2)(on_rows, [law], range(0, len(REGISTRY), 7))) > 0


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.002])
@pytest.mark.parametrize("size", sd.SIZES)
@pytest.mark.parametrize("law", [law.__name__ for law in contract.LAWS])
def test_every_op_keeps_every_law(law: str, size: int, delay: float, simulated: Simulated) -> None:
    rows = range(len(REGISTRY)) if delay == 0 else range(0, len(REGISTRY), 4)
    assert max(simulated(size)(on_rows, [law], rows, delay=delay)) > 0
