"""Edges, nodes and positions are accepted, or rejected on every rank with the library's error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, HeteroPlan, by_graph, by_metis, by_space
from gradmesh.nn.inputs import device_of_root
from gradmesh.transport.run import exchange_device
from tests.conftest import Run

Ranks = Callable[[int], Run]

EDGES, OWNER = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.tensor([0, 0, 1, 1])


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


ODD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda x: x.to_sparse(), "a torch.sparse_coo tensor"),
    "compressed": (lambda x: x.reshape(1, -1).to_sparse_csr(), "a torch.sparse_csr tensor"),
    "nested": (lambda x: torch.nested.nested_tensor([x.float()], layout=torch.jagged), "a nested tensor"),
    "on another device": (lambda x: x.to("meta"), "which has no values"),
    "fake": (fake, "which has no values"),
    "floats": (lambda x: x.double(), "torch.float64"),
    "positions that require grad": (lambda x: x.double().requires_grad_(), "torch.float64"),
    "complex": (lambda x: x.to(torch.complex64), "torch.complex64"),
    "a mask": (lambda x: x > 0, "torch.bool"),
    "bytes": (lambda x: x.to(torch.uint8), "torch.uint8"),
    "a list": (lambda x: x.tolist(), "list"),
    "an array": (lambda x: x.numpy(), "ndarray"),
    "of another dimension": (lambda x: x[None], r"\[1, "),
    "negative": (lambda x: x - 5, "from -[3-5]"),
    "too large": (lambda x: x + 2, "to [45]|from 2 to 3"),
    "far too large": (lambda x: x + 2**62, "46116860184273879"),
}


def own_part(given: Tensor) -> tuple[Tensor, Tensor]:
    rank = gm.rank()
    return given[:, OWNER[EDGES[1]] == rank], OWNER.eq(rank).nonzero().squeeze(1)


def given_odd(name: str, what: str, on_both: bool) -> str:
    def odd(x: Tensor) -> Any:
        return ODD[name][0](x) if on_both or gm.rank() == 1 else x

    makes: dict[str, Callable[[], Any]] = {
        "edges": lambda: GraphPlan(odd(EDGES), OWNER),
        "owner": lambda: GraphPlan(EDGES, odd(OWNER)),
        "edges of a part": lambda: GraphPlan(odd(own_part(EDGES)[0]), own=own_part(EDGES)[1]),
        "own": lambda: GraphPlan(own_part(EDGES)[0], OWNER, own=odd(own_part(EDGES)[1])),
        "own alone": lambda: GraphPlan(own_part(EDGES)[0], own=odd(own_part(EDGES)[1])),
        "edges of the root": lambda: GraphPlan(odd(EDGES), OWNER, root=1) if gm.rank() else GraphPlan(root=1),
        "owner of the root": lambda: GraphPlan(EDGES, odd(OWNER), root=1) if gm.rank() else GraphPlan(root=1),
        "edges of a type": lambda: HeteroPlan({("a", "to", "a"): odd(EDGES)}, {"a": OWNER}),
        "owner of a type": lambda: HeteroPlan({("a", "to", "a"): EDGES}, {"a": odd(OWNER)}),
        "edges rebuilt": lambda: GraphPlan(EDGES, OWNER).rebuilt(odd(EDGES)),
    }
    try:
        makes[what]()
    except gm.GradmeshError as error:
        plan = GraphPlan(EDGES, OWNER)  # the next call is right
        assert plan.exchange(10 + plan.own).tolist() == [[10, 11, 13], [12, 13, 11]][gm.rank()]
        return str(error)
    return "nothing was refused"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("on_both", [False, True])
@pytest.mark.parametrize(
    "what",
    [
        "edges",
        "owner",
        "edges of a part",
        "own",
        "own alone",
        "edges of the root",
        "owner of the root",
        "edges of a type",
        "owner of a type",
        "edges rebuilt",
    ],
)
def test_invalid_edges_or_nodes_raise_on_every_rank(what: str, on_both: bool, threads: Ranks) -> None:
    for name, (_, text) in ODD.items():
        said = threads(2)(given_odd, name, what, on_both)
        assert "nothing was refused" not in said, (name, said)
        # A rank whose ids are of other ranks' nodes gets the error text itself.
        known = text if what not in ("own", "own alone") or name in list(ODD)[:13] else ""
        assert re.search(known, said[1]), (name, said)


# -- some of a plan's edges


def some_edges() -> list[bool]:
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 9, (2, 40), generator=draw)
    plan = GraphPlan(edges, torch.randint(0, gm.world_size(), (9,), generator=draw))
    messages = torch.randn(len(plan.edges), 2, generator=draw)
    mask = torch.rand(len(plan.edges), generator=draw) < 0.5
    chosen = mask.nonzero().squeeze(1)
    everything = plan.scatter_add(messages)
    return [
        torch.equal(plan.scatter_add(messages[mask], mask), plan.scatter_add(messages[chosen], chosen)),
        torch.equal(plan.scatter_add(messages[mask], mask), plan.scatter_add(messages[mask], chosen.int())),
        torch.allclose(
            plan.scatter_add(messages[mask], mask) + plan.scatter_add(messages[~mask], ~mask), everything
        ),
        torch.equal(plan.scatter_add(messages, torch.ones_like(mask)), everything),
        not plan.scatter_add(messages[:0], torch.zeros_like(mask)).any(),
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mask_of_edges_is_their_index(ranks: int, threads: Ranks) -> None:
    assert threads(ranks)(some_edges) == [[True] * 5] * ranks


def indexed_in_a_program() -> list[bool]:
    plan = GraphPlan(EDGES, 0 * OWNER)
    some = (plan.edge_index[0] < 2).nonzero().squeeze(1)
    torch._dynamo.reset()

    def add(plan: GraphPlan, messages: Tensor, edges: Tensor) -> Tensor:
        return plan.scatter_add(messages, edges)

    program = torch.compile(add, fullgraph=True, backend="eager")
    return [
        torch.equal(program(plan, messages, edges), add(plan, messages, edges))
        for messages, edges in ((torch.randn(2, 2), some), (torch.randn(4, 2), plan.interior))
    ]


def test_an_index_of_edges_is_compiled_whole() -> None:
    # One rank: dynamo compiles for one thread at a time.
    assert gm.launch(indexed_in_a_program, 1, backend="threads") == [[True, True]]


def picked(edges: Any) -> str:
    plan = GraphPlan(EDGES, OWNER)
    try:
        plan.scatter_add(torch.ones(2), edges)
    except gm.ArgumentError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("edges", "got"),
    [
        (torch.tensor([0, 2]), "from 0 to 2"),
        (torch.tensor([-1, 0]), "from -1 to 0"),
        (torch.tensor([0.0, 1.0]), "torch.float32"),
        (torch.tensor([True, True, False]), r"torch.bool\[3\]"),
        (torch.tensor([[0, 1]]), r"torch.int64\[1, 2\]"),
        (torch.tensor([0, 1]).to_sparse(), "sparse_coo"),
        ([0, 1], "list"),
    ],
)
def test_edges_that_the_rank_does_not_have_are_refused(edges: Any, got: str, threads: Ranks) -> None:
    for said in threads(2)(picked, edges):
        assert "or a mask of shape [2]" in said
        assert re.search(got, said)


# -- places


@pytest.mark.parametrize(
    "cell",
    [
        math.inf * torch.eye(3),
        torch.diag(torch.tensor([1.0, math.nan, 1.0])),
        torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]),
        torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.5, 0.7, 0.9]]),
        1e-9 * torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.5, 0.7, 0.9]], dtype=torch.float64),
        torch.eye(3).to_sparse(),
        torch.eye(3) * 1j,
        torch.eye(3).to("meta"),
        [1.0, 1.0, 1.0],
        1.0,
    ],
)
@pytest.mark.parametrize("method", ["bisection", "curve"])
def test_a_cell_that_is_none_is_refused(cell: Any, method: Any) -> None:
    at = torch.rand(9, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(gm.ArgumentError, match="3 independent vectors of finite numbers"):
        by_space(at, 2, cell=cell, method=method)


@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e30])
def test_a_cell_may_be_in_any_unit_and_left_handed(unit: float) -> None:
    at = torch.rand(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cell = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.2, 0.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    owner = by_space(unit * at, 4, cell=unit * cell)
    assert torch.equal(owner, by_space(at, 4, cell=cell))
    assert sorted(torch.bincount(owner).tolist()) == [12, 12, 13, 13]


@pytest.mark.parametrize("method", ["bisection", "curve"])
@pytest.mark.parametrize(
    ("at", "text"),
    [
        (torch.tensor([[math.inf, 0.0], [0.0, 0.0]]), "1 nodes with NaN or infinity"),
        (torch.tensor([[math.nan, 0.0], [-math.inf, 0.0]]), "2 nodes with NaN or infinity"),
        (
            torch.tensor([[1.7e308, 0.0], [-1.7e308, 0.0]], dtype=torch.float64),
            "extent of the positions overflows",
        ),
        (torch.rand(4, 2).to_sparse(), "positions is not a real tensor of shape"),
        (torch.rand(4, 2).to("meta"), "positions is not a real tensor of shape"),
        (torch.rand(4, 2) * 1j, "positions is not a real tensor of shape"),
        (torch.rand(4, 2) > 0, "positions is not a real tensor of shape"),
        ([[0.0, 1.0]], "positions is not a real tensor of shape"),
    ],
)
def test_invalid_positions_raise(at: Any, text: str, method: Any) -> None:
    with pytest.raises(gm.ArgumentError, match=text):
        by_space(at, 2, method=method)


def test_positions_that_overflow_in_the_cell_raise() -> None:
    at = torch.tensor([[1e300, 0.0], [0.0, 0.0]], dtype=torch.float64)
    with pytest.raises(gm.ArgumentError, match="extent of the positions overflows"):
        by_space(at, 2, cell=1e-30 * torch.eye(2))


def test_positions_may_require_grad_and_be_in_half_precision() -> None:
    at = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    owner = by_space(at, 4)
    assert not owner.requires_grad
    assert torch.equal(owner, by_space(at.detach(), 4))
    assert sorted(torch.bincount(by_space(at.detach().half(), 4)).tolist()) == [5, 5, 5, 5]
    assert by_space(torch.randint(0, 9, (20, 3)), 4).shape == (20,)


@pytest.mark.parametrize("odd", ["sparse", "on another device", "a list", "floats"])
def test_partitions_raise_for_invalid_indices(odd: str) -> None:
    change = ODD[odd][0]
    with pytest.raises(gm.ArgumentError, match="batch is not a 1-d tensor of integers"):
        by_graph(change(torch.tensor([0, 1])), 2)
    with pytest.raises(gm.ArgumentError, match=r"edges is not an integer tensor of shape \(2, edges\)"):
        by_metis(change(EDGES), 4, 2)


# -- where a plan is


@pytest.mark.parametrize(
    ("carried", "expected"),
    [
        ("cpu:gloo,cuda:gloo", ("cpu", "cuda", "cuda")),
        ("cpu:gloo,cuda:nccl", ("cpu", "cuda", "cuda")),
        ("cuda:nccl", ("cuda", "cuda", "cuda")),
        ("cpu:threads", ("cpu", "cpu", "cpu")),
    ],
)
def test_ranks_without_the_graph_take_the_device_that_the_root_has_or_the_group_carries(
    carried: str, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the queries of the device are patched."""
    on_gpu = [False]
    has_gpu = "cuda" in carried
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: carried)
    monkeypatch.setattr("gradmesh.nn.inputs.all_gather", lambda x, axis: torch.tensor(on_gpu * 2))
    axis = gm.axis.__globals__["Axis"]("gp", 1, 2, None)
    assert exchange_device(axis).type == expected[0]
    assert device_of_root(axis, 0, None).type == ("cuda" if carried == "cuda:nccl" else "cpu")
    on_gpu[0] = has_gpu
    assert device_of_root(axis, 0, None).type == expected[2]
    if has_gpu:
        assert device_of_root(axis, 0, None).index == 3


def test_a_world_of_one_rank_meets_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert gm.launch(lambda: exchange_device(gm.axis()).type, 1, backend="threads") == ["cpu"]
