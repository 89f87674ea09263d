"""The verbs as operators of torch's library, and a user's own operator that holds one: eager, compiled, exported."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gradmesh as gm
from tests.custom_ops import gathered_norms, plain

Ranks = Callable[[int], Callable[..., list[Any]]]
Run = Callable[[Tensor, str], Tensor]

# torch's own compiler does what torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(gm.rank())
    return torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()


def loss(run: Run, x: Tensor, rank: int) -> Tensor:
    return ((1 + rank) * run(x, "tp") ** 3).sum()


def gradient(run: Run, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss(run, x, gm.rank()), x)[0]


def second(run: Run, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss(run, x, gm.rank()), x, create_graph=True)
    return torch.autograd.grad((grad**2).sum(), x)[0]


def eager() -> tuple[bool, bool]:
    gm.mesh(tp=-1)
    x = rows()
    return (
        torch.allclose(gradient(gathered_norms, x), gradient(plain, x), rtol=1e-12),
        torch.allclose(second(gathered_norms, x), second(plain, x), rtol=1e-12),
    )


def test_an_operator_that_holds_a_verb_is_right_at_two_orders(threads: Ranks) -> None:
    assert threads(3)(eager) == [(True, True)] * 3


def compiled(backend: str) -> tuple[bool, bool]:
    gm.mesh(tp=-1)
    x, rank = rows(), gm.rank()
    torch._dynamo.reset()
    made = torch.compile(lambda x: loss(gathered_norms, x, rank), fullgraph=True, backend=backend)
    value = made(x)
    (grad,) = torch.autograd.grad(value, x)
    return (
        torch.allclose(value, loss(plain, x, rank), rtol=1e-12),
        torch.allclose(grad, gradient(plain, x), rtol=1e-12),
    )


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_is_right_where_it_is_compiled(backend: str, processes: Ranks) -> None:
    assert processes(2)(compiled, backend) == [(True, True)] * 2


def checked() -> dict[str, str]:
    gm.mesh(tp=-1)
    return torch.library.opcheck(gathered_norms, (rows(), "tp"))


@pytest.mark.processes
def test_opcheck_accepts_it_on_every_rank(processes: Ranks) -> None:
    for found in processes(2)(checked):
        assert len(found) >= 4
        assert set(found.values()) == {"SUCCESS"}


class Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gathered_norms(gm.all_gather(x * 2, "tp"), "tp") + gm.scan(x.sum(), "tp")


def exported() -> tuple[list[str], bool]:
    gm.mesh(tp=-1)
    x = rows().detach()
    program = torch.export.export(Module(), (x,))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return names, torch.equal(program.module()(x), Module()(x))


@pytest.mark.processes
def test_an_exported_program_has_the_operators_and_runs_them(processes: Ranks) -> None:
    for names, same in processes(2)(exported):
        assert same
        assert [name for name in names if name != "<built-in function getitem>"] == [
            "aten.mul.Tensor",
            "gradmesh.collective.default",
            "gradmesh_tests.gathered_norms.default",
            "aten.sum.default",
            "gradmesh.collective.default",
            "aten.add.Tensor",
        ]


def test_on_an_axis_of_one_rank_an_exported_program_has_no_collective() -> None:
    gm.init()
    try:
        gm.mesh(tp=-1)
        program = torch.export.export(Alone(), (torch.ones(2, 3),))
    finally:
        torch.distributed.destroy_process_group()
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names
    assert not [name for name in names if "gradmesh" in name or "c10d" in name]


class Alone(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gm.all_gather(x * 2, "tp")


def faked() -> tuple[tuple[int, ...], tuple[int, ...]]:
    gm.mesh(tp=-1)
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16, requires_grad=True)
        y = gathered_norms(x, "tp")
        y.sum().backward()
        assert x.grad is not None
    return tuple(y.shape), tuple(x.grad.shape)


@pytest.mark.processes
def test_fake_tensors_get_their_shapes_through_it(processes: Ranks) -> None:
    assert processes(2)(faked) == [((6,), (3, 4))] * 2


def attacked(seeds: range) -> list[str]:
    """Random programs of verbs and the operator, of which each rank uses other verbs' results: where they are wrong."""
    gm.mesh(tp=-1)
    wrong, rank = [], gm.rank()
    for seed in seeds:
        draw = random.Random(seed)
        kinds = [draw.choice(["operator", "all_gather", "scan", "shift"]) for _ in range(6)]
        uses = [[draw.random() < 0.5 for _ in range(gm.world_size())] for _ in kinds]
        found = []
        for run in (gathered_norms, plain):
            x = rows()
            with gm.ordered():
                total = torch.zeros((), dtype=torch.float64)
                for kind, used in zip(kinds, uses, strict=True):
                    verb = getattr(gm, kind, None)
                    y = run(x * len(kinds), "tp") if verb is None else verb(x.sin(), "tp")
                    if verb is None or used[rank]:  # every rank uses what the operator gives
                        total = total + (1 + rank) * (y**2).sum()
                gm.backward(total)
            found.append(x.grad)
        if found[0] is None or found[1] is None:
            same = found[0] is found[1]
        else:
            same = torch.allclose(found[0], found[1], rtol=1e-12)
        if not same:
            wrong.append(f"{seed}: {kinds}")
    return wrong


def test_among_verbs_of_which_ranks_use_others_it_is_right(threads: Ranks) -> None:
    assert threads(2)(attacked, range(40)) == [[], []]


def unused_on_rank_1() -> str:
    gm.mesh(tp=-1)
    x = rows()
    try:
        with gm.ordered():
            total = (gm.all_gather(x.sin(), "tp") ** 2).sum()
            y = gathered_norms(x, "tp")
            gm.backward(total + (y**2).sum() if gm.rank() == 0 else total)
    except gm.GradmeshError as error:
        return type(error).__name__
    return ""


def test_a_rank_that_does_not_use_it_is_an_error_on_every_rank(threads: Ranks) -> None:
    assert threads(2)(unused_on_rank_1) == ["MismatchError"] * 2


def each_uses_another(run: Run) -> str:
    gm.mesh(tp=-1)
    x = rows()
    try:
        results = run(x, "tp"), run(2 * x, "tp")
        (grad,) = torch.autograd.grad((results[gm.rank()] ** 2).sum(), x)
    except gm.GradmeshError as error:
        return type(error).__name__
    with gm.ordered():
        x = rows()
        results = plain(x, "tp"), plain(2 * x, "tp")
        gm.backward((results[gm.rank()] ** 2).sum())
    assert x.grad is not None
    return "right" if torch.allclose(grad, x.grad) else "wrong"


@pytest.mark.parametrize("run", [plain, gathered_norms], ids=["verb", "operator"])
def test_two_calls_of_an_operator_are_distinguished_like_those_of_a_verb(threads: Ranks, run: Run) -> None:
    assert threads(2)(each_uses_another, run) == ["MismatchError"] * 2
