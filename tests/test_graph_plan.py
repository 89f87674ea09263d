"""`GraphPlan`: networks on a graph in parts give what one process gives, in every mode; what is wrong is refused."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count, by_space
from tests.conftest import Run, Worlds
from tests.graph_programs import (
    Graph,
    Program,
    differences,
    graph_of,
    held,
    owner_of,
    plan_of,
    verdicts,
)

Ranks = Callable[[int], Run]

PARTITIONS = ("count", "graph", "bisection", "curve", "random", "one rank empty", "one rank has all")


def several(programs: list[Program]) -> list[str]:
    return [f"{program}: {said}" for program in programs for said in differences(program)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_energies_forces_and_training_on_them_are_those_of_one_process(ranks: int, threads: Ranks) -> None:
    programs = [
        Program(seed, partition=partition, given=given, hops=hops, overlapped=overlapped, ordered=ordered)
        for seed, (partition, given) in enumerate(
            zip(PARTITIONS, ("whole", "root", "parts", "whole", "parts", "root", "parts"), strict=True)
        )
        for hops, overlapped, ordered in (
            (1, False, False),
            (1, True, True),
            (2, False, True),
            (2, False, False),
        )
    ]
    assert threads(ranks)(several, programs) == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_programs_are_right_or_refused_on_every_rank(ranks: int, threads: Ranks) -> None:
    seeds = list(range(100 * ranks, 100 * ranks + 40 // ranks))
    assert verdicts(seeds, threads(ranks)(held, seeds)) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_many_random_programs_are_right_or_refused_on_every_rank(ranks: int, threads: Ranks) -> None:
    for first in range(10_000 * ranks, 10_000 * ranks + 600, 100):
        seeds = list(range(first, first + 100))
        assert verdicts(seeds, threads(ranks)(held, seeds)) == []


@pytest.mark.processes
def test_processes_equal_one_process(processes: Ranks) -> None:
    programs = [
        Program(1, partition="bisection", overlapped=True),
        Program(2, partition="one rank empty", given="root", ordered=True),
        Program(3, partition="random", given="parts", hops=2, overlapped=True),
    ]
    assert processes(2)(several, programs) == [[], []]


def forgetful() -> list[bool]:
    """Plans whose edges or rows are wrong."""

    def without_an_edge(plan: GraphPlan) -> GraphPlan:
        plan.edge_index, plan.edges = plan.edge_index[:, 1:], plan.edges[1:]
        return plan

    def with_rows_in_another_order(plan: GraphPlan) -> GraphPlan:
        own = len(plan.own)
        source = plan.edge_index[0].clone()
        far = source >= own
        source[far] = 2 * own + len(plan.remote) - 1 - source[far]
        plan.edge_index = torch.stack((source, plan.edge_index[1]))
        return plan

    program = Program(5, nodes=12, edges=60)
    return [
        bool(differences(program, again=wrong)) for wrong in (without_an_edge, with_rows_in_another_order)
    ]


def test_the_comparison_finds_wrong_plans(threads: Ranks) -> None:
    assert threads(3)(forgetful) == [[True, True]] * 3


class PooledToR(GraphPlan):
    """A pool whose gradient is summed once more."""

    def pool(self, x: Tensor, structure: Tensor | None = None, structures: int = 1) -> Tensor:
        assert structure is not None
        return gm.all_reduce(x.new_zeros(structures).index_add(0, structure, x), dst=gm.R)


class TakenOfR(GraphPlan):
    """Own rows whose gradients stay on their rank."""

    def take(self, x: Tensor) -> Tensor:
        return x[self.own]


class NothingSentBack(GraphPlan):
    """An exchange whose backward forgets the rows that were sent."""

    def exchange(self, x: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return torch.cat((x, super().exchange(x)[len(x) :].detach()))


def with_wrong_gradients() -> list[list[bool]]:
    found = []
    for kind in (PooledToR, TakenOfR, NothingSentBack):

        def wrong(plan: GraphPlan, kind: type[GraphPlan] = kind) -> GraphPlan:
            plan.__class__ = kind
            return plan

        said = differences(Program(5, nodes=12, edges=60), again=wrong)
        found.append(
            [any(one.startswith(name) for one in said) for name in ("energies", "forces", "gradient")]
        )
    return found


def test_the_comparison_finds_wrong_gradients_behind_right_values(threads: Ranks) -> None:
    assert threads(3)(with_wrong_gradients) == [[[False, True, True]] * 3] * 3


# -- what a plan knows


def known(given: str, hops: int) -> list[str]:
    """A plan against its definition, on the calling rank."""
    rank, wrong = gm.rank(), []
    for seed in range(6):
        program = Program(seed, nodes=14, edges=30, hops=hops, given=given, partition=PARTITIONS[seed])
        graph = graph_of(program)
        owner = owner_of(program, graph, gm.world_size())
        plan = plan_of(program, graph, owner)
        near = {int(n): 0 for n in (owner == rank).nonzero()}
        edges: list[int] = []
        for hop in range(1, hops + 1):
            ends = {n for n, far in near.items() if far == hop - 1}
            found = [e for e in range(graph.edges.shape[1]) if int(graph.edges[1, e]) in ends]
            edges += found
            near = {int(graph.edges[0, e]): hop for e in found} | near
        remote = sorted((n for n in near if near[n]), key=lambda n: (int(owner[n]), n))
        rows = torch.tensor([*sorted(n for n in near if not near[n]), *remote], dtype=torch.int64)
        checks = {
            "own": plan.own.tolist() == sorted(n for n in near if not near[n]),
            "remote": plan.remote.tolist() == remote,
            "hop": plan.hop.tolist() == [near[int(n)] for n in rows],
            "edges": torch.equal(rows[plan.edge_index], graph.edges[:, sorted(edges)])
            if not given.startswith("parts") or hops == 1
            else sorted(rows[plan.edge_index].T.tolist()) == sorted(graph.edges[:, edges].T.tolist()),
            "numbers": given.startswith("parts") or plan.edges.tolist() == sorted(edges),
            "interior": bool((plan.edge_index[:, plan.interior] < len(plan.own)).all()),
            "boundary": bool((plan.edge_index[:, plan.boundary] >= len(plan.own)).any(0).all()),
            "all edges": sorted(torch.cat((plan.interior, plan.boundary)).tolist())
            == list(range(len(edges))),
            "counts": plan.counts == tuple(torch.bincount(owner, minlength=gm.world_size()).tolist()),
            "receive_counts": sum(plan.receive_counts.values()) == len(remote),
            "rows_of_gather": plan.rows_of_gather == len(plan.own) * (gm.world_size() - 1),
            "rows_sent": int(gm.all_reduce(torch.tensor(plan.rows_sent), dst=gm.I))
            == int(gm.all_reduce(torch.tensor(len(remote)), dst=gm.I)),
            "the verb": torch.equal(
                gm.neighbor_all_to_all(
                    plan.own, send_rows=plan.send_rows, receive_counts=plan.receive_counts
                ),
                plan.remote,
            ),
        }
        wrong += [f"{program}: {name}" for name, right in checks.items() if not right]
    return wrong


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("given", ["whole", "root", "parts", "parts and owner"])
def test_plan_matches_its_definition(given: str, hops: int, threads: Ranks) -> None:
    assert threads(3)(known, given, hops) == [[]] * 3


def sums_in_parts() -> list[bool]:
    program = Program(7, nodes=9, edges=70, partition="random")
    graph = graph_of(program)
    plan = plan_of(program, graph, owner_of(program, graph, gm.world_size()))
    messages = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
    whole = torch.zeros(9, 3).index_add(0, graph.edges[1], messages)
    again = [plan.scatter_add(messages[plan.edges]) for _ in range(3)]
    return [torch.equal(one, whole[plan.own]) for one in again]


def test_messages_are_added_in_the_order_of_one_process_to_the_last_bit(threads: Ranks) -> None:
    assert threads(3)(sums_in_parts) == [[True] * 3] * 3


def rebuilt(given: str, hops: int) -> list[str]:
    """A plan that was made of other edges first."""
    program = Program(4, given=given, hops=hops, partition="random", overlapped=True)
    graph = graph_of(program)
    owner = owner_of(program, graph, gm.world_size())
    other = Graph(graph.positions, graph.edges.flip(1)[:, :17].flip(0), *list(vars(graph).values())[2:])

    def again(_: GraphPlan) -> GraphPlan:
        edges: Tensor | None = graph.edges
        if given == "parts":
            edges = graph.edges[:, owner[graph.edges[1]] == gm.rank()]
        if given == "root" and gm.rank() != gm.world_size() - 1:
            edges = None
        before = plan_of(program, other, owner)
        numbers = before.edge_index.clone()
        after = before.rebuilt(edges)
        assert torch.equal(before.edge_index, numbers)
        return after

    return differences(program, again=again)


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("given", ["whole", "root", "parts"])
def test_a_plan_that_is_rebuilt_is_that_of_the_new_edges(given: str, hops: int, threads: Ranks) -> None:
    assert threads(3)(rebuilt, given, hops) == [[]] * 3


def stored(given: str) -> list[str]:
    program = Program(6, given=given, hops=2 if given == "parts" else 1, partition="random", overlapped=True)

    def again(plan: GraphPlan) -> GraphPlan:
        file = io.BytesIO()
        torch.save(plan.state(), file)
        file.seek(0)
        made = GraphPlan.of_state(torch.load(file, weights_only=True))
        assert made.digest == plan.digest
        assert made.digest != made.rebuilt(None if given == "root" and gm.rank() != 2 else none).digest
        return copy.deepcopy(made)

    none = torch.empty(2, 0, dtype=torch.int64)
    return differences(program, again=again)


@pytest.mark.parametrize("given", ["whole", "root", "parts"])
def test_a_plan_comes_back_from_its_state(given: str, threads: Ranks) -> None:
    assert threads(3)(stored, given) == [[]] * 3


def digests() -> str:
    return plan_of(Program(6), graph_of(Program(6)), by_count(11, gm.world_size())).digest


def test_the_digest_is_that_of_the_plan_and_of_the_rank(threads: Ranks) -> None:
    first, second = threads(3)(digests), threads(3)(digests)
    assert first == second
    assert len(set(first)) == 3


# -- modes of autograd


def plan_for_modes(dtype: torch.dtype = torch.float64) -> tuple[GraphPlan, Tensor]:
    program = Program(11, nodes=10, edges=30, partition="random")
    plan = plan_of(program, graph_of(program), owner_of(program, graph_of(program), gm.world_size()))
    x = torch.randn(10, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return plan, x[plan.own]


def smooth(plan: GraphPlan, x: Tensor) -> Tensor:
    """A loss that differs from rank to rank."""
    source, target = plan.edge_index
    sums = plan.scatter_add((plan.exchange(x.sin())[source] * x[target].cos()) ** 2)
    pooled = gm.replicate(plan.pool(sums * x))  # each rank uses it differently from here on
    return (1 + gm.rank()) * pooled.sin().sum() + (plan.gather(sums) ** 3).sum()


def in_forward_mode() -> list[float]:
    plan, x = plan_for_modes()
    draw = torch.Generator().manual_seed(gm.rank())
    v = torch.randn(x.shape, dtype=x.dtype, generator=draw)
    by_func = torch.func.jvp(lambda x: smooth(plan, x), (x,), (v,))[1]
    with forward_ad.dual_level():
        by_dual = forward_ad.unpack_dual(smooth(plan, forward_ad.make_dual(x, v))).tangent
    step = 1e-6
    by_difference = (smooth(plan, x + step * v) - smooth(plan, x - step * v)) / (2 * step)
    assert by_dual is not None
    scale = float(by_difference.abs())
    return [float(abs(by_func - by_difference)) / scale, float(abs(by_dual - by_func)) / scale]


def test_forward_mode_is_the_difference_quotient(threads: Ranks) -> None:
    for quotient, dual in threads(3)(in_forward_mode):
        assert quotient < 1e-7
        assert dual < 1e-13


def over_features() -> list[bool]:
    plan, x = plan_for_modes()
    at = torch.arange(10)[plan.own] % 2

    def one(column: Tensor) -> tuple[Tensor, ...]:
        rows = plan.exchange(column)
        sums = plan.scatter_add(rows[plan.edge_index[0]])
        return (
            rows,
            sums,
            plan.pool(sums, at, 2),
            plan.gather(column),
            plan.take(plan.gather(column, dst=gm.I)),
        )

    mapped = torch.func.vmap(one, in_dims=1, out_dims=1)(x)
    gradient = torch.func.vmap(torch.func.grad(lambda column: smooth(plan, column)), in_dims=1, out_dims=1)(x)
    columns = [x[:, at].clone().requires_grad_() for at in range(3)]
    alone = [torch.autograd.grad(smooth(plan, column), column)[0] for column in columns]
    return [
        *(torch.allclose(got, right, rtol=1e-13) for got, right in zip(mapped, one(x), strict=True)),
        torch.allclose(gradient, torch.stack(alone, dim=1), rtol=1e-12),
    ]


def test_columns_can_be_mapped_over(threads: Ranks) -> None:
    assert threads(3)(over_features) == [[True] * 6] * 3


def in_complex_numbers() -> list[bool]:
    plan, x = plan_for_modes(torch.complex128)
    x.requires_grad_()
    source = plan.edge_index[0]

    def sums(x: Tensor) -> Tensor:
        return plan.scatter_add(plan.exchange(x)[source])

    (grad,) = torch.autograd.grad((sums(x) * (1 + 2j)).abs().pow(2).sum(), x)
    real, imaginary = x.real.detach().requires_grad_(), x.imag.detach().requires_grad_()
    norm = 5 * (sums(real) ** 2).sum() + 5 * (sums(imaginary) ** 2).sum()
    by_parts = torch.autograd.grad(norm, (real, imaginary))
    return [torch.allclose(grad, torch.complex(*by_parts), rtol=1e-12)]


def test_complex_rows_have_the_gradients_of_their_parts(threads: Ranks) -> None:
    assert threads(3)(in_complex_numbers) == [[True]] * 3


def rounded_on_the_way(async_op: bool) -> list[bool]:
    plan, x = plan_for_modes()
    x.requires_grad_()
    own = len(x)
    rows = plan.exchange(x, comm_dtype=torch.bfloat16, backward_dtype=torch.bfloat16, async_op=async_op)
    if isinstance(rows, gm.Pending):
        rows = rows.wait()
    exact = plan.exchange(x)
    draw = torch.randn(rows.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(gm.rank()))
    (grad,) = torch.autograd.grad(rows, x, draw)
    rounded = draw.clone()
    rounded[own:] = draw[own:].bfloat16().double()
    (expected,) = torch.autograd.grad(exact, x, rounded)
    return [
        rows.dtype is torch.float64,
        torch.equal(rows[:own], exact[:own]),
        torch.equal(rows[own:], exact[own:].bfloat16().double()),
        # The sum is taken in the dtype that travels.
        bool(((grad - expected).abs() <= 2**-6 * expected.abs().max()).all()),
        torch.equal(grad[draw_is_alone(plan)], draw[:own][draw_is_alone(plan)]),
    ]


def draw_is_alone(plan: GraphPlan) -> Tensor:
    """The local rows that no other rank needs."""
    alone = torch.ones(len(plan.own), dtype=torch.bool)
    for rows in plan.send_rows.values():
        alone[rows] = False
    return alone


@pytest.mark.parametrize("async_op", [False, True])
def test_bfloat16_transport_leaves_local_rows_unchanged(async_op: bool, threads: Ranks) -> None:
    assert threads(3)(rounded_on_the_way, async_op) == [[True] * 5] * 3


def test_gradcheck_passes_for_an_exchange() -> None:
    def loss(x: Tensor) -> Tensor:
        plan, _ = plan_for_modes()
        return smooth(plan, x)

    def inputs(rank: int) -> tuple[Tensor]:
        rows = int((owner_of(Program(11, nodes=10, edges=30, partition="random"), MODES, 3) == rank).sum())
        return (torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)),)

    assert gm.verify.gradcheck(loss, inputs, world_size=3, order=2, forward=True)


MODES = graph_of(Program(11, nodes=10, edges=30, partition="random"))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("method", "arrow"), [("exchange", "V -> V"), ("gather", "V -> R"), ("pool", "V -> I")]
)
def test_the_audit_finds_nothing(method: str, arrow: str, ranks: int) -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        plan, x = plan_for_modes()
        return getattr(plan, method), x

    found = gm.verify.audit(build, world_size=ranks)
    assert found.findings == ()
    assert arrow in found.arrows


def whole_gradient() -> list[bool]:
    plan, _ = plan_for_modes()
    x = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = plan.pool((plan.take(x) ** 3).sum(1)).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return [torch.allclose(first, 3 * x**2), torch.allclose(second, 36 * x**3)]


def test_gradient_of_taken_rows_is_full_on_every_rank(threads: Ranks) -> None:
    assert threads(3)(whole_gradient) == [[True, True]] * 3


# -- compiled


def compiled(backend: str, as_module: bool, layers: int) -> list[str]:
    wrong = []

    def loss(plan: GraphPlan, at: Tensor, structure: Tensor, weight: Tensor) -> Tensor:
        source, target = plan.edge_index
        x = plan.take(at)
        for _ in range(layers):
            pending = plan.exchange(x @ weight, async_op=True)
            inside, outside = plan.interior, plan.boundary
            near = (x @ weight)[source[inside]] - x[target[inside]]
            rows = pending.wait()
            far = rows[source[outside]] - x[target[outside]]
            x = x + plan.scatter_add(near.tanh(), inside) + plan.scatter_add(far.tanh(), outside)
        return plan.pool(x.sum(1), structure, 2).sin().sum() + (plan.gather(x, dst=gm.I) ** 2).sum()

    class Network(torch.nn.Module):
        def forward(self, plan: GraphPlan, at: Tensor, structure: Tensor, weight: Tensor) -> Tensor:
            return loss(plan, at, structure, weight)

    torch._dynamo.reset()
    program = torch.compile(Network() if as_module else loss, fullgraph=True, backend=backend)
    plan = None
    for step, (nodes, edges) in enumerate([(12, 60), (15, 74), (19, 90), (23, 71), (23, 66), (14, 99)]):
        draw = torch.Generator().manual_seed(step)
        pairs = torch.randint(0, nodes, (2, edges), generator=draw)
        at = torch.randn(nodes, 3, dtype=torch.float64, generator=draw).requires_grad_()
        weight = torch.randn(3, 3, dtype=torch.float64, generator=draw).requires_grad_()
        again = plan is not None and plan.nodes == nodes
        plan = plan.rebuilt(pairs) if plan and again else GraphPlan(pairs, by_space(at, gm.world_size()))
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            got = program(plan, at, plan.own % 2, weight)
            gradients = torch.autograd.grad(got, (at, weight))
        expected = loss(plan, at, plan.own % 2, weight)
        right = torch.autograd.grad(expected, (at, weight))
        for name, a, b in zip(("loss", "at", "weight"), (got, *gradients), (expected, *right), strict=True):
            if not torch.allclose(a, b, rtol=1e-12):
                wrong.append(f"{name} in step {step}")
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "as_module", "layers"),
    [
        ("aot_eager", False, 1),
        pytest.param("aot_eager", False, 2, marks=pytest.mark.slow),
        pytest.param("inductor", True, 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_compiled_whole_and_not_again_from_the_third_graph_on(
    backend: str, as_module: bool, layers: int, worlds: Worlds
) -> None:
    assert worlds(2, "gloo", 240).run(compiled, backend, as_module, layers) == [[], []]


# -- what is refused

EDGES, OWNER = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.tensor([0, 0, 1, 1])


def plan() -> GraphPlan:
    return GraphPlan(EDGES, OWNER)


def own_part() -> tuple[Tensor, Tensor]:
    return EDGES[:, OWNER[EDGES[1]].eq(gm.rank())], OWNER.eq(gm.rank()).nonzero().squeeze(1)


def changed(on_rank: int, right: Any, wrong: Any) -> Any:
    return wrong if gm.rank() == on_rank else right


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an owner out of range": (
        lambda: GraphPlan(EDGES, OWNER + 1),
        r"0 <= rank < 2(.|\n)*ranks from 1 to 2",
    ),
    "an owner of floats": (lambda: GraphPlan(EDGES, OWNER.float()), r"torch.float32\[4\]"),
    "no owner": (lambda: GraphPlan(EDGES), "owner is not a 1-d integer tensor(.|\n)*NoneType"),
    "edges that leave the graph": (lambda: GraphPlan(EDGES + 1, OWNER), "0 <= source < 4(.|\n)*from 1 to 4"),
    "edges the other way round": (lambda: GraphPlan(EDGES.T, OWNER), r"torch.int64\[4, 2\]"),
    "no edges": (lambda: GraphPlan(None, OWNER), r"edges is not an integer tensor of shape \(2, edges\)"),
    "no hops": (lambda: GraphPlan(EDGES, OWNER, hops=0), "hops=0"),
    "half a hop": (lambda: GraphPlan(EDGES, OWNER, hops=1.5), "hops=1.5"),  # type: ignore[arg-type]
    "a root that is none": (lambda: GraphPlan(EDGES, OWNER, root=2), "0 <= root < 2"),
    "a graph on others than the root": (lambda: GraphPlan(EDGES, OWNER, root=0), "rank that is not the root"),
    "own beside root": (lambda: GraphPlan(EDGES, own=OWNER, root=0), "own= and root= cannot be combined"),
    "own nodes that are not the owner's": (
        lambda: GraphPlan(own_part()[0], OWNER, own=changed(1, own_part()[1], OWNER)),
        "own does not match owner",
    ),
    "own nodes twice beside owner": (
        lambda: GraphPlan(own_part()[0], OWNER, own=changed(1, own_part()[1], torch.tensor([2, 2]))),
        "the 2 nodes that rank 1 owns, each once",
    ),
    "another owner beside own on one rank": (
        lambda: GraphPlan(own_part()[0], changed(1, OWNER, torch.tensor([0, 0, 1, 1, 0])), own=own_part()[1]),
        "different values on rank 1",
    ),
    "owner beside own on one rank": (
        lambda: GraphPlan(own_part()[0], changed(1, None, OWNER), own=own_part()[1]),
        "calls do not match",
    ),
    "own nodes of floats": (
        lambda: GraphPlan(EDGES, own=OWNER.float()),
        "own is not a 1-d integer tensor",
    ),
    "own nodes twice": (
        lambda: GraphPlan(EDGES, own=torch.tensor([0, 1])),
        r"missing or repeated: \[0, 1, 2, 3\]",
    ),
    "own nodes that are none": (lambda: GraphPlan(EDGES, own=own_part()[1] - 1), "indices from -1 to 2"),
    "edges of others' nodes": (lambda: GraphPlan(EDGES, own=own_part()[1]), "ends at a node of another rank"),
    "one rank with other edges": (
        lambda: GraphPlan(changed(1, EDGES, EDGES.flip(1)), OWNER),
        "the ranks' arguments differ(.|\n)*different values on rank 1",
    ),
    "one rank with fewer edges": (
        lambda: GraphPlan(changed(1, EDGES, EDGES[:, :3]), OWNER),
        "different values on rank 1",
    ),
    "one rank with another owner": (
        lambda: GraphPlan(EDGES, changed(0, OWNER, 1 - OWNER)),
        "different values on rank 1",
    ),
    "owners whose sums and moments are equal": (
        lambda: GraphPlan(EDGES, torch.tensor(changed(1, [0, 1, 1, 0], [1, 0, 0, 1]))),
        "different values on rank 1",
    ),
    "edges whose sums and moments are equal": (
        lambda: GraphPlan(torch.tensor([changed(1, [0, 1, 1, 0], [1, 0, 0, 1]), [2, 2, 2, 2]]), OWNER),
        "different values on rank 1",
    ),
    "one rank with more hops": (
        lambda: GraphPlan(EDGES, OWNER, hops=1 + gm.rank()),
        "different values on rank 1",
    ),
    "one rank with a bad owner": (
        lambda: GraphPlan(EDGES, changed(1, OWNER, -OWNER)),
        "owner has ranks out of range",
    ),
    "one rank with bad edges of its own": (
        lambda: GraphPlan(changed(1, own_part()[0], EDGES), own=own_part()[1]),
        "ends at a node of another rank",
    ),
    "a bad graph on the root": (
        lambda: GraphPlan(EDGES - 1, OWNER, root=0) if gm.rank() == 0 else GraphPlan(root=0),
        "from -1 to 2",
    ),
    "another root on one rank": (
        lambda: GraphPlan(EDGES, OWNER, root=gm.rank()),
        "different values on rank 1",
    ),
    "other edges on one rank, rebuilt": (
        lambda: plan().rebuilt(changed(1, EDGES, EDGES.flip(1))),
        "GraphPlan.rebuilt(.|\n)*different values on rank 1",
    ),
    "rows too few": (lambda: plan().exchange(torch.ones(3)), r"2 rows(.|\n)*shape \(3,\)"),
    "rows too few on one rank": (lambda: plan().exchange(torch.ones(2 + gm.rank())), r"shape \(3,\)"),
    "rows too few on one rank, async": (
        lambda: plan().exchange(torch.ones(2 + gm.rank()), async_op=True).wait(),
        r"shape \(3,\)",
    ),
    "a number for rows": (lambda: plan().exchange(torch.tensor(1.0)), r"shape \(\)"),
    "no tensor": (lambda: plan().exchange([1.0, 2.0]), "must be a dense tensor"),  # type: ignore[call-overload]
    "rows too few to gather on one rank": (lambda: plan().gather(torch.ones(2 + gm.rank())), r"shape \(3,\)"),
    "rows too few to pool on one rank": (lambda: plan().pool(torch.ones(2 + gm.rank())), r"shape \(3,\)"),
    "structures that are none": (
        lambda: plan().pool(torch.ones(2), torch.tensor([0, 2]), 2),
        "0 <= index < 2(.|\n)*from 0 to 2",
    ),
    "structures in floats on one rank": (
        lambda: plan().pool(torch.ones(2), changed(1, OWNER, OWNER.float())[:2], 2),
        r"1-d tensor of int64(.|\n)*torch.float32\[2\]",
    ),
    "structures in a column on one rank": (
        lambda: plan().pool(torch.ones(2), changed(1, OWNER[:2], OWNER[:2, None]), 2),
        r"torch.int64\[2, 1\]",
    ),
    "two and a half structures on one rank": (
        lambda: plan().pool(torch.ones(2), OWNER[:2], changed(1, 2, 2.5)),
        "structures=2.5",
    ),
    "less than no structures": (lambda: plan().pool(torch.ones(2), OWNER[:2], -1), "structures=-1"),
    "structures without numbers": (lambda: plan().pool(torch.ones(2), None, 2), "structures=2"),
    "structures of other rows": (lambda: plan().pool(torch.ones(2), OWNER, 2), r"shape \(4,\)"),
    "rows of some nodes": (lambda: plan().take(torch.ones(2)), r"4 rows(.|\n)*shape \(2,\)"),
    "messages too few": (
        lambda: plan().scatter_add(torch.ones(1)),
        "the number of rows is not the number of edges",
    ),
    "messages too few for some edges": (
        lambda: plan().scatter_add(torch.ones(2), plan().interior),
        "the number of rows is not the number of edges",
    ),
    "a state that is none": (lambda: GraphPlan.of_state({"version": 1}), "not a valid plan state"),
    "another rank's state": (
        lambda: GraphPlan.of_state({**plan().state(), "rank": 1 - gm.rank()}),
        "the state belongs to another rank",
    ),
    "one rank with a state of no kind": (
        lambda: GraphPlan.of_state({**plan().state(), "kind": changed(1, 0, 7)}),
        "not a valid plan state",
    ),
    "one rank with a state that lacks rows": (
        lambda: GraphPlan.of_state({**plan().state(), "remote": plan().remote[: changed(1, 1, 0)]}),
        "not a valid plan state",
    ),
    "one rank with a state of floats": (
        lambda: GraphPlan.of_state({**plan().state(), "owner": changed(1, OWNER, OWNER.float())}),
        "not a valid plan state",
    ),
    "one rank with a state that is none": (
        lambda: GraphPlan.of_state(changed(1, plan().state(), {})),
        "not a valid plan state",
    ),
}


def refuse(name: str) -> list[str]:
    made = REFUSED[name][0]
    said = []
    for _ in range(2):  # the next call after an error is right, and so is its error
        try:
            made()
        except gm.GradmeshError as error:
            said.append(f"{type(error).__name__}: {error}")
        said.append(str(plan().exchange(10.0 + plan().own).tolist()))
    return said


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_graph_raises_on_every_rank(name: str, threads: Ranks) -> None:
    text = REFUSED[name][1]
    by_rank = threads(2)(refuse, name)
    for rank, said in enumerate(by_rank):
        assert len(said) == 4, f"rank {rank} was not refused: {said}"
        assert said[1] == said[3] == str([[10.0, 11.0, 13.0], [12.0, 13.0, 11.0]][rank])
    assert any(re.search(text, said[0]) for said in by_rank), by_rank
    for said in by_rank:
        assert "gradmesh" in said[0]


def mixed_states() -> list[str]:
    """States of two plans that differ in how much is sent, in which rows, in the partition, and in the hops."""
    none, said = EDGES[:, :0], list[str]()
    for first, other in (
        (plan(), plan().rebuilt(none)),
        (plan(), plan().rebuilt(torch.tensor([[0, 1, 3, 2], [1, 2, 3, 0]]))),
        (plan(), plan()),
        (plan().rebuilt(none), GraphPlan(none, 1 - OWNER)),
        (plan().rebuilt(none), GraphPlan(none, OWNER, hops=2)),
    ):
        try:
            GraphPlan.of_state((other if gm.rank() else first).state())
            said.append("")
        except gm.MismatchError as error:
            said.append(str(error))
    return said


def test_states_of_different_plans_are_refused(threads: Ranks) -> None:
    for amount, rows, same, partition, hops in threads(2)(mixed_states):
        assert "rank 1 sends 0 rows to rank 0, which expects 1" in amount
        assert "rank 1 sends 1 rows to rank 0, which expects other rows" in rows
        assert same == ""
        assert "different partitions" in partition
        assert "numbers of hops" in hops


def owner_written_over() -> bool:
    owner = OWNER.clone()
    made = GraphPlan(EDGES, owner)
    owner.zero_()
    return made.rebuilt(EDGES).digest == plan().digest


def test_a_plan_keeps_its_partition_when_the_tensor_is_written_over(threads: Ranks) -> None:
    assert threads(2)(owner_written_over) == [True, True]


def copied() -> list[bool]:
    made, x = plan_for_modes()
    source = made.edge_index[0]
    before = made.scatter_add(made.exchange(x, async_op=True).wait()[source])
    again = copy.deepcopy(made)
    return [again.digest == made.digest, torch.equal(again.scatter_add(again.exchange(x)[source]), before)]


def test_a_plan_that_was_used_can_be_copied(threads: Ranks) -> None:
    assert threads(3)(copied) == [[True, True]] * 3


def shapes_alone() -> list[tuple[int, ...]]:
    made, x = plan_for_modes()
    at = made.own % 2
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, fake_at = mode.from_tensor(x), mode.from_tensor(at)
        return [
            tuple(y.shape) for y in (made.exchange(fake), made.gather(fake), made.pool(fake, fake_at, 2))
        ] + [(len(made.own) + len(made.remote), 3)]


def test_fake_rows_get_their_shapes_without_communication(threads: Ranks) -> None:
    for exchanged, gathered, pooled, rows in threads(3)(shapes_alone):
        assert (exchanged, gathered, pooled) == (rows, (10, 3), (2, 3))


def exchanged_both_ways() -> tuple[int, int]:
    """One exchange of rows of three float64, and its backward in bfloat16."""
    made, x = plan_for_modes()
    x.requires_grad_()
    made.exchange(x, backward_dtype=torch.bfloat16).sum().backward()
    return made.rows_sent, len(made.remote)


def test_only_boundary_rows_are_sent() -> None:
    ran = gm.verify.simulate(exchanged_both_ways, 3)
    for rank, (sent, remote) in enumerate(ran.results):
        events = [one for one in ran.events if one.rank == rank and one.verb == "neighbor_all_to_all"]
        assert [(one.phase, one.sent) for one in events] == [
            ("forward", sent * 3 * 8),
            ("backward", remote * 3 * 2),
        ]
