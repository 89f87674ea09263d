"""What gradcheck says of a wrong program: the hypothesis that the numbers bear out, and the line of the collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import GradcheckReport, Input, gradcheck
from gradmesh.verify.gradients import diagnosis as h
from gradmesh.verify.gradients.diagnosis import Case
from gradmesh.verify.gradients.report import NONE_FITS, Diagnosis
from tests.gradient_programs import FAULTS, Spec, random_spec
from tests.seldom import seldom


def checked(spec: Spec) -> GradcheckReport:
    return gradcheck(
        spec.fn, spec.inputs, world_size=spec.ranks, objective=spec.objective, raise_exception=False
    )


def named(spec: Spec) -> bool:
    """Whether the fault is called by its name, and its place is the first of the suspects."""
    found = checked(spec).diagnosis
    if found is None or found.hypothesis not in spec.expected or not found.suspects:
        return False
    return spec.place in found.suspects[0].call and found.suspects[0].fixes


@pytest.mark.parametrize("seed", range(8))
def test_right_programs_pass(seed: int) -> None:
    assert checked(random_spec(seed, None)).ok


@pytest.mark.parametrize("fault", seldom(FAULTS, list(FAULTS)[::2]))
def test_a_fault_in_a_random_program_is_named_with_its_place(fault: str) -> None:
    assert [seed for seed in range(2) if not named(random_spec(seed, fault))] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_many_random_programs_are_named(fault: str) -> None:
    specs = [random_spec(seed, fault) for seed in range(100, 140)]
    assert not any(checked(spec).ok for spec in specs)
    assert sum(named(spec) for spec in specs) >= 0.95 * len(specs)


@pytest.mark.slow
def test_many_right_programs_pass() -> None:
    assert [seed for seed in range(100, 200) if not checked(random_spec(seed, None)).ok] == []


def normal(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def diagnosed(loss: Callable[..., Any], inputs: Callable[[int], Any], **options: Any) -> Diagnosis:
    report = gradcheck(loss, inputs, world_size=3, raise_exception=False, **options)
    assert not report.ok
    assert report.diagnosis is not None
    return report.diagnosis


def line_of(fn: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_a_raw_reduction_in_the_graph_is_found_by_its_line() -> None:
    def loss(x: Tensor) -> Tensor:
        total = x.sin()
        dist.all_reduce(total)
        return (1 + dist.get_rank()) * total.square().sum()

    found = diagnosed(loss, lambda r: normal(r, 3))
    assert found.hypothesis == h.SUM_MISSING
    assert f"test_diagnosis.py:{line_of(loss, 'dist.all_reduce')}" in found.suspects[0].call
    assert found.suspects[0].fixes


def test_a_raw_gather_of_detached_features_is_found_by_its_line() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        features = x @ w
        parts = [torch.empty_like(features) for _ in range(3)]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return (1 + dist.get_rank()) * torch.cat(parts).square().square().sum()

    found = diagnosed(loss, lambda r: (normal(r, 2, 3), Input(normal(9, 3, 2), gm.R)))
    assert found.hypothesis == h.SUM_MISSING
    assert f"test_diagnosis.py:{line_of(loss, 'dist.all_gather')}" in found.suspects[0].call
    assert found.suspects[0].fixes


def test_a_verb_with_the_wrong_type_is_found_by_its_line() -> None:
    def loss(x: Tensor) -> Tensor:
        near = gm.all_gather(x.sin())
        far = gm.all_gather(x.cos(), dst=gm.I)
        return (1 + gm.rank()) * (near * far.exp()).sum()

    found = diagnosed(loss, lambda r: normal(r, 3))
    assert f"test_diagnosis.py:{line_of(loss, 'dst=gm.I')}" in found.suspects[0].call
    assert len(found.suspects) == 1


def test_the_whole_gradient_of_a_replica_is_not_a_share() -> None:
    def loss(w: Tensor) -> Tensor:
        return (1 + gm.rank()) * gm.replicate(w).square().sum()

    assert diagnosed(loss, lambda r: Input(normal(9, 3), gm.R)).hypothesis == h.TWICE


def test_lower_precision_is_reported() -> None:
    def loss(x: Tensor) -> Tensor:
        return (1 + gm.rank()) * gm.all_gather(x.float()).square().sum().double()

    assert diagnosed(loss, lambda r: normal(r, 3)).hypothesis == h.PRECISION


def test_missing_path_gives_no_gradient() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (gm.all_gather(x.detach()) * w).square().sum()

    found = diagnosed(loss, lambda r: (normal(r, 3), Input(normal(9, 9), gm.R)))
    assert found.hypothesis == h.ZERO_GRAD
    assert found.names == ["inputs[0]"]


def test_noise_fits_no_hypothesis() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + normal(7 + dist.get_rank(), *grad.shape)

    def loss(x: Tensor) -> Tensor:
        return (1 + gm.rank()) * gm.all_gather(Noise.apply(x)).square().sum()

    found = diagnosed(loss, lambda r: normal(r, 2, 3))
    assert found.hypothesis == NONE_FITS
    assert not any(suspect.fixes for suspect in found.suspects)


def case(rank: int, got: Tensor, want: Tensor, terms: Tensor | None = None) -> Case:
    allowed = torch.full_like(want, 1e-9)
    return Case("x", gm.V, rank, got, None, want, terms, allowed)


@pytest.mark.parametrize(("factor", "name"), [(3.0, h.TIMES_W), (1 / 3, h.UNDER_W), (0.7, h.SCALED)])
def test_a_factor_has_to_be_the_same_on_every_rank(factor: float, name: str) -> None:
    want = [normal(rank, 6) for rank in range(3)]
    alike = [case(rank, factor * want[rank], want[rank]) for rank in range(3)]
    assert [fit.name for fit in h.fitting(alike, 3, None)] == [name]
    mixed = [*alike[:2], case(2, 1.1 * factor * want[2] + normal(5, 6), want[2])]
    assert h.fitting(mixed, 3, None) == []
