"""The drop-in for gp_utils: its names, its groups, and each fault of the original that it does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import gradmesh as gm
from gradmesh.compat import gp_utils as gp
from gradmesh.compat._shared import CountedByAll

NAMES = [
    "CopyToModelParallelRegion",
    "ReduceFromModelParallelRegion",
    "ScatterToModelParallelRegion",
    "GatherFromModelParallelRegion",
    "ensure_div",
    "divide_and_check_no_remainder",
    "setup_gp",
    "cleanup_gp",
    "initialized",
    "get_dp_group",
    "get_gp_group",
    "get_dp_rank",
    "get_gp_rank",
    "get_dp_world_size",
    "get_gp_world_size",
    "pad_tensor",
    "trim_tensor",
    "_split_tensor",
    "_reduce",
    "_split",
    "_gather",
    "_gather_with_padding",
    "copy_to_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "_GRAPH_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "gather_from_model_parallel_region_sum_grad",
    "scale_backward_grad",
    "setup_graph_parallel_groups",
]
REGIONS = [
    gp.CopyToModelParallelRegion,
    gp.ReduceFromModelParallelRegion,
    gp.ScatterToModelParallelRegion,
    gp.GatherFromModelParallelRegion,
    gp.GatherFromModelParallelRegionSumGrad,
    gp.ScaleBackwardGrad,
]


@contextlib.contextmanager
def graph_parallel(size: int) -> Iterator[int]:
    """Groups of `size` ranks; gives this rank's place in its own."""
    backend = dist.get_backend()
    gp.setup_gp({"gp_gpus": size, "distributed_backend": backend})
    try:
        yield gp.get_gp_rank()
    finally:
        gp.cleanup_gp()


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_name_of_the_original_is_there() -> None:
    assert [name for name in NAMES if not hasattr(gp, name)] == []


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="_MODEL_PARALLEL_GROUP"):
        gp._MODEL_PARALLEL_GROUP  # noqa: B018


# ---- Groups -----------------------------------------------------------------------------------------------


def _layout() -> Any:
    with graph_parallel(2):
        assert gp.initialized()
        graph, data = gp.get_gp_group(), gp.get_dp_group()
        assert graph is not None
        assert gp._GRAPH_PARALLEL_GROUP is graph
        assert gp._DATA_PARALLEL_GROUP is data
        found = (
            dist.get_process_group_ranks(graph),
            dist.get_process_group_ranks(data),
            (gp.get_dp_rank(), gp.get_gp_rank()),
            (gp.get_dp_world_size(), gp.get_gp_world_size()),
        )
    assert not gp.initialized()
    assert gp._GRAPH_PARALLEL_GROUP is gp._DATA_PARALLEL_GROUP is None
    return found


def test_consecutive_ranks_share_a_graph_and_thread_ranks_have_separate_groups(threads: Any) -> None:
    assert threads(4)(_layout) == [
        ([0, 1], [0, 2], (0, 0), (2, 2)),
        ([0, 1], [1, 3], (0, 1), (2, 2)),
        ([2, 3], [0, 2], (1, 0), (2, 2)),
        ([2, 3], [1, 3], (1, 1), (2, 2)),
    ]


def _set_up_with(size: int) -> int:
    with graph_parallel(size):
        return gp.get_gp_world_size()


def test_gp_gpus_is_cut_to_the_number_of_ranks(threads: Any) -> None:
    assert threads(3)(_set_up_with, 8) == [3, 3, 3]


@pytest.mark.parametrize("size", [2, 0, -3])
def test_gp_gpus_has_to_divide_the_number_of_ranks(threads: Any, size: int) -> None:
    def refused() -> str:
        with pytest.raises(gm.ArgumentError) as error:
            _set_up_with(size)
        assert not gp.initialized()
        return str(error.value)

    assert f"{size} does not divide 3" in threads(3)(refused)[0]


def _misuse() -> None:
    with pytest.raises(gm.NotInitializedError, match="the groups are not set up"):
        gp.cleanup_gp()
    with graph_parallel(2), pytest.raises(gm.GradmeshError, match="set up already"):
        gp.setup_gp({"gp_gpus": 1, "distributed_backend": "threads"})


def test_set_up_and_cleanup_take_turns(threads: Any) -> None:
    threads(2)(_misuse)


def test_groups_of_a_world_that_is_gone_do_not_count() -> None:
    def outlive() -> tuple[bool, int]:
        gp.setup_gp({"gp_gpus": 2, "distributed_backend": None})
        dist.destroy_process_group()
        found = gp.initialized(), gp.get_gp_world_size()
        gp.cleanup_gp()
        return found

    assert gm.launch(outlive, 2, backend="threads") == [(False, 1)] * 2


def test_set_up_needs_a_process_group() -> None:
    with pytest.raises(gm.NotInitializedError, match="setup_gp"):
        gp.setup_gp({"gp_gpus": 1, "distributed_backend": "gloo"})


def _before_set_up() -> None:
    assert not gp.initialized()
    assert gp._GRAPH_PARALLEL_GROUP is None
    ranks = (gp.get_gp_rank(), gp.get_gp_world_size(), gp.get_dp_rank(), gp.get_dp_world_size())
    assert ranks == ((0, 1, dist.get_rank(), 2) if dist.is_initialized() else (0, 1, 0, 1))
    for region in REGIONS:
        x = random(1, 3, 2).requires_grad_()
        y = region.apply(x)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()
        (grad,) = torch.autograd.grad(y, x, random(2, 3, 2))
        assert torch.equal(grad, random(2, 3, 2))


def test_before_set_up_a_graph_has_one_rank_and_all_ranks_are_data_parallel(threads: Any) -> None:
    _before_set_up()
    threads(2)(_before_set_up)


# ---- On one rank ------------------------------------------------------------------------------------------


def test_numbers_divide_without_remainder_or_not_at_all() -> None:
    assert gp.divide_and_check_no_remainder(12, 4) == 3
    with pytest.raises(gm.ArgumentError, match="5 does not divide 12"):
        gp.divide_and_check_no_remainder(12, 5)


@pytest.mark.parametrize("size", range(8))
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_a_tensor_is_split_into_just_as_many_parts_of_the_ceiling_size(size: int, dim: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = size
    x = random(size, *shape)
    parts = gp._split_tensor(x, 4, dim)
    assert len(parts) == 4
    assert torch.equal(torch.cat(parts, dim), x)
    sizes = [part.shape[dim] for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == -(-size // 4)
    assert all(part.is_contiguous() for part in gp._split_tensor(x, 4, dim, contiguous_chunks=True))


def _padded(dim: int) -> None:
    with graph_parallel(3):
        shape = [2, 2, 2]
        shape[dim] = 4
        x = random(1, *shape).requires_grad_()
        y = gp.pad_tensor(x, dim)
        assert y.shape[dim] == 6
        assert torch.equal(y.narrow(dim, 0, 4), x)
        assert not y.narrow(dim, 4, 2).any()
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
        assert gp.pad_tensor(x, dim, 5).shape[dim] == 5
        assert gp.pad_tensor(x, dim, 4) is x
        assert gp.pad_tensor(y, dim) is y
        with pytest.raises(gm.ShapeError, match="longer"):
            gp.pad_tensor(x, dim, 3)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_padding_appends_zeros_up_to_a_multiple_or_a_given_size(threads: Any, dim: int) -> None:
    threads(3)(_padded, dim)


def _trimmed(dim: int) -> None:
    with graph_parallel(3):
        shape = [2, 2, 2]
        shape[dim] = 8
        x, sizes = random(1, *shape), torch.tensor([3, 4, 1])
        y, left = gp.trim_tensor(x, sizes, dim)
        assert torch.equal(y, x.narrow(dim, 0, 6))
        assert left is not None
        assert left.tolist() == [3, 3, 0]
        assert sizes.tolist() == [3, 4, 1], "the caller's sizes were written to"
        assert gp.trim_tensor(x, torch.tensor([1, 7]), dim)[1].tolist() == [1, 5]  # type: ignore[union-attr]
        assert gp.trim_tensor(x, None, dim)[1] is None
        assert gp.trim_tensor(y, left, dim) == (y, left)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_trimming_takes_from_the_end_and_leaves_the_callers_sizes_alone(threads: Any, dim: int) -> None:
    threads(3)(_trimmed, dim)


# ---- Regions ----------------------------------------------------------------------------------------------


def _more_ranks_than_rows(rows: int, dim: int) -> Tensor:
    with graph_parallel(4):
        x = random(rows, *([3] * dim), rows, 2).requires_grad_()
        part = gp.scatter_to_model_parallel_region(x, dim)
        whole = gp.gather_from_model_parallel_region(part**2, dim)
        (grad,) = torch.autograd.grad((whole**2).sum(), x)
        torch.testing.assert_close(whole, x**2)
        torch.testing.assert_close(grad, 4 * x.detach() ** 3)
        return part.detach()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dim", [0, 2])
def test_ranks_for_which_nothing_is_left_get_an_empty_part_and_take_part(
    threads: Any, rows: int, dim: int
) -> None:
    parts = threads(4)(_more_ranks_than_rows, rows, dim)
    assert torch.equal(torch.cat(parts, dim), random(rows, *([3] * dim), rows, 2))


def _incoming_gradient() -> None:
    with graph_parallel(2) as rank:
        x = random(1, 3).requires_grad_()
        incoming = random(2 + rank, 3)
        (grad,) = torch.autograd.grad(gp.copy_to_model_parallel_region(x), x, incoming)
        assert torch.equal(incoming, random(2 + rank, 3)), "the incoming gradient was summed in place"
        torch.testing.assert_close(grad, random(2, 3) + random(3, 3))


def test_the_backward_of_copy_leaves_the_incoming_gradient_alone(threads: Any) -> None:
    threads(2)(_incoming_gradient)


def _helpers() -> None:
    with graph_parallel(2) as rank:
        x = random(rank, 3, 2)
        total = gp._reduce(None, x)
        assert torch.equal(x, random(rank, 3, 2)), "the sum was taken in place"
        torch.testing.assert_close(total, random(0, 3, 2) + random(1, 3, 2))
        torch.testing.assert_close(gp._gather(x, 1), torch.cat([random(0, 3, 2), random(1, 3, 2)], 1))
        same = random(7, 3, 2)
        assert torch.equal(gp._split(same, 0), [same[:2], same[2:]][rank])
        part = random(rank, 3, 1 + rank)
        assert torch.equal(gp._gather_with_padding(part), torch.cat([random(0, 3, 1), random(1, 3, 2)], 1))
        with pytest.raises(gm.ArgumentError, match=r"all_gather.*dim"):
            gp._gather(x, 2)


def test_underscore_helpers_equal_the_regions(threads: Any) -> None:
    threads(2)(_helpers)


def energy(x: Tensor, weight: Tensor, local: Any, whole: Any, back: Any) -> Tensor:
    """Local work on the rows, work that sees all rows, then terms that are summed."""
    rows = local(x, weight)
    mixed = whole(torch.tanh(rows @ rows.mT))
    found: Tensor = back(mixed, weight)
    return found


def _forces() -> tuple[Tensor, Tensor, Tensor]:
    with graph_parallel(2) as rank:
        x = random(1, 5, 3).requires_grad_()
        weight = random(2, 3, 3).requires_grad_()

        def local(x: Tensor, weight: Tensor) -> Tensor:
            part = gp.scatter_to_model_parallel_region(x, 0)
            return gp.gather_from_model_parallel_region(
                torch.sin(part @ gp.copy_to_model_parallel_region(weight)), 0
            )

        def back(mixed: Tensor, weight: Tensor) -> Tensor:
            mine = gp.copy_to_model_parallel_region(mixed)[rank::2]
            scale = gp.copy_to_model_parallel_region(weight)[0, 0]
            return gp.reduce_from_model_parallel_region((scale * mine**3).sum())

        found = energy(x, weight, local, torch.exp, back)
        (forces,) = torch.autograd.grad(found, x, create_graph=True)
        ((forces**2).sum() + found).backward()
        assert weight.grad is not None
        return found.detach(), forces.detach(), weight.grad


def test_training_on_forces_differentiates_twice_through_all_four_regions(threads: Any) -> None:
    x, weight = random(1, 5, 3).requires_grad_(), random(2, 3, 3).requires_grad_()
    expected = energy(
        x,
        weight,
        lambda x, weight: torch.sin(x @ weight),
        torch.exp,
        lambda mixed, weight: (weight[0, 0] * mixed**3).sum(),
    )
    (forces,) = torch.autograd.grad(expected, x, create_graph=True)
    ((forces**2).sum() + expected).backward()
    # Of four ranks two share a graph, and both graphs are the same here.
    for found, found_forces, grad in threads(4)(_forces):
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(found_forces, forces.detach())
        torch.testing.assert_close(grad, weight.grad)


@pytest.mark.processes
def test_the_regions_work_on_real_processes(processes: Any) -> None:
    (first, _, grad), *others = processes(2)(_forces)
    for value, _, other in others:
        torch.testing.assert_close(value, first)
        torch.testing.assert_close(other, grad)


def _forward_mode() -> None:
    with graph_parallel(2) as rank, forward_ad.dual_level():
        x = forward_ad.make_dual(random(rank, 1 + rank, 2), random(10 + rank, 1 + rank, 2))
        tangent = forward_ad.unpack_dual(gp.gather_from_model_parallel_region(x, 0)).tangent
        assert tangent is not None
        torch.testing.assert_close(tangent, torch.cat([random(10, 1, 2), random(11, 2, 2)]))


def test_forward_mode_goes_through(threads: Any) -> None:
    threads(2)(_forward_mode)


# ---- What fairchem-core 1.10 added -------------------------------------------------------------------------


def _set_up_by_size(size: int) -> tuple[int, int]:
    gp.setup_graph_parallel_groups(size, dist.get_backend())
    found = gp.get_dp_rank(), gp.get_gp_rank()
    gp.cleanup_gp()
    return found


def test_groups_of_a_size_are_those_of_a_configuration(threads: Any) -> None:
    assert threads(4)(_set_up_by_size, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("size", [2, 6, 0])
def test_the_size_of_the_groups_has_to_divide_the_number_of_ranks(threads: Any, size: int) -> None:
    def refused() -> None:
        with pytest.raises(gm.ArgumentError, match=f"{size} does not divide 3"):
            gp.setup_graph_parallel_groups(size, "threads")
        assert not gp.initialized()

    threads(3)(refused)


def test_groups_need_a_process_group() -> None:
    with pytest.raises(gm.NotInitializedError, match="setup_graph_parallel_groups"):
        gp.setup_graph_parallel_groups(1, "gloo")


def counted_loss(x: Tensor) -> Tensor:
    return (x.sin() ** 3).sum()


def _counted() -> tuple[Tensor, ...]:
    with graph_parallel(2):
        x = random(1, 3).requires_grad_()
        scaled = gp.scale_backward_grad(counted_loss(x))
        (first,) = torch.autograd.grad(scaled, x, create_graph=True)
        bent = (gp.scale_backward_grad(x.sin()) ** 3).sum()
        (inner,) = torch.autograd.grad(bent, x, create_graph=True)
        seconds = [torch.autograd.grad(found.sum(), x, retain_graph=True)[0] for found in (first, inner)]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), random(2, 3))
            tangent = forward_ad.unpack_dual(gp.scale_backward_grad(dual)).tangent
        assert tangent is not None
        assert scaled.data_ptr() != x.data_ptr()
        return scaled.detach(), first.detach(), inner.detach(), *seconds, tangent


def test_scaling_a_gradient_counts_the_loss_once_for_each_rank_of_the_graph(threads: Any) -> None:
    x = random(1, 3).requires_grad_()
    value = counted_loss(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    # Of four ranks two share a graph: the gradient is twice the one, and its derivative twice that derivative.
    for scaled, one, inner, *seconds, tangent in threads(4)(_counted):
        torch.testing.assert_close(scaled, value.detach())
        torch.testing.assert_close([one, inner], [2 * first.detach()] * 2)
        torch.testing.assert_close(seconds, [2 * second] * 2)
        torch.testing.assert_close(tangent, random(2, 3))


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_the_ops_of_scaling_keep_the_law_for_equal_gradients(threads: Any, shape: tuple[int, ...]) -> None:
    def on_each_rank() -> None:
        op = CountedByAll(gm.axis())
        assert op.adjoint.adjoint == op
        x, y = random(1, *shape), random(2, *shape)  # the same on every rank
        forward = gm.all_reduce((op.apply(x) * y).sum(), dst=gm.R)
        torch.testing.assert_close(forward, (x * op.adjoint.apply(y)).sum())
        assert op.apply(x).data_ptr() != x.data_ptr()

    threads(3)(on_each_rank)


def _work_that_differs() -> tuple[Tensor, ...]:
    with graph_parallel(2) as rank:
        grads: list[Tensor] = []
        for gather in (
            lambda x: gp.gather_from_model_parallel_region_sum_grad(x, 0),
            lambda x: gp.copy_to_model_parallel_region(gp.gather_from_model_parallel_region(x, 0)),
            lambda x: gp.gather_from_model_parallel_region(x, 0),
        ):
            x = random(rank, 2 - rank).requires_grad_()
            mine = (1 + rank) * (gather(x) ** 2).sum()
            grads += torch.autograd.grad(mine, x)
        return tuple(grads)


def test_a_plain_gather_before_work_that_differs_lacks_the_other_ranks_terms(threads: Any) -> None:
    for rank, (summed, copied, plain) in enumerate(threads(2)(_work_that_differs)):
        x = random(rank, 2 - rank)
        torch.testing.assert_close([summed, copied], [(1 + 2) * 2 * x] * 2)
        torch.testing.assert_close(plain, (1 + rank) * 2 * x)


@pytest.mark.parametrize(
    "gather", [gp.gather_from_model_parallel_region, gp.gather_from_model_parallel_region_sum_grad]
)
def test_calls_of_newer_fairchem_are_refused_by_name(threads: Any, gather: Any) -> None:
    def refused() -> None:
        with graph_parallel(2):
            for call in (lambda: gather(torch.zeros(2, 3), 4), lambda: gather(torch.zeros(2, 3), natoms=4)):
                with pytest.raises(gm.ArgumentError, match=r"gradmesh\.compat\.fairchem"):
                    call()

    threads(2)(refused)


def test_error_for_names_of_newer_fairchem_says_where_they_are() -> None:
    with pytest.raises(AttributeError, match=r"gradmesh\.compat\.fairchem"):
        gp.size_list_fn  # noqa: B018
