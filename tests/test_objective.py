"""`gm.objective`: gradients are those of the declared loss, whatever averages, accumulates or is uneven."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh._torch import LastPass
from gradmesh.autograd.averaging import averaging
from gradmesh_pytest.running import World
from tests import objective_programs
from tools import objectives

Ranks = Callable[[int], Callable[..., list[Any]]]
Worlds = Callable[..., World]
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
@pytest.mark.parametrize(("backend", "steps"), [("shm", 1), ("gloo", 3)])
def test_gradients_are_those_of_one_process_under_every_wrapper_mask_mesh_and_accumulation(
    backend: str, steps: int, wrapper: str, worlds: Worlds
) -> None:
    everything = wrapper, list(objectives.MESHES), list(objectives.MASKS), [steps]
    assert worlds(4, backend, 240).run(worst, *everything) == [{}] * 4


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


# ---- wrappers that average some parameters and not others


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "shm"), (4, "gloo")])
def test_each_parameter_has_its_factor_whatever_wraps_it_and_whatever_sums_it(
    ranks: int, backend: str, worlds: Worlds
) -> None:
    assert worlds(ranks, backend, 240).run(objective_programs.deviations, range(8), ranks) == [{}] * ranks


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_programs_with_partial_wrappers(ranks: int, processes: Ranks) -> None:
    for first in range(100, 600, 100):
        found = processes(ranks)(objective_programs.deviations, range(first, first + 100), ranks)
        assert found == [{}] * ranks


def _linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(2, 2, dtype=T)


def _own(step: int = 0) -> Tensor:
    return torch.randn(3, 2, dtype=T, generator=torch.Generator().manual_seed(10 * step + gm.rank()))


def _far(found: nn.Module, loss: Callable[[nn.Module, int], Tensor], seed: int) -> float:
    """How far a linear layer's gradients are from those of the sum of the ranks' losses of another one."""
    whole = _linear(seed)
    torch.stack([loss(whole, rank) for rank in range(2)]).sum().backward()
    pairs = zip(found.parameters(), whole.parameters(), strict=True)
    return max(
        float((p.grad - q.grad).abs().max()) for p, q in pairs if p.grad is not None and q.grad is not None
    )


def layers_that_sum() -> dict[str, float]:
    """By what their gradients differ from those of one process, in and out of a wrapper."""
    torch.manual_seed(0)
    linear, conv = nn.Linear(3, 3, dtype=T), nn.Conv2d(1, 2, 3, padding=1, dtype=T)
    x, field = torch.randn(8, 3, dtype=T), torch.randn(1, 1, 7, 5, dtype=T)
    one, two = copy.deepcopy((linear, linear))
    two(one(x)).square().sum(1).mean().backward()
    sizes, halo = (4, 3), copy.deepcopy(conv)
    halo(field).square().sum().backward()
    ratios = {}

    def ratio(name: str, layer: nn.Module, whole: nn.Module) -> None:
        for (part, p), q in zip(layer.named_parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert (p.grad - q.grad).abs().max() < 1e-12, f"{name}, {part}"
            ratios[f"{name}, {part}"] = round(float((p.grad * q.grad).sum() / q.grad.square().sum()), 9)

    own = x[gm.axis().slice((5, 3))]
    first, second = copy.deepcopy((linear, linear))
    net = nn.parallel.DistributedDataParallel(nn.Sequential(first, gm.nn.Replicated(second)))
    gm.objective(net(own).square().sum(1).mean(), weights=len(own), ddp=net).backward()
    ratio("before", first, one)
    ratio("Replicated", second, two)
    outer, outside = copy.deepcopy((linear, linear))
    front = nn.parallel.DistributedDataParallel(outer)
    loss = gm.nn.Replicated(outside)(front(own)).square().sum(1).mean()
    gm.objective(loss, weights=len(own), ddp=front).backward()
    ratio("in front", outer, one)
    ratio("Replicated outside", outside, two)
    cut = gm.nn.HaloConv2d(1, 2, 3, padding=1, sizes=sizes, dtype=T)
    cut.load_state_dict(conv.state_dict())
    net = nn.parallel.DistributedDataParallel(cut)
    y = net(field[:, :, gm.axis().slice(sizes)])
    gm.objective(y.square().sum(), reduction="sum", local="sum", ddp=net).backward()
    ratio("HaloConv2d", cut, halo)
    return ratios


@pytest.mark.processes
def test_layers_that_sum_their_gradients_have_those_of_one_process_in_a_wrapper(processes: Ranks) -> None:
    for ratios in processes(2)(layers_that_sum):
        assert len(ratios) == 10
        assert set(ratios.values()) == {1.0}


def two_towers(ddp: str) -> float:
    """Two modules, each in a separate wrapper; `ddp` is one of them, or both."""
    one, two = (nn.parallel.DistributedDataParallel(_linear(seed)) for seed in (0, 1))
    loss = (one(_own()) * two(_own(1))).sum()
    gm.objective(loss, reduction="sum", ddp={"one": one, "both": nn.ModuleList([one, two])}[ddp]).backward()

    def of_rank(left: nn.Module, right: nn.Module, rank: int) -> Tensor:
        xs = [torch.randn(3, 2, dtype=T, generator=torch.Generator().manual_seed(n + rank)) for n in (0, 10)]
        whole: Tensor = (left(xs[0]) * right(xs[1])).sum()
        return whole

    left, right = _linear(0), _linear(1)
    return max(
        _far(one.module, lambda m, rank: of_rank(m, right, rank), 0),
        _far(two.module, lambda m, rank: of_rank(left, m, rank), 1),
    )


@pytest.mark.processes
@pytest.mark.parametrize("ddp", ["one", "both"])
def test_parameters_of_another_wrapper_are_averaged_too(ddp: str, processes: Ranks) -> None:
    assert max(processes(2)(two_towers, ddp)) < 1e-12


def pipeline() -> float:
    """Two stages, each in a wrapper; the last one's loss goes back through the gradient of its input."""
    first, last = (nn.parallel.DistributedDataParallel(_linear(seed)) for seed in (0, 1))
    y = first(_own())
    x = y.detach().requires_grad_()
    gm.objective(last(x).square().sum(), reduction="sum", ddp=last).backward()
    y.backward(x.grad)

    def of_rank(left: nn.Module, rank: int) -> Tensor:
        x = torch.randn(3, 2, dtype=T, generator=torch.Generator().manual_seed(rank))
        whole: Tensor = _linear(1)(left(x)).square().sum()
        return whole

    return _far(first.module, of_rank, 0)


@pytest.mark.processes
def test_gradient_of_a_leaf_activation_has_the_factor_of_the_wrapper(
    processes: Ranks,
) -> None:
    assert max(processes(2)(pipeline)) < 1e-12


def experts_sharded_over_fewer() -> list[float]:
    """Dense layers sharded over four ranks, and experts over the two that have the same ones."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("twins", "experts"))
    dense, expert = _linear(0), _linear(1 + whole["experts"].get_local_rank())
    fully_shard(dense, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(expert, mesh=whole["twins"])
    x = _own().repeat(2, 1)
    with gm.use_mesh(whole):
        h = gm.all_to_all(dense(x), "experts")
        y = gm.all_to_all(expert(h).sin(), "experts")
        gm.objective(
            y.square().sum(),
            torch.distributed.group.WORLD,
            reduction="sum",
            ddp=nn.ModuleList([dense, expert]),
        ).backward()
    layers = [_linear(seed) for seed in (0, 1, 2)]
    for rank in range(4):
        x = torch.randn(3, 2, dtype=T, generator=torch.Generator().manual_seed(rank)).repeat(2, 1)
        parts = layers[0](x).chunk(2)
        torch.stack(
            [layers[1 + n](part).sin().square().sum() for n, part in enumerate(parts)]
        ).sum().backward()
    pairs = [(dense, layers[0]), (expert, layers[1 + whole["experts"].get_local_rank()])]
    return [
        float((p.grad.full_tensor() - q.grad).abs().max())  # type: ignore[union-attr]
        for mine, other in pairs
        for p, q in zip(mine.parameters(), other.parameters(), strict=True)
    ]


@pytest.mark.processes
def test_parameters_that_are_averaged_over_different_numbers_of_ranks_have_a_factor_each(
    processes: Ranks,
) -> None:
    assert max(map(max, processes(4)(experts_sharded_over_fewer))) < 1e-12


class Hidden(nn.Module):
    """A layer that sums its own gradients, or an expert, in a reentrant checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = _linear(0), layer

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.layer, x, use_reentrant=True)


def hidden(what: str) -> str:
    if what == "replicated":
        model: nn.Module = nn.parallel.DistributedDataParallel(Hidden(gm.nn.Replicated(_linear(1))))
        wrapped, loss = model, lambda: model(_own()).sum()
    else:
        wrapped = nn.parallel.DistributedDataParallel(_linear(0))
        expert = _linear(1)
        loss = lambda: checkpoint(lambda y: expert(y), wrapped(_own()), use_reentrant=True).sum()
    with pytest.raises(gm.GradmeshError) as caught:
        gm.objective(loss(), ddp=wrapped).backward()
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("what", ["replicated", "expert"])
def test_parameters_hidden_by_a_reentrant_checkpoint_raise(what: str, processes: Ranks) -> None:
    for text in processes(2)(hidden, what):
        assert "inside a reentrant checkpoint" in text
        assert "use_reentrant=False" in text


def hidden_alike() -> float:
    model = nn.parallel.DistributedDataParallel(Hidden(_linear(1)))
    gm.objective(model(_own()).square().sum(), reduction="sum", ddp=model).backward()
    first = _linear(0)

    def of_rank(layer: nn.Module, rank: int) -> Tensor:
        x = torch.randn(3, 2, dtype=T, generator=torch.Generator().manual_seed(rank))
        whole: Tensor = layer(first(x)).square().sum()
        return whole

    return _far(model.module.layer, of_rank, 1)


@pytest.mark.processes
def test_a_reentrant_checkpoint_in_a_wrapper_is_as_ever(processes: Ranks) -> None:
    assert max(processes(2)(hidden_alike)) < 1e-12


def compiled_layers() -> list[float]:
    """A wrapper and an expert, both compiled."""
    torch._dynamo.reset()
    front = nn.parallel.DistributedDataParallel(_linear(0))
    expert = _linear(1)
    run = torch.compile(lambda x: expert(front(x)).sin(), backend="aot_eager")
    gm.objective(run(_own()).sum(), reduction="sum", ddp=front).backward()
    first = _linear(0)

    def of_rank(layer: nn.Module, rank: int) -> Tensor:
        x = torch.randn(3, 2, dtype=T, generator=torch.Generator().manual_seed(rank))
        whole: Tensor = _linear(1)(layer(x)).sin().sum()
        return whole

    mine = _linear(1)
    mine(first(_own())).sin().sum().backward()
    pairs = zip(expert.parameters(), mine.parameters(), strict=True)
    own = max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]
    return [_far(front.module, of_rank, 0), own]


@pytest.mark.processes
def test_a_compiled_region_shows_its_parameters(compiling: Ranks) -> None:
    assert max(map(max, compiling(2)(compiled_layers))) < 1e-12


def graphs_at_once() -> list[float]:
    """Two graphs that live at once, gradients that are asked for, and what is added behind the objective."""
    front, expert = nn.parallel.DistributedDataParallel(_linear(0)), _linear(1)
    losses = [
        gm.objective(expert(front(_own(step))).square().sum(), reduction="sum", ddp=front)
        for step in range(2)
    ]
    (asked,) = torch.autograd.grad(losses[0], expert.weight, retain_graph=True)
    whole = losses[0] + losses[1] + 0.1 * expert.weight.square().sum()
    whole.backward()
    mine, first = _linear(1), _linear(0)
    (alone,) = torch.autograd.grad(mine(first(_own(0))).square().sum(), mine.weight)
    wanted = torch.stack([mine(first(_own(step))).square().sum() for step in range(2)]).sum()
    (wanted + 0.1 * mine.weight.square().sum()).backward()
    assert expert.weight.grad is not None
    assert mine.weight.grad is not None
    return [float((asked - alone).abs().max()), float((expert.weight.grad - mine.weight.grad).abs().max())]


@pytest.mark.processes
def test_each_graph_and_each_pass_has_separate_factors(processes: Ranks) -> None:
    assert max(map(max, processes(2)(graphs_at_once))) < 1e-12


def warned_of(which: str) -> list[str]:
    front = nn.parallel.DistributedDataParallel(_linear(0))
    expert = _linear(1)
    with gm.check("full" if which == "number" else 1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = expert(front(_own())).square().sum()
            if which == "I":
                loss = loss + gm.all_reduce(front(_own()).sum(), dst=gm.I)
            elif which == "I, async":
                loss = loss + gm.all_reduce(front(_own()).sum(), dst=gm.I, async_op=True).wait()
            elif which == "paired":
                loss = loss + gm.replicate(gm.all_reduce(front(_own()).sum(), dst=gm.I))
            gm.objective(loss, ddp=True if which == "number" else front)
    return [str(w.message) for w in caught if issubclass(w.category, gm.CheckWarning)]


@pytest.mark.processes
@pytest.mark.parametrize("call", ["I", "I, async"])
def test_dst_i_before_an_average_is_named_once(call: str, processes: Ranks) -> None:
    for texts in processes(2)(warned_of, call):
        assert ["passes a collective with dst=gm.I" in text for text in texts] == [True]
        assert "all_reduce" in texts[0]
        assert "test_objective.py" in texts[0]
    assert processes(2)(warned_of, "paired") == [[], []]


@pytest.mark.processes
def test_the_full_check_names_parameters_that_a_number_takes_for_averaged(processes: Ranks) -> None:
    for texts in processes(2)(warned_of, "number"):
        assert texts
        assert all("parameters that no wrapper averages" in text for text in texts)
        assert "2 of 4 parameters" in texts[0]


def replicated_loss(declared: bool) -> list[str]:
    """The same loss on every rank, of gathered activations."""
    front = nn.parallel.DistributedDataParallel(_linear(0))
    with gm.check("full"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = gm.all_gather(front(_own())).square().mean()
        (gm.objective(loss, loss_type=gm.R, ddp=front) if declared else loss).backward()
    return [str(w.message) for w in caught if issubclass(w.category, gm.CheckWarning)]


@pytest.mark.processes
def test_the_full_check_is_silent_on_a_loss_that_is_declared_the_same_on_every_rank(processes: Ranks) -> None:
    assert processes(2)(replicated_loss, True) == [[], []]
    for texts in processes(2)(replicated_loss, False):
        assert ["the same on every rank is summed over the ranks" in text for text in texts] == [True]


def without_a_graph(how: str) -> list[float]:
    """An evaluation, or a rank whose loss is a constant; a transform does not show the graph."""
    front, expert = nn.parallel.DistributedDataParallel(_linear(0)), _linear(1)
    both = nn.ModuleList([front, expert])
    if how == "a constant":
        return [gm.objective(torch.tensor(1.0 + gm.rank()), ddp=both).item()]
    if how == "evaluated":
        with torch.no_grad():
            return [gm.objective(expert(front(torch.ones(1, 2, dtype=T))).sum() * 0 + 1.5, ddp=both).item()]
    with pytest.raises(gm.ArgumentError, match=r"outside of the wrapper: 1\.weight, 1\.bias"):
        torch.func.grad(lambda x: gm.objective(x * 1, ddp=both))(torch.ones((), dtype=T))
    return [1.5]


@pytest.mark.processes
@pytest.mark.parametrize("how", ["a constant", "evaluated", "transformed"])
def test_without_a_graph_there_is_a_value_or_a_refusal(how: str, processes: Ranks) -> None:
    assert processes(2)(without_a_graph, how) == [[1.5]] * 2


# ---- errors and warnings


class DeepSpeedEngine(nn.Module):
    """What DeepSpeed calls the wrapper that averages gradients."""


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two elements": (lambda: gm.objective(torch.ones(2)), "a floating-point tensor with one element"),
    "no tensor": (lambda: gm.objective(3.0), "a floating-point tensor with one element"),  # type: ignore[arg-type]
    "whole numbers": (lambda: gm.objective(torch.tensor(3)), "a floating-point tensor with one element"),
    "reduction": (lambda: gm.objective(torch.ones(()), reduction="max"), "reduction='max'"),  # type: ignore[arg-type]
    "local": (lambda: gm.objective(torch.ones(()), local="none"), "local='none'"),  # type: ignore[arg-type]
    "loss_type": (lambda: gm.objective(torch.ones(()), loss_type=gm.P), "gm.V, gm.R or gm.I"),
    "steps": (lambda: gm.objective(torch.ones(()), steps=0), "steps=0"),
    "negative": (lambda: gm.objective(torch.ones(()), weights=-1), "weights=-1"),
    "NaN": (lambda: gm.objective(torch.ones(()), weights=float("nan")), "weights=nan"),
    "nothing anywhere": (lambda: gm.objective(torch.ones(()), weights=0), "weights that add up to 0"),
    "total of a sum": (
        lambda: gm.objective(torch.ones(()), reduction="sum", total=3),
        "total= is not used with reduction",
    ),
    "weights of one loss": (
        lambda: gm.objective(torch.ones(()), loss_type=gm.R, weights=3, local="sum"),
        "loss_type=gm.R with weights, local",
    ),
    "I averaged": (
        lambda: gm.objective(torch.ones(()), loss_type=gm.I, ddp=True),
        "no single factor is right",
    ),
    "ddp": (lambda: gm.objective(torch.ones(()), ddp="yes"), "ddp='yes'"),  # type: ignore[arg-type]
    "engine": (lambda: gm.objective(torch.ones(()), ddp=DeepSpeedEngine()), "pass ddp=True if the axis has"),
    "ddp of 0": (lambda: gm.objective(torch.ones(()), ddp=0.0), "ddp=0.0"),
}


def refusal(name: str) -> str:
    with pytest.raises(gm.ArgumentError) as caught:
        REFUSED[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_objective_raises_on_every_rank(name: str, threads: Ranks) -> None:
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


def ignoring(name: str) -> list[float]:
    """How far the gradients are from those of one process: of what is ignored, this rank's own."""
    torch.manual_seed(0)
    m = IGNORES[name]()
    x = torch.ones(1, 2) + gm.rank()
    gm.objective(m(x).sum(), ddp=m).backward()
    torch.manual_seed(0)
    losses, (before, behind) = [], _two_layers().parameters()
    one = before.detach().clone().requires_grad_()
    for rank in range(2):
        first = one if rank == gm.rank() else before
        losses.append(((torch.ones(1, 2) + rank) @ first.T @ behind.T).sum() / 2)
    torch.stack(losses).sum().backward()
    found = [p.grad for p in m.parameters()]
    if name == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(m, with_grads=True):
            found = [None if p.grad is None else p.grad.clone() for p in m.parameters()]
    far = []
    for got, wanted in zip(found, (one.grad, behind.grad), strict=True):
        assert got is not None
        assert wanted is not None
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        far.append(float((got - wanted).abs().max()))
    return far


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IGNORES)
def test_a_parameter_that_a_wrapper_ignores_has_the_gradient_of_the_loss(name: str, processes: Ranks) -> None:
    for far in processes(2)(ignoring, name):
        assert max(far) < 1e-6


def frozen_in_another_group() -> list[float]:
    m = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).requires_grad_(False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(m[0], mesh=mesh["b"])
    m[1].requires_grad_(True)
    fully_shard(m, mesh=init_device_mesh("cpu", (4,)))
    return [averaging(m, gm.axis()).divisor]


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


def test_error_on_one_rank_notifies_the_others(threads: Ranks) -> None:
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


def test_rank_local_totals_raise(threads: Ranks) -> None:
    for text in threads(2)(totals_of_their_own, "differ"):
        assert "total= differs between ranks" in text
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
def test_an_objective_compiles_in_one_graph(compiling: Ranks) -> None:
    for eager, one_graph in compiling(2)(compiled):
        assert one_graph == pytest.approx(eager)


def second_order() -> list[float]:
    x = torch.tensor(1.0 + gm.rank(), dtype=T, requires_grad=True)
    loss = gm.objective(x**3, ddp=2)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (h,) = torch.autograd.grad(g, x)
    return [loss.item(), g.item(), h.item()]


def test_a_second_derivative_is_that_of_the_scaled_term(threads: Ranks) -> None:
    assert threads(2)(second_order) == [[4.5, 3.0, 6.0], [4.5, 12.0, 12.0]]


def a_loss_summed_to_be_printed(wrapper: str) -> list[str]:
    x = torch.ones(2, dtype=T) * (1 + gm.rank())
    net: nn.Module = _linear(0)
    if wrapper == "DDP":
        net = nn.parallel.DistributedDataParallel(net)
    elif wrapper == "FSDP1":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    elif wrapper == "FSDP2":
        fully_shard(net)
    else:
        for parameter in net.parameters():
            parameter.data *= 1 + gm.rank()
    if wrapper == "ignored by DDP":
        whole = nn.Sequential(net, nn.Linear(1, 1, dtype=T))
        ignored = [f"0.{name}" for name, _ in net.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, ignored)
        kept = DistributedDataParallel(whole)  # as long as the losses are computed
        assert kept.parameters_to_ignore
    with gm.check("full"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm.all_reduce((net(x) ** 2).sum(), dst=gm.I, op="mean").backward()
        gm.all_reduce((net(x) ** 2).sum(), dst=gm.I).backward()
    return [str(w.message) for w in caught if issubclass(w.category, gm.CheckWarning)]


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["none", "ignored by DDP", "DDP", "FSDP1", "FSDP2"])
def test_the_full_check_names_a_backward_from_a_sum_of_losses_that_a_wrapper_averages(
    wrapper: str, processes: Ranks
) -> None:
    for texts in processes(2)(a_loss_summed_to_be_printed, wrapper):
        assert ["gradmesh.objective" in text for text in texts] == [True] * 2 * wrapper.startswith(
            ("DDP", "FSDP")
        )


class Gained(nn.Module):
    """A layer, and a gain that is applied by way of `gm.replicate` or after a gather."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.layer, self.gain, self.gathers = nn.Linear(3, 1), nn.Parameter(torch.tensor(0.5)), gathers
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return gm.all_gather(y) * self.gain if self.gathers else y * gm.replicate(self.gain)


def gain_gradients(gathers: bool, of_loss: bool) -> list[float]:
    """The gradients of the gain over two steps where the loss, or the whole module, is compiled."""
    inner: Any = Gained(gathers)
    model = DistributedDataParallel(inner if of_loss else torch.compile(inner, backend="eager"))

    def mean(y: Tensor) -> Tensor:
        return y.square().mean()

    loss = torch.compile(mean, backend="aot_eager") if of_loss else mean
    found = []
    for _ in range(2):
        model.zero_grad()
        gm.objective(loss(model(torch.ones(2, 3))), ddp=model).backward()
        found.append(float(inner.gain.grad))
    return found


@pytest.mark.torch_at_least("2.11", "Dynamo compiles on one thread at a time")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by Dynamo, of its own inputs
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("of_loss", [False, True])
def test_compiling_on_one_rank_changes_no_factor_on_another(gathers: bool, of_loss: bool) -> None:
    torch._dynamo.reset()
    found = gm.launch(gain_gradients, 3, backend="threads", args=(gathers, of_loss))
    assert found == [[9.0, 9.0]] * 3  # the slope of (3 t)^2 at a half


def test_a_parameter_that_is_wrapped_after_it_was_looked_up_is_averaged() -> None:
    def on_each_rank() -> float:
        first, second = DistributedDataParallel(nn.Linear(3, 1)), nn.Linear(1, 1, bias=False)
        for parameter in (*first.parameters(), *second.parameters()):
            nn.init.ones_(parameter)
        x = torch.ones(2, 3)
        gm.objective(second(first(x)).mean(), ddp=first).backward()
        second.zero_grad()
        wrapped = DistributedDataParallel(second)
        gm.objective(wrapped(first(x)).mean(), ddp=first).backward()
        return float(second.weight.grad)  # type: ignore[arg-type]

    assert gm.launch(on_each_rank, 3, backend="threads") == [4.0] * 3


def test_a_wrapper_that_torch_refused_is_passed_over() -> None:
    def on_each_rank() -> float:
        model, outside = DistributedDataParallel(nn.Linear(3, 1)), nn.Parameter(torch.tensor(0.5))
        refused = None
        try:
            DistributedDataParallel(nn.ReLU())
        except RuntimeError as error:
            refused = error  # which holds the frame, and that the module
        with torch.no_grad():
            value = model(torch.ones(2, 3)).mean()
        gm.objective(model(torch.ones(2, 3)).mean() * gm.replicate(outside), ddp=model).backward()
        assert refused is not None
        return float((outside.grad - value).abs())

    assert max(gm.launch(on_each_rank, 2, backend="threads")) < 1e-6


def test_a_loss_that_is_a_parameter_outside_of_the_wrapper_is_not_multiplied() -> None:
    def on_each_rank() -> float:
        model, alone = DistributedDataParallel(nn.Linear(3, 1)), nn.Parameter(torch.tensor(2.0))
        gm.objective(alone, ddp=model).backward()
        return float(alone.grad)  # type: ignore[arg-type]

    assert gm.launch(on_each_rank, 4, backend="threads") == [0.25] * 4  # its share of the mean


@pytest.mark.parametrize("frozen", [375, 100_000])
def test_wrappers_are_found_unless_the_program_has_frozen_them(
    frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_each_rank() -> float:
        model, alone = DistributedDataParallel(nn.Linear(3, 1)), nn.Parameter(torch.tensor(2.0))
        gm.objective(alone, ddp=model).backward()
        return float(alone.grad)  # type: ignore[arg-type]

    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)  # Python 3.12 freezes some hundred objects
    if frozen < 1000:
        assert gm.launch(on_each_rank, 2, backend="threads") == [0.5] * 2
    else:
        with pytest.raises(gm.RankError, match=r"after gc\.freeze\(\) other wrappers cannot be found"):
            gm.launch(on_each_rank, 2, backend="threads")


def test_the_objectives_of_a_graph_that_is_kept_do_not_pile_up() -> None:
    def on_each_rank() -> int:
        model, alone = DistributedDataParallel(nn.Linear(3, 1)), nn.Parameter(torch.tensor(2.0))
        kept = gm.replicate(alone)
        for _ in range(20):
            gm.objective(model(torch.ones(2, 3)).mean() * kept, ddp=model).backward(retain_graph=True)
        gc.collect()
        return sum(type(each) is LastPass for each in gc.get_objects())

    assert max(gm.launch(on_each_rank, 2, backend="threads")) < 10


def _accumulated(sizes: tuple[tuple[int, ...], tuple[int, ...]], mode: str) -> list[float]:
    """A rank's reduced gradient over micro-batches of these sizes."""
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.ones(3))
    own = rows[gm.axis().slice([sum(each) for each in sizes])]
    total = gm.all_reduce(torch.tensor(len(own)), dst=gm.I)
    batches = own.split(sizes[gm.rank()])
    kwargs: dict[str, Any] = {"total": total} if mode == "total" else {"steps": len(batches)}
    for batch in batches:
        loss = (batch @ gm.replicate(weight)).square().mean()
        gm.objective(loss, weights=len(batch), **kwargs).backward()
    return [] if weight.grad is None else weight.grad.tolist()


@pytest.mark.parametrize(
    ("mode", "sizes", "is_right"),
    [
        ("steps", ((4, 1), (2, 3)), False),
        ("steps", ((4, 1, 2), (2, 3, 1)), False),
        ("steps", ((4, 1), (1, 4)), True),  # unequal ranks, equal totals
        ("total", ((4, 1), (2, 3)), True),
    ],
)
def test_unequal_micro_batches_need_total_and_equal_ones_do_not(
    mode: str, sizes: tuple[tuple[int, ...], tuple[int, ...]], is_right: bool
) -> None:
    count = sum(map(sum, sizes))
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))[:count]
    weight = torch.ones(3, requires_grad=True)
    (rows @ weight).square().mean().backward()
    assert weight.grad is not None
    for gradient in gm.launch(_accumulated, 2, backend="threads", args=(sizes, mode)):
        assert torch.allclose(torch.tensor(gradient), weight.grad, rtol=1e-5) is is_right
