"""Gradient clipping by the norm of the dense model, of parameters that are held in every way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grad_norm_

import gradmesh as gm
from tests.clipping_programs import clipped, random_program
from tests.seldom import seldom

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]
STYLES: Any = {"0": "column", "2": "row"}


def _net(width: int = 7) -> nn.Sequential:
    """The same on every rank, also where ranks are threads and share torch's generator."""
    net = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 6), nn.LayerNorm(6)).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return net


def _x(step: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _trained(
    net: nn.Module, clip: Callable[..., Tensor], norm_type: float, split: bool = False
) -> list[float]:
    """Norms and losses of a few steps; with `split`, each data parallel rank has some of the rows."""
    optimizer, norms = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9), []
    for step in range(4):
        optimizer.zero_grad()
        x = _x(step, 6)
        x = x[gm.axis("dp").slice(6)] if split else x
        loss = (net(x) - 1).square().sum() * (gm.world_size("dp") if split else 1)
        loss.backward()
        norms.append(clip(net if split else net.parameters(), 0.5, norm_type).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf, 0.0])
def test_a_tensor_parallel_model_trains_as_the_dense_one_and_its_whole_parameters_stay_equal(
    threads: Threads, norm_type: float
) -> None:
    dense = _net()
    expected = _trained(dense, clip_grad_norm_, norm_type)

    def on_each_rank() -> tuple[list[float], dict[str, Tensor], Tensor]:
        net = gm.nn.tensor_parallel(_net(), STYLES)
        norms = _trained(copy.deepcopy(net), gm.nn.clip_grad_norm_, norm_type)  # a copy is sharded too
        assert norms == _trained(net, gm.nn.clip_grad_norm_, norm_type)
        return norms, gm.nn.dense_state_dict(net), net[3].weight.detach()  # type: ignore[index]

    found = threads(3)(on_each_rank)
    for norms, state, scale in found:
        assert norms == pytest.approx(expected, rel=1e-12)
        assert norms == found[0][0]
        assert torch.equal(scale, found[0][2])
        for name, value in dense.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm_type", seldom([2.0, math.inf], [2.0]))
@pytest.mark.parametrize("kind", ["flat", "original", "fully_shard", "fully_shard, parameters"])
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_parallel_model_in_a_sharding_wrapper_trains_as_the_dense_one(
    processes: Callable[[int], Run], kind: str, norm_type: float
) -> None:
    found = processes(4)(_in_a_wrapper, kind, norm_type)
    expected = _trained(_net(), clip_grad_norm_, norm_type)
    assert found == [found[0]] * 4
    assert found[0] == pytest.approx(expected, rel=1e-12)


def _in_a_wrapper(kind: str, norm_type: float) -> list[float]:
    mesh = gm.mesh(dp=2, tp=2)
    net: Any = gm.nn.tensor_parallel(_net(), STYLES, "tp")
    if kind.startswith("fully_shard"):
        for each in (net[2], net):
            fully_shard(each, mesh=mesh["dp"])
    else:
        net = FullyShardedDataParallel(
            net,
            process_group=gm.axis("dp").group,
            use_orig_params=kind == "original",
            device_id=torch.device("cpu"),
        )
        with pytest.raises(gm.ArgumentError, match="pass the module itself"):
            gm.nn.clip_grad_norm_(net.parameters(), 1.0)

    def clip(module: nn.Module, limit: float, norm_type: float) -> Tensor:
        given = module.parameters() if "parameters" in kind else module
        return gm.nn.clip_grad_norm_(given, limit, norm_type)

    return _trained(net, clip, norm_type, split=True)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", seldom([2, 3, 4], [3]))
def test_many_random_models_are_clipped_as_the_dense_one(processes: Callable[[int], Run], ranks: int) -> None:
    seeds = range(12)
    norms = processes(ranks)(_many, seeds)
    for seed, *found in zip(seeds, *norms, strict=True):
        program = random_program(seed, ranks)
        near = 1e-12 if program.exact else 2e-6
        for norm, right, apart, factor, _ in found:
            assert norm == pytest.approx(right, rel=near, abs=near), program
            assert apart < near, program
            assert (norm, factor) == (found[0][0], found[0][3]), program


def _many(seeds: range) -> list[tuple[float, ...]]:
    return [clipped(random_program(seed, dist.get_world_size())) for seed in seeds]


def _rank_without_experts(given: str) -> tuple[float, float]:
    experts = [nn.Linear(2, 2).double() for _ in range(3)]
    for number, each in enumerate(experts):
        for parameter in each.parameters():
            parameter.grad = torch.full_like(parameter, number + 1.0)
    router = nn.Linear(2, 3).double()
    for parameter in router.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer = gm.nn.ExpertParallel(router, lambda number: experts[number], 3, 1)
    dense = nn.ModuleList([router, *experts])
    right = torch.nn.utils.get_total_norm([p.grad for p in dense.parameters() if p.grad is not None])
    named: dict[str, Any] = {
        "module": layer,
        "parameters": list(layer.parameters()),
        "experts": list(layer.experts.parameters()),
    }
    if given == "experts":
        right = torch.nn.utils.get_total_norm([p.grad for e in experts for p in e.parameters()])
    return gm.nn.clip_grad_norm_(named[given], 1.0).item(), right.item()


@pytest.mark.parametrize("given", ["module", "parameters", "experts"])
def test_a_rank_without_experts_gets_the_norm_of_all_of_them(threads: Threads, given: str) -> None:
    torch.manual_seed(0)
    found = threads(4)(_rank_without_experts, given)
    assert [norm for norm, _ in found] == pytest.approx([found[0][1]] * 4, rel=1e-12)


def test_one_message_is_sent_whatever_the_number_of_parameters_and_axes(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(gm.rank(args[1]))
        return gm.all_gather(*args, **options)

    monkeypatch.setattr("gradmesh.nn.clipping.all_gather", counted)

    def on_each_rank() -> None:
        gm.mesh(dp=2, tp=2)
        net = nn.ModuleList(gm.nn.tensor_parallel(_net(), STYLES, axis) for axis in ("dp", "tp"))
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        gm.nn.clip_grad_norm_(net, 1.0)

    threads(4)(on_each_rank)
    assert sorted(calls) == [0, 1, 2, 3]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_shard_without_a_mark_is_refused_on_every_rank(threads: Threads, norm_type: float) -> None:
    def on_each_rank(marked: bool) -> str | float:
        own = nn.Parameter(torch.zeros(2))
        own.grad = torch.tensor([(3.0, 4.0)[gm.rank()], 0.0])
        if marked:
            assert gm.nn.mark_sharded(own) is own
        try:
            return gm.nn.clip_grad_norm_([own], 1.0, norm_type).item()
        except gm.MismatchError as error:
            return str(error)

    assert threads(2)(on_each_rank, True) == [5.0 if norm_type == 2 else 4.0] * 2
    for text in threads(2)(on_each_rank, False):
        assert "mark_sharded" in text
        assert "rank 1: norm 4" in text


def test_a_gradient_that_is_zero_but_for_rounding_is_not_taken_for_another_one(threads: Threads) -> None:
    def on_each_rank() -> float:
        own = gm.nn.mark_sharded(nn.Parameter(torch.ones(3)))
        own.grad = torch.ones(3)
        bias = nn.Parameter(torch.zeros(1))
        bias.grad = torch.tensor([1e-8 * (1 + gm.rank())])
        return gm.nn.clip_grad_norm_([own, bias], 1.0).item()

    assert threads(2)(on_each_rank) == pytest.approx([math.sqrt(6)] * 2)


def test_ranks_that_ask_for_different_norms_are_refused(threads: Threads) -> None:
    def on_each_rank() -> str:
        own = nn.Parameter(torch.zeros(1))
        own.grad = torch.ones(1)
        with pytest.raises(gm.MismatchError) as caught:
            gm.nn.clip_grad_norm_([own], 1.0 + gm.rank())
        return str(caught.value)

    for text in threads(2)(on_each_rank):
        assert "max_norm=1.0" in text
        assert "max_norm=2.0" in text


def test_rank_whose_parameters_are_rejected_notifies_the_others(threads: Threads) -> None:
    def on_each_rank() -> str:
        own: Any = nn.Parameter(torch.zeros(1))
        own.grad = torch.ones(1)
        try:
            given: Any = [own] if gm.rank() else ["weight"]
            gm.nn.clip_grad_norm_(given, 1.0)
        except gm.GradmeshError as error:
            return type(error).__name__
        return "nothing"

    assert threads(2)(on_each_rank) == ["ArgumentError", "MismatchError"]


def test_shards_on_ranks_that_do_not_take_part_are_refused(threads: Threads) -> None:
    def on_each_rank() -> str:
        gm.mesh(dp=2, tp=2)
        net = gm.nn.tensor_parallel(_net(), STYLES, "tp")
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        with pytest.raises(gm.ArgumentError) as caught:
            gm.nn.clip_grad_norm_(net, 1.0, axis="dp")
        gm.nn.clip_grad_norm_(net, 1.0, axis="tp")
        return str(caught.value)

    assert all("are not on the axis" in text for text in threads(4)(on_each_rank))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_on_one_rank_is_an_error_on_every_rank(
    threads: Threads, value: float
) -> None:
    def on_each_rank() -> tuple[bool, bool]:
        own = gm.nn.mark_sharded(nn.Parameter(torch.zeros(2)))
        own.grad = torch.tensor([1.0, value if gm.rank() == 1 else 1.0])
        with pytest.raises(RuntimeError, match="non-finite"):
            gm.nn.clip_grad_norm_([own], 1.0, error_if_nonfinite=True)
        kept = own.grad[0].item() == 1
        return kept, math.isfinite(gm.nn.clip_grad_norm_([own], 1.0).item())

    assert threads(3)(on_each_rank) == [(True, False)] * 3


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_narrow_and_complex_gradients_are_added_up_in_float32(
    threads: Threads, dtype: torch.dtype, foreach: bool | None
) -> None:
    whole = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    grad = (torch.view_as_complex(whole) if dtype.is_complex else whole).to(dtype)
    right = torch.linalg.vector_norm(grad, dtype=torch.complex128 if dtype.is_complex else torch.float64)

    def on_each_rank() -> tuple[float, float, torch.dtype]:
        own = gm.nn.mark_sharded(nn.Parameter(torch.zeros_like(gm.shard(grad))))
        own.grad = gm.shard(grad)
        norm = gm.nn.clip_grad_norm_([own], 1.0, foreach=foreach)
        after = gm.nn.get_total_norm([gm.nn.mark_sharded(own.grad)], foreach=foreach)
        return norm.item(), after.item(), norm.dtype

    for norm, after, kind in threads(3)(on_each_rank):
        assert norm == pytest.approx(right.item(), rel=2e-6)
        assert after == pytest.approx(1.0, rel=2e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5)
        assert kind is torch.float32


def test_gradient_norm_uses_the_types_of_the_parameters(threads: Threads) -> None:
    def on_each_rank() -> list[float]:
        net = gm.nn.tensor_parallel(_net(), STYLES)
        (net(_x()) - 1).square().sum().backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        return [gm.nn.get_total_norm(each, norm_type=3).item() for each in (grads, iter(grads), net)]

    dense = _net()
    (dense(_x()) - 1).square().sum().backward()
    grads = [p.grad for p in dense.parameters() if p.grad is not None]
    right = torch.nn.utils.get_total_norm(grads, norm_type=3).item()
    assert threads(2)(on_each_rank) == [pytest.approx([right] * 3, rel=1e-12)] * 2


def test_a_parametrized_weight_of_a_parallel_layer_is_still_sharded(threads: Threads) -> None:
    def on_each_rank() -> tuple[float, float]:
        layer: Any = gm.nn.ColumnParallelLinear(3, 5, bias=False)
        gm.nn.fields.spectral_norm(layer)
        copied = copy.deepcopy(layer)
        norms = []
        for each in (layer, copied):
            original = each.parametrizations.weight.original
            original.grad = torch.ones_like(original)
            norms.append(gm.nn.clip_grad_norm_(each.parameters(), 1.0).item())
        return norms[0], norms[1]

    assert threads(2)(on_each_rank) == [pytest.approx((math.sqrt(15),) * 2)] * 2


def test_one_process_uses_the_torch_function() -> None:
    for norm_type in (0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf):
        nets = [_net(), _net()]
        for net in nets:
            (net(_x()) - 1).square().sum().backward()
        nets[0][0].bias.grad = nets[1][0].bias.grad = None
        ours = gm.nn.clip_grad_norm_(nets[0].parameters(), 0.7, norm_type)
        theirs = clip_grad_norm_(nets[1].parameters(), 0.7, norm_type)
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)
        for own, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None)
            if own.grad is not None:
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-13, atol=0)
    assert gm.nn.clip_grad_norm_([], 1.0).item() == 0
    with pytest.raises(gm.ArgumentError, match="NaN"):
        gm.nn.clip_grad_norm_(_net(), 1.0, math.nan)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_pending_sums_of_dtensors_are_taken(processes: Callable[[int], Run]) -> None:
    for found in processes(2)(_pending_sums):
        assert found == pytest.approx([5.0, 0.6, 0.8, 1.0, 1.0], rel=1e-5)


def _pending_sums() -> list[float]:
    mesh = gm.mesh(tp=2)
    part = torch.tensor([3.0, 4.0]) * (0.75, 0.25)[gm.rank()]

    def made() -> nn.Parameter:
        weight = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
        weight.grad = DTensor.from_local(part.clone(), mesh, [Partial()])
        return weight

    weight = made()
    norms = [gm.nn.clip_grad_norm_([weight], 1.0).item()]
    norms += weight.grad.full_tensor().tolist()  # type: ignore[union-attr]
    weight = made()
    gm.nn.clip_grad_value_([weight], 1.0)
    return norms + weight.grad.full_tensor().tolist()  # type: ignore[union-attr]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_parallelize_module_is_clipped_as_the_dense_one(processes: Callable[[int], Run]) -> None:
    found, expected = processes(2)(_of_torch), _trained(_net(8), clip_grad_norm_, 2.0)
    assert found == [pytest.approx(expected, rel=1e-12)] * 2


def _of_torch() -> list[float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    net = _net(8)
    parallelize_module(net, gm.mesh(tp=2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _trained(net, gm.nn.clip_grad_norm_, 2.0)


@pytest.mark.parametrize("foreach", [None, True])
def test_values_of_shards_are_clipped_as_those_of_the_dense_model(
    threads: Threads, foreach: bool | None
) -> None:
    def on_each_rank() -> dict[str, Tensor]:
        net = gm.nn.tensor_parallel(_net(), STYLES)
        (net(_x()) - 1).square().sum().backward()
        gm.nn.clip_grad_value_(net, 0.4, foreach)
        other = copy.deepcopy(net)
        with torch.no_grad():
            for own, each in zip(other.parameters(), net.parameters(), strict=True):
                own.copy_(each.grad)  # type: ignore[arg-type]
        return gm.nn.dense_state_dict(other)

    dense = _net()
    (dense(_x()) - 1).square().sum().backward()
    torch.nn.utils.clip_grad_value_(dense.parameters(), 0.4)
    for found in threads(2)(on_each_rank):
        for name, each in dense.named_parameters():
            torch.testing.assert_close(found[name], each.grad, rtol=1e-12, atol=1e-14)
