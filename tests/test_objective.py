"""`gm.objective`: gradients are those of the declared loss, whatever averages, accumulates or is uneven."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradmesh as gm
from gradmesh.averaging import divided_by
from tools import objectives

Ranks = Callable[[int], Callable[..., list[Any]]]
T = torch.float64


def worst(wrapper: str, meshes: list[str], masks: list[str], steps: list[int]) -> dict[str, float]:
    """What deviates from one process by more than rounding, of gradients and values."""
    wrong = {}
    for mesh in meshes:
        for mask in masks:
            for micro_batches in steps:
                sizes, counts = objectives.MESHES[mesh], objectives.MASKS[mask]
                off = max(objectives.on_rank(wrapper, sizes, counts, micro_batches))
                if not off < 1e-12:
                    wrong[f"{mesh}, {mask}, {micro_batches}"] = off
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", objectives.WRAPPERS)
def test_gradients_are_those_of_one_process_under_every_wrapper_mask_mesh_and_accumulation(
    wrapper: str, processes: Ranks
) -> None:
    everything = wrapper, list(objectives.MESHES), list(objectives.MASKS), [1, 3]
    assert processes(4)(worst, *everything) == [{}] * 4


@pytest.mark.processes
@pytest.mark.parametrize("mask", objectives.tensor_parallel_masks())
def test_tensor_parallelism_beside_data_parallelism_has_the_gradients_of_one_process(
    mask: str, processes: Ranks
) -> None:
    assert max(processes(4)(objectives.tensor_parallel, objectives.MASKS[mask])) < 1e-12


# ---- random programs


def drawn(seed: int) -> dict[str, Any]:
    """One objective over ranks: what each has, and how it is declared."""
    draw = random.Random(seed)
    size, steps = draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2, 3])
    counts = [[draw.choice([0, 1, 2, 5]) for _ in range(size)] for _ in range(steps)]
    counts[-1][draw.randrange(size)] = 3
    return {
        "seed": seed,
        "counts": counts,
        "weighted": draw.random() < 0.7,
        "local": draw.choice(["mean", "sum"]),
        "reduction": draw.choice(["mean", "sum"]),
        "divided": draw.choice([1, 1, 2, 7]),
        "kind": draw.choice(["V", "V", "R", "I"]),
        "shared": draw.random() < 0.5,
    }


def rows(case: dict[str, Any], step: int, rank: int) -> Tensor:
    # A rank without rows has a mean only where that is said to count for nothing.
    count = case["counts"][step][rank] if case["weighted"] else 1 + case["counts"][step][rank]
    generator = torch.Generator().manual_seed(1000 * case["seed"] + 10 * step + rank)
    return torch.randn(count, 3, dtype=T, generator=generator)


def own_loss(case: dict[str, Any], x: Tensor, w: Tensor, mixed: Tensor) -> Tensor:
    each = (x @ w).sin() + (x * mixed).sum(-1) ** 2
    return each.mean() if case["local"] == "mean" else each.sum()


def weight() -> Tensor:
    return torch.tensor([0.3, -1.2, 0.7], dtype=T, requires_grad=True)


def objective_on_rank(case: dict[str, Any]) -> tuple[float, list[float]]:
    """The value of all micro-batches, and the gradient after what divides it."""
    rank, w, value = gm.rank(), weight(), 0.0
    steps, kind = len(case["counts"]), getattr(gm, case["kind"])
    total = (
        sum(map(sum, case["counts"]))
        if steps > 1 and case["weighted"] and case["reduction"] == "mean"
        else None
    )
    for step in range(steps):
        x = rows(case, step, rank if kind is gm.V else 0)
        if not len(x) and case["local"] == "mean" and kind is not gm.V:
            x = torch.ones(1, 3, dtype=T)
        each = gm.replicate(w) if kind is not gm.I else w
        mixed = each.exp()
        if (
            case["shared"] and kind is not gm.I
        ):  # what ranks have is mixed, so that parameters are before a gather
            mixed = gm.all_gather((1 + rank if kind is gm.V else 1) * each.exp()).view(-1, 3).mean(0)
        loss = own_loss(case, x, each, mixed)
        loss = gm.objective(
            loss,
            reduction=case["reduction"],
            loss_type=kind,
            weights=len(x) if case["weighted"] and kind is gm.V else None,
            local=case["local"] if kind is gm.V else "mean",
            total=total if kind is gm.V else None,
            steps=steps,
            ddp=1 if kind is gm.I else case["divided"],
        )
        loss.backward()
        value += loss.item()
    assert w.grad is not None
    # replicate has added the ranks' gradients up; what averages would have divided them.
    return value, (w.grad / (1 if kind is gm.I else case["divided"])).tolist()


def objective_of_one_process(case: dict[str, Any]) -> tuple[float, list[float]]:
    w, steps, size = weight(), len(case["counts"]), len(case["counts"][0])
    losses: list[Tensor] = []
    counted = [0.0] * steps
    for step in range(steps):
        if case["kind"] != "V":
            x = rows(case, step, 0)
            if not len(x) and case["local"] == "mean":
                x = torch.ones(1, 3, dtype=T)
            losses.append(own_loss(case, x, w, w.exp()) / (steps if case["reduction"] == "mean" else 1))
            continue
        mixed = torch.stack([(1 + r) * w.exp() for r in range(size)]).mean(0) if case["shared"] else w.exp()
        terms = []
        for rank in range(size):
            x = rows(case, step, rank)
            weigh = len(x) if case["weighted"] else 1
            counted[step] += weigh
            if weigh:
                terms.append(own_loss(case, x, w, mixed) * (weigh if case["local"] == "mean" else 1))
        losses.append(torch.stack([*terms, 0 * w.sum()]).sum())
        if case["reduction"] == "mean" and not (case["weighted"] and steps > 1):
            losses[-1] = losses[-1] / (counted[step] * steps)
    loss = torch.stack(losses).sum()
    if case["kind"] == "V" and case["reduction"] == "mean" and case["weighted"] and steps > 1:
        loss = loss / sum(counted)
    (grad,) = torch.autograd.grad(loss, w)
    return loss.item(), grad.tolist()


@pytest.mark.parametrize("seeds", [range(at, at + 30) for at in range(0, 240, 30)], ids=str)
def test_random_objectives_are_those_of_one_process(seeds: range, threads: Ranks) -> None:
    for seed in seeds:
        case = drawn(seed)
        expected = objective_of_one_process(case)
        for value, grad in threads(len(case["counts"][0]))(objective_on_rank, case):
            assert value == pytest.approx(expected[0], rel=1e-12, abs=1e-13), case
            assert grad == pytest.approx(expected[1], rel=1e-11, abs=1e-13), case


# ---- what is refused, and told


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        self.outside = nn.Linear(1, 1)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two elements": (lambda: gm.objective(torch.ones(2)), "one real element"),
    "no tensor": (lambda: gm.objective(3.0), "one real element"),  # type: ignore[arg-type]
    "whole numbers": (lambda: gm.objective(torch.tensor(3)), "one real element"),
    "reduction": (lambda: gm.objective(torch.ones(()), reduction="max"), "reduction='max'"),  # type: ignore[arg-type]
    "local": (lambda: gm.objective(torch.ones(()), local="none"), "local='none'"),  # type: ignore[arg-type]
    "loss_type": (lambda: gm.objective(torch.ones(()), loss_type=gm.P), "gm.V, gm.R or gm.I"),
    "steps": (lambda: gm.objective(torch.ones(()), steps=0), "steps=0"),
    "negative": (lambda: gm.objective(torch.ones(()), weights=-1), "weights=-1"),
    "NaN": (lambda: gm.objective(torch.ones(()), weights=float("nan")), "weights=nan"),
    "nothing anywhere": (lambda: gm.objective(torch.ones(()), weights=0), "weights that add up to 0"),
    "total of a sum": (
        lambda: gm.objective(torch.ones(()), reduction="sum", total=3),
        "a sum is divided by nothing",
    ),
    "weights of one loss": (
        lambda: gm.objective(torch.ones(()), loss_type=gm.R, weights=3, local="sum"),
        "loss_type=gm.R with weights, local",
    ),
    "I averaged": (lambda: gm.objective(torch.ones(()), loss_type=gm.I, ddp=True), "no one factor"),
    "ddp": (lambda: gm.objective(torch.ones(()), ddp="yes"), "ddp='yes'"),  # type: ignore[arg-type]
    "ddp of 0": (lambda: gm.objective(torch.ones(()), ddp=0.0), "ddp=0.0"),
    "outside": (
        lambda: gm.objective(torch.ones(()), ddp=Odd()),
        "outside of the wrapper, or ignored by it: outside.weight",
    ),
}


def refusal(name: str) -> str:
    with pytest.raises(gm.ArgumentError) as caught:
        REFUSED[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_declares_no_objective_is_refused_on_every_rank(name: str, threads: Ranks) -> None:
    for text in threads(2)(refusal, name):
        assert REFUSED[name][1] in text
        assert "gradmesh.objective" in text
        assert "remedy" in text


def _two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))


def _ddp() -> nn.Module:
    m = _two_layers()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(m, ["0.weight"])
    return nn.parallel.DistributedDataParallel(m)


def _fsdp1() -> nn.Module:
    m = _two_layers()
    return FullyShardedDataParallel(
        m, ignored_modules=[m[0]], use_orig_params=True, device_id=torch.device("cpu")
    )


def _fsdp2() -> nn.Module:
    m = _two_layers()
    fully_shard(m, mesh=init_device_mesh("cpu", (2,)), ignored_params={m[0].weight})  # type: ignore[arg-type]
    return m


IGNORES: dict[str, Callable[[], nn.Module]] = {"DDP": _ddp, "FSDP1": _fsdp1, "FSDP2": _fsdp2}


def ignoring(name: str) -> str:
    m = IGNORES[name]()
    loss = m(torch.ones(1, 2)).sum()
    with pytest.raises(gm.ArgumentError) as caught:
        gm.objective(loss, ddp=m)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IGNORES)
def test_a_parameter_that_a_wrapper_ignores_is_outside_of_it(name: str, processes: Ranks) -> None:
    for text in processes(2)(ignoring, name):
        assert "ignored by it: " in text
        assert "0.weight" in text


def frozen_in_another_group() -> list[float]:
    m = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).requires_grad_(False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(m[0], mesh=mesh["b"])
    m[1].requires_grad_(True)
    fully_shard(m, mesh=init_device_mesh("cpu", (4,)))
    return [divided_by(m, gm.axis())]


@pytest.mark.processes
def test_a_frozen_group_of_another_mesh_divides_nothing(processes: Ranks) -> None:
    assert processes(4)(frozen_in_another_group) == [[4.0]] * 4


def test_a_module_without_a_wrapper_is_not_averaged(threads: Ranks) -> None:
    def gradient() -> float:
        net = nn.Linear(1, 1, bias=False)
        gm.objective(net(torch.ones(1, 1)).sum(), ddp=net).backward()
        assert net.weight.grad is not None
        return net.weight.grad.item()

    assert threads(2)(gradient) == [0.5, 0.5]


def in_ordered() -> tuple[float, list[float]]:
    """A rank without samples and without a use of what was gathered."""
    x = torch.tensor([1.0 + gm.rank()], dtype=T, requires_grad=True)
    with gm.ordered():
        y = gm.all_gather(x)
        loss = (y**2).sum() if gm.rank() else torch.zeros((), dtype=T)
        loss = gm.objective(loss, weights=3 * gm.rank(), local="sum")
        gm.backward(loss)
    assert x.grad is not None
    return loss.item(), x.grad.tolist()


def test_inside_ordered_a_rank_may_have_no_loss(threads: Ranks) -> None:
    for rank, (value, grad) in enumerate(threads(2)(in_ordered)):
        assert value == pytest.approx(5 / 3)
        assert grad == pytest.approx([2 / 3 * (1 + rank)])


def half(dtype: torch.dtype) -> tuple[float, float]:
    w = torch.tensor(1.5, dtype=dtype, requires_grad=True)
    loss = gm.objective(w * 1, weights=70000 * (1 + 2 * gm.rank()))
    loss.backward()
    assert w.grad is not None
    return loss.item(), w.grad.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_may_be_more_than_the_losss_dtype_can_tell(dtype: torch.dtype, threads: Ranks) -> None:
    assert threads(2)(half, dtype) == [(1.5, 0.25), (1.5, 0.75)]


def a_tangent() -> tuple[float, float, float]:
    w = torch.tensor(2.0, dtype=T)
    value, tangent = torch.func.jvp(
        lambda w: gm.objective(w**2 * (1 + gm.rank())), (w,), (torch.ones((), dtype=T),)
    )
    (gradient,) = torch.func.grad(lambda w: gm.objective(w**2 * (1 + gm.rank())))(w).view(1)
    return value.item(), tangent.item(), gradient.item()


def test_the_tangent_is_that_of_the_ranks_term(threads: Ranks) -> None:
    assert threads(2)(a_tangent) == [(6.0, 2.0, 2.0), (6.0, 4.0, 4.0)]


def a_refusal_on_one_rank() -> str:
    with pytest.raises(gm.GradmeshError) as caught:
        gm.objective(torch.ones(()), weights=-1 if gm.rank() else 1)
    assert gm.all_gather(torch.tensor([gm.rank()])).tolist() == [0, 1]
    return type(caught.value).__name__


def test_a_refusal_on_one_rank_is_heard_by_the_others(threads: Ranks) -> None:
    assert threads(2)(a_refusal_on_one_rank) == ["MismatchError", "ArgumentError"]


def different_objectives() -> str:
    with pytest.raises(gm.MismatchError) as caught:
        gm.objective(torch.ones(()), ddp=bool(gm.rank()))
    return str(caught.value)


def test_ranks_that_declare_different_objectives_are_refused(threads: Ranks) -> None:
    for text in threads(2)(different_objectives):
        assert "divided by 1" in text
        assert "divided by 2" in text


def totals_of_their_own(which: str) -> str:
    own = {"differ": 4 + gm.rank(), "on one": 4 if gm.rank() else None}[which]
    with pytest.raises(gm.MismatchError) as caught:
        gm.objective(torch.ones(()), weights=2, total=own)
    return str(caught.value)


def test_totals_that_are_each_ranks_own_are_refused(threads: Ranks) -> None:
    for text in threads(2)(totals_of_their_own, "differ"):
        assert "the ranks divide by different totals" in text
        assert "rank 0: total=4" in text
        assert "rank 1: total=5" in text
    for text in threads(2)(totals_of_their_own, "on one"):
        assert "with total" in text


def weights_on_one_rank() -> str:
    with pytest.raises(gm.MismatchError) as caught:
        gm.objective(torch.ones(()), weights=2 if gm.rank() else None)
    return str(caught.value)


def test_weights_on_some_ranks_alone_are_refused(threads: Ranks) -> None:
    for text in threads(2)(weights_on_one_rank):
        assert "with weights" in text


def compiled() -> list[object]:
    found: list[object] = []
    torch._dynamo.reset()

    def program(w: Tensor, count: int) -> Tensor:
        return gm.objective(w**2, weights=count)

    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        w = torch.tensor(1.0 + gm.rank(), dtype=T, requires_grad=True)
        loss = run(w, 1 + 2 * gm.rank())
        loss.backward()
        assert w.grad is not None
        found.append((loss.item(), w.grad.item()))
    return found


@pytest.mark.processes
def test_an_objective_compiles_in_one_graph(processes: Ranks) -> None:
    for eager, one_graph in processes(2)(compiled):
        assert one_graph == pytest.approx(eager)


def second_order() -> list[float]:
    x = torch.tensor(1.0 + gm.rank(), dtype=T, requires_grad=True)
    loss = gm.objective(x**3, ddp=2)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (h,) = torch.autograd.grad(g, x)
    return [loss.item(), g.item(), h.item()]


def test_a_second_derivative_is_that_of_the_scaled_term(threads: Ranks) -> None:
    assert threads(2)(second_order) == [[4.5, 3.0, 6.0], [4.5, 12.0, 12.0]]


def a_loss_summed_to_be_printed() -> list[str]:
    x = torch.tensor(1.0 + gm.rank(), requires_grad=True)
    with gm.check("full"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm.all_reduce(x**2, dst=gm.I, op="mean").backward()
        gm.all_reduce(x**2, dst=gm.I).backward()
        (3 * gm.all_reduce(x**2, dst=gm.I)).backward()  # a value that the loss is made of
    return [str(w.message) for w in caught]


@pytest.mark.processes
def test_the_full_check_names_a_backward_that_starts_from_a_sum_of_losses(processes: Ranks) -> None:
    for texts in processes(2)(a_loss_summed_to_be_printed):
        assert ["gradmesh.objective" in text for text in texts] == [True, True]
