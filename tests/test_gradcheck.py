"""gradcheck: right programs pass in every mode, and each kind of wrong gradient fails on the ranks where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.errors import GradcheckError
from gradmesh.verify import Input, gradcheck


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(0.3))


def contrastive(towers: Towers, images: Tensor, texts: Tensor) -> Tensor:
    a, b = F.normalize(towers.image(images), dim=-1), F.normalize(towers.text(texts), dim=-1)
    labels = torch.arange(len(a)) + gm.rank() * len(a)
    scale = towers.scale.exp()
    one = F.cross_entropy(scale * a @ gm.all_gather(b).T, labels)
    return one + F.cross_entropy(scale * b @ gm.all_gather(a).T, labels)


def test_a_contrastive_model_on_four_ranks_takes_less_than_two_seconds() -> None:
    model = Towers().double()

    def inputs(rank: int) -> tuple[object, ...]:
        return copy.deepcopy(model), normal(5, 8, seed=rank), normal(5, 8, seed=9 + rank)

    reports = [gradcheck(contrastive, inputs, world_size=4) for _ in range(2)]  # the first one warms torch up
    assert all(len(report.entries) == 5 + 2 * 4 for report in reports)
    assert min(report.seconds for report in reports) < 2


def test_it_passes_in_second_order_and_forward_mode_too() -> None:
    model = Towers().double()
    report = gradcheck(
        contrastive,
        lambda r: (copy.deepcopy(model), normal(3, 8, seed=r), normal(3, 8, seed=9 + r)),
        world_size=3,
        order=2,
        forward=True,
    )
    assert {entry.mode for entry in report.entries} == {"gradient", "second gradient", "tangent"}
    assert model.image.weight.grad is None


def every_type(x: Tensor, r: Tensor, i: Tensor, p: Tensor) -> Tensor:
    """Each operand the way its type is meant."""
    rows = gm.all_gather(x, sizes="auto")
    whole = gm.all_reduce(p, dst=gm.R)
    mixed = (rows * r).abs().square().sum() + (whole * gm.replicate(i)).real.sum() ** 2
    return (1 + gm.rank()) * mixed


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("full", [False, True])
def test_every_type_has_a_separate_gradient(dtype: torch.dtype, full: bool) -> None:
    def inputs(rank: int) -> tuple[object, ...]:
        return (
            normal(1 + rank, 2, seed=rank, dtype=dtype),  # uneven
            Input(normal(2, seed=5, dtype=dtype), gm.R),
            Input(normal(2, seed=6, dtype=dtype), gm.I),
            Input(normal(2, seed=7 + rank, dtype=dtype), gm.P),
        )

    report = gradcheck(every_type, inputs, world_size=3, order=2, full=full)
    assert {entry.rank for entry in report.entries if entry.type is gm.R} == {None}
    assert {entry.rank for entry in report.entries if entry.type is gm.I} == {0, 1, 2}


@pytest.mark.parametrize(("declared", "right"), [(gm.R, True), (gm.I, False)])
def test_a_type_that_is_not_meant_fails(declared: gm.Type, right: bool) -> None:
    def loss(w: Tensor) -> Tensor:
        return (1 + dist.get_rank()) * w.square().sum()

    report = gradcheck(loss, lambda r: Input(normal(3), declared), world_size=2, raise_exception=False)
    assert report.ok is right


def test_a_small_relative_error_on_one_rank_is_seen_there_alone() -> None:
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (1 + 1e-4 * (dist.get_rank() == 1))

    def loss(x: Tensor) -> Tensor:
        return gm.all_gather(Off.apply(x)).square().sum() * (1 + gm.rank())

    report = gradcheck(loss, lambda r: normal(4, seed=r), world_size=3, raise_exception=False)
    assert [(entry.name, entry.rank) for entry in report.failed] == [("inputs[0]", 1)]


def test_an_element_that_a_direction_could_miss_is_found_by_the_full_jacobian() -> None:
    def loss(x: Tensor) -> Tensor:
        held = torch.where(torch.arange(6) == 4, x.detach(), x)
        return gm.all_gather(held).square().sum() * (1 + gm.rank())

    report = gradcheck(loss, lambda r: normal(6, seed=r), world_size=2, full=True, raise_exception=False)
    assert [entry.rank for entry in report.failed] == [0, 1]
    assert not gradcheck(loss, lambda r: normal(6, seed=r), world_size=2, raise_exception=False).ok


def test_a_loss_that_is_not_the_same_does_not_count_once() -> None:
    report = gradcheck(
        lambda x: (1 + dist.get_rank()) * x.sum(),
        lambda r: normal(3, seed=r),
        world_size=2,
        objective="replicated",
        raise_exception=False,
    )
    assert report.diagnosis is not None
    assert report.diagnosis.hypothesis == "loss not replicated"


class SumOnce(torch.autograd.Function):
    """Right in the first order; the second is lost in a raw collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


def test_a_lost_second_order_fails_in_second_order_alone() -> None:
    def loss(x: Tensor) -> Tensor:
        return (1 + dist.get_rank()) * SumOnce.apply(x).square().sum()

    assert gradcheck(loss, lambda r: normal(3, seed=r), world_size=2).ok
    report = gradcheck(loss, lambda r: normal(3, seed=r), world_size=2, order=2, raise_exception=False)
    assert {entry.mode for entry in report.failed} == {"second gradient"}


def test_a_wrong_tangent_fails_in_forward_mode_alone() -> None:
    class WrongTangent(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return 3 * tangent

    def loss(x: Tensor) -> Tensor:
        return (1 + gm.rank()) * gm.all_gather(WrongTangent.apply(x)).square().sum()

    report = gradcheck(loss, lambda r: normal(3, seed=r), world_size=2, forward=True, raise_exception=False)
    assert {entry.mode for entry in report.failed} == {"tangent"}


def test_ranks_that_use_nothing_are_checked_in_order() -> None:
    def loss(x: Tensor) -> Tensor:
        rows = gm.all_gather(x)
        return rows.square().sum() if gm.rank() == 0 else torch.zeros((), dtype=torch.float64)

    assert gradcheck(loss, lambda r: normal(3, seed=r), world_size=3, ordered=True, order=2).ok


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def sharded(module: nn.Module) -> nn.Module:
    for part in module:  # type: ignore[attr-defined]
        if isinstance(part, nn.Linear):
            fully_shard(part)
    fully_shard(module)
    return module


def ddp(module: nn.Module) -> object:
    return Input(DistributedDataParallel(module), gm.I)


@pytest.mark.parametrize("wrap", [ddp, DistributedDataParallel, sharded])
def test_wrappers_that_average_are_right_for_the_mean_of_the_losses(
    wrap: Callable[[nn.Module], object],
) -> None:
    model = net()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return (1 + dist.get_rank()) * module(x).square().mean()

    def inputs(rank: int) -> tuple[object, ...]:
        return wrap(copy.deepcopy(model)), Input(normal(2, 3, seed=rank), None)

    assert gradcheck(loss, inputs, world_size=2, objective="mean").ok
    assert not gradcheck(loss, inputs, world_size=2, raise_exception=False, diagnose=False).ok


def test_ranks_that_are_there_all_get_the_same_report(
    threads: Callable[[int], Callable[..., list[Any]]],
) -> None:
    def on_each_rank() -> str:
        def loss(x: Tensor) -> Tensor:
            return (1 + gm.rank()) * gm.all_gather(x, dst=gm.I).square().sum()

        return str(gradcheck(loss, lambda r: normal(3, seed=r), raise_exception=False))

    first, *others = threads(3)(on_each_rank)
    assert "sum over ranks missing" in first
    assert others == [first] * 2


def on_a_process() -> tuple[bool, str]:
    def right(x: Tensor) -> Tensor:
        return (1 + gm.rank()) * gm.all_gather(x).square().sum()

    def wrong(x: Tensor) -> Tensor:
        return (1 + gm.rank()) * gm.all_gather(x, dst=gm.I).square().sum()

    def inputs(rank: int) -> Tensor:
        return normal(2, 3, seed=rank)

    report = gradcheck(wrong, inputs, raise_exception=False)
    return gradcheck(right, inputs).ok, str(report)


@pytest.mark.processes
def test_it_runs_on_processes(processes: Callable[[int], Callable[..., list[Any]]]) -> None:
    first, second = processes(2)(on_a_process)
    assert first == second
    assert first[0]
    assert "sum over ranks missing" in first[1]
    assert "test_gradcheck.py" in first[1]


def test_an_error_carries_the_report() -> None:
    def loss(x: Tensor) -> Tensor:
        return gm.all_gather(x, dst=gm.I).square().sum()

    with pytest.raises(GradcheckError, match="sum over ranks missing") as caught:
        gradcheck(loss, lambda r: normal(3, seed=r), world_size=2)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report.failed  # type: ignore[attr-defined]


def loss_of_one(x: Tensor) -> Tensor:
    return x.sum()


calls = iter(range(1000))
SHARED = nn.Linear(2, 1).double()
WRONG: dict[str, tuple[Callable[..., Any], Any, dict[str, Any], str]] = {
    "no scalar": (lambda x: x, lambda r: normal(3), {}, "does not return a scalar loss"),
    "no tensor": (lambda x: 3.0, lambda r: normal(3), {}, "got       float on rank 0"),
    "no grad": (lambda x: x.detach().sum(), lambda r: normal(3), {}, "does not require grad"),
    "no grad on one rank": (
        lambda x: x.sum() if dist.get_rank() == 0 else x.detach().sum(),
        lambda r: normal(3),
        {},
        "requires_grad=False on rank 1",
    ),
    "infinite loss": (lambda x: x.sum() / 0, lambda r: torch.ones(3), {}, "inf on rank 0"),
    "no number": (lambda x: x.sum() * float("nan"), lambda r: torch.ones(3), {}, "the loss is not finite"),
    "float32 loss": (lambda x: x.float().sum(), lambda r: normal(3), {}, "not in double precision"),
    "float32 module": (lambda m: m.weight.sum(), lambda r: nn.Linear(1, 1), {}, r"call module.double\(\)"),
    "too many inputs": (loss_of_one, lambda r: (normal(3), 1), {}, "do not match the function's signature"),
    "too few on one rank": (loss_of_one, lambda r: (normal(3),) * (1 - r), {}, "got       0 inputs"),
    "replicas differ": (
        loss_of_one,
        lambda r: Input(normal(3, seed=r), gm.R),
        {},
        "differs between ranks",
    ),
    "one module on all ranks": (
        lambda m, x: gm.all_gather(m(x)).sum(),
        lambda r: (SHARED, normal(1, 2)),
        {},
        "the ranks share one module",
    ),
    "types differ": (
        loss_of_one,
        lambda r: Input(normal(3), gm.R if r else gm.I),
        {},
        "has different types on different ranks",
    ),
    "nothing to differentiate": (
        loss_of_one,
        lambda r: torch.ones(3, dtype=torch.int64),
        {},
        "no differentiable tensor",
    ),
    "not steady": (
        lambda x: x.sum() * next(calls),
        lambda r: normal(3),
        {},
        "different losses for the same inputs",
    ),
    "list of another length": (loss_of_one, [normal(3)], {}, "a list of 2"),
    "no such objective": (loss_of_one, lambda r: normal(3), {"objective": "max"}, "invalid objective"),
    "no such order": (loss_of_one, lambda r: normal(3), {"order": 3}, "invalid order"),
    "no ranks": (loss_of_one, lambda r: normal(3), {"world_size": None}, "invalid world_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_uncheckable_input_raises_with_a_remedy(case: str) -> None:
    fn, inputs, options, text = WRONG[case]
    with pytest.raises(gm.GradmeshError, match=text) as caught:
        gradcheck(fn, inputs, **{"world_size": 2, **options})
    assert "remedy" in str(caught.value)


def test_a_rank_without_a_loss_counts_as_zero_in_order() -> None:
    def loss(x: Tensor) -> Tensor | None:
        rows = gm.all_gather(x)
        return (rows**3).sum() if dist.get_rank() == 0 else None

    def wrong(x: Tensor) -> Tensor | None:
        return loss(x + x.detach())

    options: dict[str, Any] = {"world_size": 2, "ordered": True, "order": 2, "forward": True}
    assert gradcheck(loss, lambda r: normal(3, seed=r), **options).ok  # type: ignore[arg-type]
    report = gradcheck(wrong, lambda r: normal(3, seed=r), raise_exception=False, **options)  # type: ignore[arg-type]
    assert not report.ok


def test_a_function_may_write_to_its_input_in_place() -> None:
    def loss(x: Tensor) -> Tensor:
        x.mul_(2)
        return (gm.all_gather(x) ** 3).sum() * (1 + dist.get_rank())

    def wrong(x: Tensor) -> Tensor:
        return loss(x) + loss(x.detach())

    assert gradcheck(loss, lambda r: normal(3, seed=r), world_size=2, order=2, forward=True).ok
    assert not gradcheck(wrong, lambda r: normal(3, seed=r), world_size=2, raise_exception=False).ok


def test_unusable_input_raises_on_every_present_rank(
    threads: Callable[[int], Callable[..., list[Any]]],
) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.ArgumentError) as caught:
            gradcheck(lambda x: x.sum() if dist.get_rank() else x, lambda r: normal(3))
        return str(caught.value)

    first, second = threads(2)(on_each_rank)
    assert first == second
