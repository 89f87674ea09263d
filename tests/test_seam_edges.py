"""Where the seam could let something through: sizes under transforms, calls of other kinds, refusals on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]

Work = Callable[[], object]


def sizes_are_found_inside_a_transform_again_and_again() -> object:
    x = torch.ones(1 + gm.rank())
    gradients = []
    for _ in range(2):
        gradients.append(torch.func.grad(lambda x: gm.all_gather(x, sizes="auto").sum())(x).tolist())
        gm.sizes(x)
    return gradients, gm.all_gather(torch.tensor([gm.rank()])).tolist()


def a_question_for_sizes_does_not_meet_another_call() -> object:
    with pytest.raises(gm.MismatchError, match="calls do not match"):
        gm.sizes(torch.ones(3)) if gm.rank() == 0 else gm.all_gather(torch.ones(1))
    return gm.all_gather(torch.tensor([gm.rank()])).tolist()


def a_dtype_that_one_rank_refuses_is_told_to_the_others() -> object:
    x = torch.ones(2) if gm.rank() else torch.ones(2).bool()
    with pytest.raises(gm.GradmeshError) as caught:
        gm.all_reduce(x, dst=gm.R)
    return type(caught.value).__name__, "bool tensors cannot be summed" in str(caught.value)


def ranks_are_told_as_tensors_of_one() -> object:
    other = 1 - gm.rank()
    rows: Any = {torch.tensor(other): torch.tensor([0, 1])}
    counts: Any = {np.int64(other): 2}
    return gm.neighbor_all_to_all(torch.arange(3.0), send_rows=rows, receive_counts=counts).tolist()


def sizes_are_told_as_an_array() -> object:
    x = torch.arange(4.0) if gm.rank() == 0 else torch.empty(0)
    return gm.scatter(x, sizes=np.array([2, 2])).tolist()  # type: ignore[call-overload]


def results_of_a_structure_are_memory_of_their_own() -> object:
    x, y = (torch.ones(n, requires_grad=True) for n in (2, 3))
    first, second = gm.all_reduce((x, y), dst=gm.R)
    squares = (second * second).sum()
    first.mul_(2)
    (squares + first.sum()).backward()
    return None if x.grad is None or y.grad is None else (x.grad.tolist(), y.grad.tolist())


def an_axis_can_be_copied_deeply() -> object:
    return copy.deepcopy(gm.axis()) is gm.axis() or copy.deepcopy(gm.axis()) == gm.axis()


def calls_go_on_under_another_default_device() -> object:
    x = torch.ones(2)
    with torch.device("meta"):
        return gm.all_reduce(x, dst=gm.R).tolist()


def forward_over_reverse_takes_zeros_without_memory() -> object:
    """The tangent of a verb's own part is a constant zero there, for which autograd has no memory."""
    verbs: list[Callable[[torch.Tensor], torch.Tensor]] = [
        gm.shift,
        gm.exscan,
        gm.all_to_all,
        gm.halo_exchange,
        gm.reduce_scatter,
        lambda x: gm.permute(x, pairs=[(0, 1)]),
        lambda x: gm.all_reduce(x, dst=gm.R),
    ]
    found = []
    for verb in verbs:
        x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            loss = (verb(dual) * (1 + gm.rank())).sum() + (dual**3).sum()
            tangent = forward_ad.unpack_dual(loss).tangent
            assert tangent is not None
            found.append(torch.autograd.grad(tangent, x)[0].tolist())
    return all(gradient == [6.0, 12.0] for gradient in found)


def a_group_that_is_over_says_so_or_works() -> object:
    """The backends differ in whether a destroyed group still carries; none may leave a rank waiting."""
    group = dist.new_group([0, 1])
    axis = gm.axis(group)
    gm.scan(torch.ones(1), axis)
    with gm.check("deferred"):
        gm.scan(torch.ones(1))  # from here on the deferred check sees the calls
    dist.destroy_process_group(group)
    calls: list[Work] = [
        lambda: gm.all_gather(torch.ones(1), group),
        lambda: gm.all_reduce(torch.ones(1), axis, dst=gm.R),
        lambda: gm.sizes(torch.ones(1), axis),
        lambda: gm.barrier(group),
        lambda: gm.all_gather([1.0], group),  # type: ignore[type-var]  # wrong, on a group of one rank
    ]
    kinds = set()
    for call in calls:
        for level in (1, "deferred"):
            try:
                with gm.check(level):
                    call()
            except gm.GradmeshError as error:
                kinds.add(type(error).__name__)
    return kinds <= {"NotInitializedError", "ArgumentError"}, gm.all_gather(torch.ones(1)).tolist()


def a_mesh_that_cannot_be_is_refused() -> object:
    wrong: list[Work] = [
        lambda: gm.mesh(dp=3),
        lambda: gm.mesh(dp=0),
        lambda: gm.mesh(dp=-1, tp=-1),
        lambda: gm.mesh(dp="2"),  # type: ignore[arg-type]
        gm.mesh,
        lambda: gm.use_mesh("dp").__enter__(),  # type: ignore[arg-type]
        lambda: gm.axis().slice([1, 2, 3]),
        lambda: gm.axis().offset(-1),
    ]
    for call in wrong:
        with pytest.raises(gm.ArgumentError, match=r"(?s)expected.*got.*remedy"):
            call()
    return gm.all_gather(torch.ones(1)).tolist()


def equal_parts_may_be_told_by_one_rank_alone() -> object:
    parts = [2, 2] if gm.rank() == 0 else None
    out = torch.empty(4)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * gm.rank(), parts, parts)
    x = torch.arange(4.0).view(2, 2)
    sizes = (1, 1) if gm.rank() == 0 else None
    y = gm.all_to_all(x + 10 * gm.rank(), split_dim=0, concat_dim=1, split_sizes=sizes)
    return out.tolist(), y.tolist()


EXPECTED: dict[Work, list[object]] = {
    sizes_are_found_inside_a_transform_again_and_again: [
        ([[2.0], [2.0]], [0, 1]),
        ([[2.0, 2.0], [2.0, 2.0]], [0, 1]),
    ],
    a_question_for_sizes_does_not_meet_another_call: [[0, 1], [0, 1]],
    a_dtype_that_one_rank_refuses_is_told_to_the_others: [("DTypeError", True), ("MismatchError", True)],
    ranks_are_told_as_tensors_of_one: [[0.0, 1.0], [0.0, 1.0]],
    sizes_are_told_as_an_array: [[0.0, 1.0], [2.0, 3.0]],
    results_of_a_structure_are_memory_of_their_own: [([4.0, 4.0], [8.0, 8.0, 8.0])] * 2,
    an_axis_can_be_copied_deeply: [True, True],
    calls_go_on_under_another_default_device: [[2.0, 2.0], [2.0, 2.0]],
    forward_over_reverse_takes_zeros_without_memory: [True, True],
    a_group_that_is_over_says_so_or_works: [(True, [1.0, 1.0])] * 2,
    a_mesh_that_cannot_be_is_refused: [[1.0, 1.0]] * 2,
    equal_parts_may_be_told_by_one_rank_alone: [
        ([0.0, 1.0, 10.0, 11.0], [[0.0, 1.0, 10.0, 11.0]]),
        ([2.0, 3.0, 12.0, 13.0], [[2.0, 3.0, 12.0, 13.0]]),
    ],
}


@pytest.mark.parametrize("work", EXPECTED, ids=lambda work: work.__name__)
def test_on_threads(work: Work, threads: Ranks) -> None:
    assert threads(2)(work) == EXPECTED[work]


@pytest.mark.processes
@pytest.mark.parametrize("work", EXPECTED, ids=lambda work: work.__name__)
def test_on_processes(work: Work, processes: Ranks) -> None:
    assert processes(2)(work) == EXPECTED[work]


def test_a_rank_of_a_neighbour_list_that_is_none_is_refused(threads: Ranks) -> None:
    def on_each_rank() -> list[str]:
        x, texts = torch.arange(3.0), []
        wrong: list[tuple[Any, Any]] = [
            ({7: torch.tensor([0])}, {}),
            ({0: torch.tensor([5])}, {}),
            ({0: [0, 1]}, {}),
            ({}, {1: -1}),
            ([torch.tensor([0])], {}),
            ({True: torch.tensor([0])}, {}),
        ]
        for rows, counts in wrong:
            with pytest.raises(gm.ArgumentError, match="neighbor_all_to_all") as caught:
                gm.neighbor_all_to_all(x, send_rows=rows, receive_counts=counts)
            texts.append(str(caught.value).splitlines()[0])
        return texts

    first, second = threads(2)(on_each_rank)
    assert first == second
    assert len(set(first)) == 5  # the first and the last are the same mistake
