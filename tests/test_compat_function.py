"""The drop-ins that are autograd Functions: called, driven by hand, subclassed, in every autodiff mode."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable

import gradmesh as gm
from gradmesh.compat import fairchem, gp_utils, megatron
from gradmesh.compat.ksuit import AllGatherGradAutograd
from gradmesh.compat.towhee import AllGather

Result = Tensor | tuple[Tensor, ...]
SIZE = 2
ARGS = SimpleNamespace(world_size=SIZE, local_rank=0)


@dataclass(frozen=True)
class Case:
    """A Function, the arguments that follow the tensor, and the same map by the verbs."""

    function: Any
    others: tuple[Any, ...]
    verb: Callable[[Tensor], Result]


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.chunk(SIZE))


CASES = {
    "towhee": Case(AllGather, (ARGS,), lambda x: gm.all_gather(x, dst=gm.I)),
    "ksuit": Case(AllGatherGradAutograd, (), lambda x: tuple(gm.all_gather(x.unsqueeze(0)).unbind(0))),
    "copy": Case(gp_utils.CopyToModelParallelRegion, (), gm.replicate),
    "reduce": Case(gp_utils.ReduceFromModelParallelRegion, (), lambda x: gm.all_reduce(x, dst=gm.I)),
    "scatter": Case(gp_utils.ScatterToModelParallelRegion, (0,), lambda x: gm.shard(x)),
    "gather": Case(
        gp_utils.GatherFromModelParallelRegion, (-1,), lambda x: gm.all_gather(x, None, -1, dst=gm.I)
    ),
    "gather, sum": Case(
        gp_utils.GatherFromModelParallelRegionSumGrad, (1,), lambda x: gm.all_gather(x, None, 1)
    ),
    "fairchem reduce": Case(fairchem.ReduceFromModelParallelRegion, (), lambda x: gm.all_reduce(x, dst=gm.I)),
    "fairchem sum": Case(fairchem.AllReduceSumWithGrad, (), lambda x: gm.all_reduce(x, dst=gm.R)),
    "fairchem scatter": Case(fairchem.ScatterToModelParallelRegion, (1,), lambda x: gm.shard(x)),
    "fairchem parts": Case(
        fairchem.GatherFromModelParallelRegionGradPadded, (), lambda x: halves(gm.all_gather(x, dst=gm.I))
    ),
    "fairchem parts, sum": Case(
        fairchem.GatherFromModelParallelRegionSumGradPadded, (), lambda x: halves(gm.all_gather(x))
    ),
    "megatron copy": Case(megatron._CopyToModelParallelRegion, (None,), gm.replicate),
    "megatron reduce": Case(
        megatron._ReduceFromModelParallelRegion, (None,), lambda x: gm.all_reduce(x, dst=gm.I)
    ),
    "megatron scatter": Case(megatron._ScatterToModelParallelRegion, (None,), lambda x: gm.shard(x, dim=-1)),
    "megatron gather": Case(
        megatron._GatherFromModelParallelRegion, (None,), lambda x: gm.all_gather(x, dim=-1, dst=gm.I)
    ),
    "megatron scatter to sequence": Case(
        megatron._ScatterToSequenceParallelRegion, (None,), lambda x: gm.shard(x)
    ),
    "megatron gather from sequence": Case(
        megatron._GatherFromSequenceParallelRegion, (None, True, None, False), lambda x: gm.all_gather(x)
    ),
    "megatron gather from sequence, repeated work": Case(
        megatron._GatherFromSequenceParallelRegion,
        (None, False, None, False),
        lambda x: gm.all_gather(x, dst=gm.I),
    ),
    "megatron reduce_scatter to sequence": Case(
        megatron._ReduceScatterToSequenceParallelRegion, (None, None, False), lambda x: gm.reduce_scatter(x)
    ),
    "megatron all_gather": Case(
        megatron._AllGatherFromTensorParallelRegion, (None,), lambda x: gm.all_gather(x, dim=-1)
    ),
    "megatron reduce_scatter": Case(
        megatron._ReduceScatterToTensorParallelRegion, (None,), lambda x: gm.reduce_scatter(x, dim=-1)
    ),
}
FUNCTIONS = [
    *dict.fromkeys(case.function for case in CASES.values()),
    gp_utils.ScaleBackwardGrad,
    megatron._AllToAll,
    fairchem.AllToAllCollect,
]
every_case = pytest.mark.parametrize("name", list(CASES))


@contextmanager
def graph_parallel() -> Iterator[int]:
    """One graph for all ranks; gives the rank."""
    gp_utils.setup_graph_parallel_groups(dist.get_world_size(), None)
    try:
        yield gp_utils.get_gp_rank()
    finally:
        gp_utils.cleanup_gp()


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def listed(result: Result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def loss(result: Result, rank: int) -> Tensor:
    """A curved function that differs from rank to rank."""
    return sum(((1 + rank) * (1 + i) * torch.sin(part)).sum() for i, part in enumerate(listed(result)))


# ---- What they are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_autograd_functions_with_static_methods(function: Any) -> None:
    assert function.__mro__.count(Function) == 1
    for name in ("forward", "backward", "jvp", "vjp"):
        assert isinstance(inspect.getattr_static(function, name), staticmethod)
    assert next(iter(inspect.signature(function.forward).parameters)) == "ctx"
    assert "_backward_cls" in vars(function)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_classes_are_pickled_by_name(function: Any) -> None:
    assert pickle.loads(pickle.dumps(function)) is function


# ---- apply, in every mode ---------------------------------------------------------------------------------


def _modes(name: str) -> None:
    case = CASES[name]
    with graph_parallel() as rank:
        x, along = random(rank, 4, 2), random(10 + rank, 4, 2)
        ours = lambda x: case.function.apply(x, *case.others)
        # Sizes that every rank has alike, since jacrev and jacfwd seed the ranks one entry after the other.
        for mode in (
            lambda run: torch.func.jvp(run, (x,), (along,)),
            lambda run: torch.func.vmap(run)(torch.stack([x, along])),
            lambda run: torch.func.vmap(run, in_dims=1)(torch.stack([x, along], 1)),
            lambda run: torch.func.grad(lambda x: loss(run(x), rank))(x),
            lambda run: torch.func.hessian(lambda x: loss(run(x), rank))(x),
            lambda run: torch.func.vmap(torch.func.grad(lambda x: loss(run(x), rank)))(
                torch.stack([x, along])
            ),
            lambda run: torch.func.jacfwd(run)(x),
            lambda run: torch.func.jacrev(run)(x),
        ):
            torch.testing.assert_close(mode(ours), mode(case.verb))


@every_case
def test_apply_has_every_mode_that_the_verb_has(threads: Any, name: str) -> None:
    threads(SIZE)(_modes, name)


def _checked(name: str) -> None:
    """On more ranks torch's checkers perturb all of them at once."""
    function = CASES[name].function
    others = (SimpleNamespace(world_size=1),) if name == "towhee" else CASES[name].others
    with graph_parallel():
        x = random(1, 3, 2).requires_grad_()
        curved = lambda x: function.apply(x.sin(), *others)
        assert torch.autograd.gradcheck(curved, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(curved, x, check_fwd_over_rev=True)


@every_case
def test_torch_gradcheck_passes_on_one_rank(threads: Any, name: str) -> None:
    threads(1)(_checked, name)


def _keywords() -> None:
    with graph_parallel() as rank:
        x = random(rank, 2)
        group = gp_utils.get_gp_group()
        torch.testing.assert_close(AllGatherGradAutograd.apply(x, axis=group), (random(0, 2), random(1, 2)))
        whole = gp_utils.GatherFromModelParallelRegion.apply(input=x, dim=0)
        torch.testing.assert_close(whole, torch.cat([random(0, 2), random(1, 2)]))


def test_apply_takes_keywords(threads: Any) -> None:
    threads(SIZE)(_keywords)


# ---- By hand ----------------------------------------------------------------------------------------------


class Context:
    """What a caller hands in as `ctx`."""


def _by_hand(name: str) -> None:
    case = CASES[name]
    function, others = case.function, case.others
    with graph_parallel() as rank:
        x = random(rank, 4, 2).requires_grad_()
        result = function.apply(x, *others)
        incoming = [
            random(20 + 10 * rank + i, *part.shape).requires_grad_() for i, part in enumerate(listed(result))
        ]
        (expected,) = torch.autograd.grad(listed(result), x, incoming, retain_graph=True)
        for ctx in (Context(), torch.autograd.function.FunctionCtx()):
            torch.testing.assert_close(function.forward(ctx, x, *others), result)
            for manual_calls in (function.backward, function.vjp, function.backward):
                grads = manual_calls(ctx, *incoming)
                grad = grads[0] if others else grads
                torch.testing.assert_close(grad, expected)
                assert not others or grads[1:] == (None,) * len(others)
            bent = torch.autograd.grad((grad**2).sum(), incoming)
            (again,) = torch.autograd.grad(listed(result), x, incoming, create_graph=True)
            torch.testing.assert_close(bent, torch.autograd.grad((again**2).sum(), incoming))
            torch.testing.assert_close(function.jvp(ctx, x.detach(), *others), result)
        torch.testing.assert_close(function.forward(None, x, *others), result)


@every_case
def test_forward_and_backward_can_be_called_by_hand(threads: Any, name: str) -> None:
    threads(SIZE)(_by_hand, name)


def _as_many_gradients() -> None:
    with graph_parallel() as rank:
        group, ctx, x = gp_utils.get_gp_group(), Context(), random(rank, 2)
        args = SimpleNamespace(world_size=SIZE)
        AllGather.forward(ctx, x, args)
        assert len(AllGather.backward(ctx, random(1, 4))) == 2
        AllGather.forward(ctx, x, args, group)
        assert len(AllGather.backward(ctx, random(1, 4))) == 3
        AllGatherGradAutograd.forward(ctx, x, group)
        assert len(AllGatherGradAutograd.backward(ctx, random(1, 2), random(1, 2))) == 2


def test_backward_returns_as_many_gradients_as_forward_had_arguments(threads: Any) -> None:
    threads(SIZE)(_as_many_gradients)


@pytest.mark.parametrize("ctx", [None, Context()])
def test_backward_before_forward_is_refused(ctx: Any) -> None:
    for call in (AllGather.backward, AllGather.jvp):
        with pytest.raises(gm.ArgumentError, match=r"forward was not called with this context(.|\n)*forward"):
            call(ctx, torch.zeros(2))


# ---- In a Function of the caller's, and as a base -----------------------------------------------------------


class Own(Function):
    """A Function made of a drop-in's methods."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return AllGather.forward(ctx, x, ARGS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return AllGather.backward(ctx, *grads)[0] * x


class Scaled(AllGather):
    """A subclass with a backward of its own."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        assert ctx.needs_input_grad == (True, False)
        grad, *nothing = AllGather.backward(ctx, grad_output)
        return 2 * grad, *nothing


class Weighted(gp_utils.GatherFromModelParallelRegion):
    """A subclass with a forward of its own that saves a tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
        weight = input.abs()
        ctx.save_for_backward(weight)
        return gp_utils.GatherFromModelParallelRegion.forward(ctx, input * weight, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        grad, nothing = gp_utils.GatherFromModelParallelRegion.backward(ctx, grad_output)
        return 2 * weight * grad, nothing


class OnlyOnce(AllGatherGradAutograd):
    """A subclass whose backward has no derivative."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return AllGatherGradAutograd.backward(ctx, *grads)


class Renamed(AllGather):
    """A subclass that defines nothing that torch calls."""

    note = "mine"


class Further(Scaled):
    """A subclass of a subclass."""


def _own() -> None:
    rank = dist.get_rank()
    x = random(rank, 2).requires_grad_()
    (first,) = torch.autograd.grad((Own.apply(x) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 2 * x * x)
    # backward is 2 y x, with y = gather(x), whose own backward has the factor x once more
    torch.testing.assert_close(second, 2 * x.detach() ** 2 + 2 * x.detach())


def test_forward_and_backward_serve_in_a_function_of_the_callers(threads: Any) -> None:
    threads(SIZE)(_own)


def _scaled(function: Any) -> None:
    x = random(dist.get_rank(), 2).requires_grad_()
    y = function.apply(x, ARGS)
    for _ in range(2):
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True, retain_graph=True)
        torch.testing.assert_close(first, 2 * 3 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 2 * 2 * 6 * x.detach())
    with pytest.raises(NotImplementedError), forward_ad.dual_level():
        function.apply(forward_ad.make_dual(x.detach(), x.detach()), ARGS)


@pytest.mark.parametrize("function", [Scaled, Further])
def test_subclass_with_custom_backward_is_an_ordinary_function(threads: Any, function: Any) -> None:
    assert type(function).__name__ == "FunctionMeta"
    assert function._backward_cls._forward_cls is function
    threads(SIZE)(_scaled, function)


def _weighted() -> None:
    with graph_parallel() as rank:
        x = random(rank, 2, 1 + rank).requires_grad_()
        y = Weighted.apply(x)
        torch.testing.assert_close(
            y, torch.cat([random(r, 2, 1 + r) * random(r, 2, 1 + r).abs() for r in range(SIZE)], 1)
        )
        y.sum().backward(retain_graph=True)
        torch.testing.assert_close(x.grad, 2 * x.detach().abs())
        y.sum().backward()
        torch.testing.assert_close(x.grad, 4 * x.detach().abs())
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


def test_subclass_with_custom_forward_saves_tensors(threads: Any) -> None:
    threads(SIZE)(_weighted)


def _once() -> None:
    x = random(dist.get_rank(), 2).requires_grad_()
    total = torch.stack([(part**2).sum() for part in OnlyOnce.apply(x)]).sum()
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    torch.testing.assert_close(first.detach(), SIZE * 2 * x.detach())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_subclass_can_have_a_backward_without_a_derivative(threads: Any) -> None:
    threads(SIZE)(_once)


def _renamed() -> None:
    x = random(dist.get_rank(), 2)
    _, tangent = torch.func.jvp(lambda x: Renamed.apply(x, ARGS), (x,), (x,))
    torch.testing.assert_close(tangent, torch.cat([random(r, 2) for r in range(SIZE)]))


def test_a_subclass_that_defines_nothing_of_torchs_keeps_every_mode(threads: Any) -> None:
    threads(SIZE)(_renamed)


# ---- Compiled -----------------------------------------------------------------------------------------------


def called(case: Case) -> Callable[[Tensor], Result]:
    return lambda x: case.function.apply(x, *case.others)


# The gathers that ask the ranks for their sizes have values that a compiler does not know.
COMPILED: dict[str, Callable[[Tensor], Result]] = {
    **{name: called(CASES[name]) for name in CASES if name not in ("gather", "gather, sum")},
    "scale": gp_utils.scale_backward_grad,
    "subclass": lambda x: Scaled.apply(x, ARGS),
    "own Function": lambda x: Own.apply(x),
    "fairchem gather": lambda x: fairchem.gather_from_model_parallel_region_sum_grad(x, 8),
    "scatter_to_model_parallel_region": lambda x: gp_utils.scatter_to_model_parallel_region(x, 1),
}


def _compiled() -> dict[str, str]:
    wrong = {}
    with graph_parallel() as rank:
        x = random(rank, 4, 2).requires_grad_()
        for name, run in COMPILED.items():
            value = lambda x, run=run: loss(run(x.sin()), rank)
            expected = torch.autograd.grad(value(x), x)
            torch._dynamo.reset()
            got = torch.autograd.grad(torch.compile(value, fullgraph=True, backend="aot_eager")(x), x)
            if not torch.allclose(got[0], expected[0], rtol=1e-13):
                wrong[name] = f"{got} for {expected}"
    return wrong


@pytest.mark.slow
@pytest.mark.processes
def test_compiled_in_one_graph_they_are_the_eager_ones(compiling: Any) -> None:
    assert compiling(SIZE)(_compiled) == [{}] * SIZE
