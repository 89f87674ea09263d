"""The drop-in for Megatron's mappings; their values and derivatives are in test_compat_gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.compat import megatron

ARGUMENTS = {
    "copy_to_tensor_model_parallel_region": "input_ group",
    "reduce_from_tensor_model_parallel_region": "input_ group",
    "scatter_to_tensor_model_parallel_region": "input_ group",
    "gather_from_tensor_model_parallel_region": "input_ group",
    "scatter_to_sequence_parallel_region": "input_ group",
    "gather_from_sequence_parallel_region": (
        "input_ tensor_parallel_output_grad group output_split_sizes use_global_buffer"
    ),
    "reduce_scatter_to_sequence_parallel_region": "input_ group input_split_sizes use_global_buffer",
    "all_gather_last_dim_from_tensor_parallel_region": "input_ group",
    "reduce_scatter_last_dim_to_tensor_parallel_region": "input_ group",
    "all_to_all": "group input_ output_split_sizes_ input_split_sizes",
    "all_to_all_sp2hp": "input_ group",
    "all_to_all_hp2sp": "input_ group",
}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_names_and_arguments_are_megatrons() -> None:
    assert megatron.__all__ == sorted([*ARGUMENTS, "set_default_group"])
    for name, arguments in ARGUMENTS.items():
        assert " ".join(inspect.signature(getattr(megatron, name)).parameters) == arguments


def _without_a_group() -> list[int]:
    sizes = [megatron.gather_from_tensor_model_parallel_region(torch.zeros(1)).numel()]
    with gm.use_mesh(gm.mesh(dp=1, tp=-1)):
        sizes.append(megatron.gather_from_tensor_model_parallel_region(torch.zeros(1)).numel())
    with gm.use_mesh(gm.mesh(dp=2, tp=2)):
        sizes.append(megatron.gather_from_tensor_model_parallel_region(torch.zeros(1)).numel())
        sizes.append(megatron.gather_from_tensor_model_parallel_region(torch.zeros(1), "dp").numel())
    return sizes


def test_without_a_group_the_axis_is_tp_of_the_mesh_or_else_the_world() -> None:
    assert gm.launch(_without_a_group, 4, backend="threads") == [[4, 4, 2, 2]] * 4


class Sized:
    """A group as Megatron's callers make them: a rank and a size, and perhaps the group that it stands for."""

    def __init__(self, rank: int, size: int, held: object = None) -> None:
        self._rank, self._size, self.held = rank, size, held

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


REGIONS = {name: getattr(megatron, name) for name in ARGUMENTS if name != "all_to_all"}


def _held(name: str) -> None:
    rank, size = gm.rank(), gm.world_size()
    group = gm.axis().group
    for x in (random(rank, 4, 4).requires_grad_(),):
        weight = 1 + rank
        results = []
        for which in (group, Sized(rank, size, group)):
            y = REGIONS[name](x, group=which)
            (first,) = torch.autograd.grad(weight * (y**3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), x)
            results.append((y, first, second))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", REGIONS)
def test_an_object_that_holds_a_group_stands_for_it(name: str, threads: Any) -> None:
    threads(2)(_held, name)


@pytest.mark.parametrize("name", REGIONS)
def test_on_an_object_of_one_rank_a_region_is_the_identity_without_any_process_group(name: str) -> None:
    x = random(1, 4, 4).requires_grad_()
    y = REGIONS[name](x, group=Sized(0, 1))
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()
    torch.testing.assert_close(torch.autograd.grad((y**3).sum(), x)[0], 3 * x.detach() ** 2)


def _unconnected() -> str:
    with pytest.raises(gm.AxisError) as error:
        megatron.copy_to_tensor_model_parallel_region(torch.ones(1), Sized(gm.rank(), 2))
    return str(error.value)


def test_an_object_of_several_ranks_that_holds_no_group_is_refused(threads: Any) -> None:
    for said in threads(2)(_unconnected):
        assert "cannot find the process group of a custom group object" in said
        assert "Sized, rank" in said


def _with_a_default() -> list[float]:
    x = torch.ones(1)
    mesh = gm.mesh(dp=2, tp=2)
    found = [megatron.reduce_from_tensor_model_parallel_region(x * gm.rank(mesh.get_group("dp"))).item()]
    megatron.set_default_group(lambda: mesh.get_group("dp"))
    found.append(megatron.reduce_from_tensor_model_parallel_region(x).item() + 10)
    found.append(megatron.reduce_from_tensor_model_parallel_region(x * gm.rank("dp")).item())
    megatron.set_default_group("tp")
    found.append(megatron.reduce_from_tensor_model_parallel_region(x * gm.rank("dp")).item())
    megatron.set_default_group(None)
    return found


def test_group_none_is_accepted(threads: Any) -> None:
    assert gm.launch(_with_a_default, 4, backend="threads") == [
        [0.0, 12.0, 1.0, 0.0],
        [0.0, 12.0, 1.0, 0.0],
        [2.0, 12.0, 1.0, 2.0],
        [2.0, 12.0, 1.0, 2.0],
    ]


def _exchange_as_a_function() -> None:
    rank = gm.rank()
    x = random(rank, 5, 2).requires_grad_()
    send, receive = ([2, 3], [2, 1]) if rank == 0 else ([1, 4], [3, 4])
    y = megatron._AllToAll.apply(None, x, torch.tensor(receive), send)
    expected = megatron.all_to_all(None, x, receive, send)
    assert torch.equal(y, expected)
    weight = random(7 + rank, *y.shape)
    (ours,) = torch.autograd.grad((weight * y**2).sum(), x)
    (theirs,) = torch.autograd.grad((weight * expected**2).sum(), x)
    assert torch.equal(ours, theirs)

    class Context:
        pass

    context = Context()
    assert torch.equal(megatron._AllToAll.forward(context, None, x, receive, send), expected)
    nothing, back, *more = megatron._AllToAll.backward(context, 2 * weight * y.detach())
    assert nothing is None
    assert more == [None, None]
    assert back is not None
    assert torch.equal(back, ours)


def test_the_exchange_is_a_function_whose_group_comes_first(threads: Any) -> None:
    threads(2)(_exchange_as_a_function)


ROWS = {"tensor_parallel_output_grad": True, "output_split_sizes": None, "use_global_buffer": False}
OWN_CONTEXTS: dict[str, tuple[Any, dict[str, Any], tuple[int, int]]] = {
    # The Function, the arguments of forward after the tensor, and the operand's shape on this rank of two.
    "copy": (megatron._CopyToModelParallelRegion, {}, (3, 2)),
    "reduce": (megatron._ReduceFromModelParallelRegion, {}, (3, 2)),
    "scatter the last": (megatron._ScatterToModelParallelRegion, {}, (3, 4)),
    "gather the last": (megatron._GatherFromModelParallelRegion, {}, (3, 2)),
    "scatter the first": (megatron._ScatterToSequenceParallelRegion, {}, (4, 3)),
    "gather the first": (megatron._GatherFromSequenceParallelRegion, ROWS, (2, 3)),
    "gather the first, of any size": (
        megatron._GatherFromSequenceParallelRegion,
        {**ROWS, "output_split_sizes": [1, 3]},
        (-1, 3),
    ),
    "gather the first, equal gradients": (
        megatron._GatherFromSequenceParallelRegion,
        {**ROWS, "tensor_parallel_output_grad": False, "output_split_sizes": [1, 3]},
        (-1, 3),
    ),
    "reduce_scatter the first": (
        megatron._ReduceScatterToSequenceParallelRegion,
        {"input_split_sizes": None, "use_global_buffer": False},
        (4, 3),
    ),
    "reduce_scatter the first, of any size": (
        megatron._ReduceScatterToSequenceParallelRegion,
        {"input_split_sizes": torch.tensor([1, 3]), "use_global_buffer": False},
        (4, 3),
    ),
    "all_gather the last": (megatron._AllGatherFromTensorParallelRegion, {}, (3, 2)),
    "reduce_scatter the last": (megatron._ReduceScatterToTensorParallelRegion, {}, (3, 4)),
}


def _with_its_own_forward(function: Any) -> Any:
    """A subclass as programs write them, whose forward needs its context."""

    def forward(ctx: Any, input_: Tensor, group: Any = None) -> Tensor:
        ctx.group = group
        return function.forward(ctx, input_, group)

    return type("Own", (function,), {"forward": staticmethod(forward), "__module__": __name__})


def _with_a_context_of_their_own(name: str) -> None:
    function, arguments, shape = OWN_CONTEXTS[name]
    rank = gm.rank()
    x = random(rank, *[1 + 2 * rank if size < 0 else size for size in shape])
    values = None, *arguments.values()

    class Context:
        pass

    saved, own = Context(), Context()
    y = function.forward(saved, x, *values)
    own.__dict__.update(group=None, **arguments)
    grad = random(5 + rank, *y.shape)
    assert torch.equal(function.symbolic(None, x, *values), y)
    assert torch.equal(
        _with_its_own_forward(function).symbolic(graph=None, input_=x, group=None, **arguments), y
    )
    expected, *nones = function.backward(saved, grad)
    ours, *others = function.backward(own, grad)
    assert torch.equal(ours, expected)
    assert others == nones == [None] * (1 + len(arguments))
    grad.requires_grad_()
    again, *_ = function.backward(own, grad)
    cotangent = random(9 + rank, *again.shape)
    (second,) = torch.autograd.grad(again, grad, cotangent)
    assert torch.equal(second, function.forward(None, cotangent, *values))


@pytest.mark.parametrize("name", list(OWN_CONTEXTS))
def test_backward_takes_a_context_with_the_arguments_and_symbolic_is_forward(name: str, threads: Any) -> None:
    threads(2)(_with_a_context_of_their_own, name)


def _an_exchange_with_a_context_of_its_own() -> None:
    rank = gm.rank()
    x = random(rank, 5, 2)
    send, receive = ([2, 3], [2, 1]) if rank == 0 else ([1, 4], [3, 4])

    class Context:
        group = None
        output_split_sizes, input_split_sizes = receive, send

    y = megatron.all_to_all(None, x, receive, send)
    assert torch.equal(megatron._AllToAll.symbolic(None, None, x, receive, send), y)
    nothing, back, *nones = megatron._AllToAll.backward(Context(), y)
    assert nothing is None
    assert nones == [None, None]
    assert back is not None
    assert torch.equal(back, x)


def test_the_exchange_takes_such_a_context_too(threads: Any) -> None:
    threads(2)(_an_exchange_with_a_context_of_its_own)


def test_backward_refuses_a_context_with_neither() -> None:
    with pytest.raises(gm.ArgumentError, match="forward was not called with this context"):
        megatron._CopyToModelParallelRegion.backward(object(), torch.ones(2))


def _mlp(weights: bool) -> tuple[Tensor, ...]:
    """Column- then row-parallel: the two regions of a tensor-parallel layer, with the same loss on every rank."""
    rank = gm.axis().rank
    x = random(1, 3, 4).requires_grad_()
    up = random(2, 4, 6).chunk(2, 1)[rank].clone().requires_grad_()
    down = random(3, 6, 4).chunk(2, 0)[rank].clone().requires_grad_()
    hidden = torch.tanh(megatron.copy_to_tensor_model_parallel_region(x) @ up)
    y = megatron.reduce_from_tensor_model_parallel_region(hidden @ down)
    return torch.autograd.grad((y**2).sum(), (x, up, down))


def test_a_tensor_parallel_layer_has_the_gradients_of_the_whole_one(threads: Any) -> None:
    x, up, down = (random(i, *shape).requires_grad_() for i, shape in ((1, (3, 4)), (2, (4, 6)), (3, (6, 4))))
    expected = torch.autograd.grad(((torch.tanh(x @ up) @ down) ** 2).sum(), (x, up, down))
    found = threads(2)(_mlp, True)
    for grad, _, _ in found:
        torch.testing.assert_close(grad, expected[0])
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found], 1), expected[1])
    torch.testing.assert_close(torch.cat([grad for _, _, grad in found], 0), expected[2])


def _there_and_back() -> None:
    rank = gm.axis().rank
    x = random(rank, 2, 2, 4)
    there = megatron.all_to_all_sp2hp(x)
    assert there.shape == (8, 2)
    assert torch.equal(megatron.all_to_all_hp2sp(there), x.view(4, 4))


def test_from_rows_to_columns_and_back_is_the_identity(threads: Any) -> None:
    threads(2)(_there_and_back)


def _caller_tensors() -> None:
    rank = gm.axis().rank
    x, incoming = random(rank, 4).requires_grad_(), random(5 + rank, 4)
    megatron.reduce_from_tensor_model_parallel_region(x)
    assert torch.equal(x.detach(), random(rank, 4))
    torch.autograd.grad(megatron.copy_to_tensor_model_parallel_region(x), x, incoming)
    assert torch.equal(incoming, random(5 + rank, 4))


def test_neither_operands_nor_incoming_gradients_are_summed_in_place(threads: Any) -> None:
    threads(2)(_caller_tensors)


class _Halved(megatron._GatherFromSequenceParallelRegion):
    """A subclass as programs write them, whose backward reads what the original's forward saves."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        assert (ctx.tensor_parallel_output_grad, ctx.use_global_buffer) == (True, False)
        total = gm.reduce_scatter(grad_output, ctx.group, sizes=ctx.output_split_sizes)
        return total / 2, None, None, None, None


def _with_its_own_backward() -> tuple[Tensor, Tensor]:
    rank = gm.rank()
    x = random(rank, 1 + 2 * rank, 2).requires_grad_()
    gradients: list[Tensor] = []
    for function in (megatron._GatherFromSequenceParallelRegion, _Halved):
        y = function.apply(x, None, True, [1, 3], False)
        gradients += torch.autograd.grad(((1 + rank) * y**2).sum(), x)
    return gradients[0], gradients[1]


def test_a_backward_of_a_subclass_reads_the_attributes_of_the_originals_context(threads: Any) -> None:
    for whole, half in threads(2)(_with_its_own_backward):
        assert torch.allclose(half, whole / 2)
    for name in OWN_CONTEXTS:
        threads(2)(_with_the_attributes_alone, name)


def _with_the_attributes_alone(name: str) -> None:
    function, arguments, shape = OWN_CONTEXTS[name]
    rank = gm.rank()
    x = random(rank, *[1 + 2 * rank if size < 0 else size for size in shape])

    class Context:
        gradmesh_call: Any

    saved = Context()
    y = function.forward(saved, x, None, *arguments.values())
    grad = random(5 + rank, *y.shape)
    expected = function.backward(saved, grad)[0]
    del saved.gradmesh_call
    assert torch.equal(function.backward(saved, grad)[0], expected)
