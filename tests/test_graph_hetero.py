"""`HeteroPlan`: a graph of several types in parts gives what one process gives."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import HeteroPlan, by_count
from tests.conftest import Run, Worlds
from tests.graph_programs import WITHOUT_GRAD
from tests.seldom import seldom

Ranks = Callable[[int], Run]

LAYERS = 3
NODES = {"atom": 9, "bond": 14, "ghost": 0}
RELATIONS = {
    ("atom", "in", "bond"): 30,
    ("bond", "of", "atom"): 25,
    ("atom", "near", "atom"): 40,
    ("bond", "x", "bond"): 0,
}


def graph(seed: int) -> tuple[dict[Any, Tensor], dict[str, Tensor], dict[Any, Tensor]]:
    """Edges, rows, and a weight for each relation."""
    draw = torch.Generator().manual_seed(seed)
    edges = {
        (source, name, target): torch.stack(
            [torch.randint(0, NODES[kind], (count,), generator=draw) for kind in (source, target)]
        )
        for (source, name, target), count in RELATIONS.items()
    }
    rows = {kind: torch.randn(n, 3, dtype=torch.float64, generator=draw) for kind, n in NODES.items()}
    weights = {each: torch.randn(3, 3, dtype=torch.float64, generator=draw) for each in RELATIONS}
    return edges, rows, weights


def assignment(seed: int, ranks: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed + 100)
    if seed % 2:  # rank 0 has no atom
        return {
            kind: torch.randint(min(1, ranks - 1), ranks, (n,), generator=draw) for kind, n in NODES.items()
        }
    return {kind: by_count(n, ranks) for kind, n in NODES.items()}


def dense(seed: int) -> list[Tensor]:
    edges, rows, weights = graph(seed)
    leaves = {kind: x.requires_grad_() for kind, x in rows.items()}
    x = dict(leaves)
    for _ in range(LAYERS):
        sums = {kind: torch.zeros_like(each) for kind, each in x.items()}
        for relation, (source, target) in edges.items():
            moved = (x[relation[0]][source] @ weights[relation]).tanh() * x[relation[2]][target]
            sums[relation[2]] = sums[relation[2]].index_add(0, target, moved)
        x = {kind: each + sums[kind] for kind, each in x.items()}
    energy = torch.stack([(each**2).sum() for each in x.values()]).sum()
    first = torch.autograd.grad(energy, [leaves["atom"], leaves["bond"]], create_graph=True)
    second = torch.autograd.grad(
        torch.stack([(g**2).sum() for g in first]).sum(), [leaves["atom"], leaves["bond"]]
    )
    return [energy, *first, *second]


def plan_of(edges: dict[Any, Tensor], owner: dict[str, Tensor], made: str, hops: int) -> HeteroPlan:
    """The plan, after what becomes of it."""
    if made == "rebuilt":
        return HeteroPlan(
            {key: each[:, :5].flip(1) for key, each in edges.items()}, owner, hops=hops
        ).rebuilt(edges)
    if made in WITHOUT_GRAD:
        with WITHOUT_GRAD[made]():
            return HeteroPlan({key: each.clone() for key, each in edges.items()}, owner, hops=hops)
    plan = HeteroPlan(edges, owner, hops=hops)
    if made == "stored":
        file = io.BytesIO()
        torch.save(plan.state(), file)
        file.seek(0)
        return HeteroPlan.of_state(torch.load(file, weights_only=True))
    return {"copied": copy.copy, "deeply copied": copy.deepcopy}.get(made, lambda plan: plan)(plan)


def in_parts(seed: int, async_op: bool, made: str, hops: int = 1) -> list[Tensor]:
    edges, rows, weights = graph(seed)
    owner = assignment(seed, gm.world_size())
    plan = plan_of(edges, owner, made, hops)
    leaves = {kind: x.requires_grad_() for kind, x in rows.items()}
    x = plan.take(leaves)
    with gm.ordered():
        for layer in range(LAYERS):
            if layer % hops == 0:
                started = plan.exchange(
                    {kind: own_rows(plan, each, kind) for kind, each in x.items()}, async_op=async_op
                )
                held = started.wait() if isinstance(started, gm.Pending) else started
                x = held if hops > 1 else x
            else:
                held = x
            messages = {}
            for relation, found in plan.edges.items():
                source, target = found.edge_index
                moved = (held[relation[0]][source] @ weights[relation]).tanh()
                messages[relation] = moved * x[relation[2]][target]
            sums = plan.scatter_add(messages)
            x = {kind: each + sums[kind] if kind in sums else each for kind, each in x.items()}
        energies = plan.pool({kind: (own_rows(plan, each, kind) ** 2).sum(1) for kind, each in x.items()})
        energy = torch.cat(list(energies.values())).sum()
        first = gm.grad(energy, [leaves["atom"], leaves["bond"]], create_graph=True)
        second = gm.grad(torch.stack([(g**2).sum() for g in first]).sum(), [leaves["atom"], leaves["bond"]])
    whole = plan.gather(plan.take(rows))
    assert all(torch.equal(whole[kind], rows[kind]) for kind in NODES)
    return [energy, *first, *second]


def own_rows(plan: HeteroPlan, x: Tensor, kind: str) -> Tensor:
    return x[: len(plan.rows[kind].own)]


def differences(async_op: bool, made: str, hops: int, seeds: list[int]) -> list[float]:
    return [
        float((got - right).detach().abs().max() / right.detach().abs().max())
        for seed in seeds
        for got, right in zip(in_parts(seed, async_op, made, hops), dense(seed), strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("async_op", "made"), [(False, "once"), (True, "rebuilt")])
@pytest.mark.parametrize("hops", seldom([1, 2, 3], [2]))
def test_hetero_graph_equals_one_process(
    ranks: int, async_op: bool, made: str, hops: int, threads: Ranks
) -> None:
    for found in threads(ranks)(differences, async_op, made, hops, list(range(4))):
        assert max(found) < 1e-10


@pytest.mark.parametrize("made", ["stored", "copied", "deeply copied", "in inference mode", "under no_grad"])
def test_a_plan_of_several_types_is_the_same_plan_whatever_became_of_it(made: str, threads: Ranks) -> None:
    for hops in (1, 2):
        for found in threads(3)(differences, hops == 1, made, hops, [0, 1]):
            assert max(found) < 1e-10


def known(hops: int) -> list[bool]:
    """A plan against its definition, on the calling rank."""
    right = []
    for seed in range(4):
        edges, _, _ = graph(seed)
        edges = {key: each[:, : 4 + seed] for key, each in edges.items()}  # few, so that hops differ
        owner = assignment(seed, gm.world_size())
        plan = HeteroPlan(edges, owner, hops=hops)
        far = {
            (kind, n): 0 for kind, each in owner.items() for n in range(NODES[kind]) if each[n] == gm.rank()
        }
        for hop in range(1, hops + 1):
            near = {end for end, distance in far.items() if distance < hop}
            for (source, _, target), pairs in edges.items():
                for a, b in pairs.T.tolist():
                    if (target, b) in near:
                        far.setdefault((source, a), hop)
        for kind, rows in plan.rows.items():
            held = torch.cat((rows.own, rows.remote)).tolist()
            right += [
                {(kind, n): int(hop) for n, hop in zip(held, rows.hop, strict=True)}
                == {end: hop for end, hop in far.items() if end[0] == kind}
            ]
        for (source, name, target), found in plan.edges.items():
            pairs = edges[source, name, target]
            inner = [i for i, b in enumerate(pairs[1].tolist()) if far.get((target, b), hops) < hops]
            rows_of = [torch.cat((plan.rows[kind].own, plan.rows[kind].remote)) for kind in (source, target)]
            ends = torch.stack([rows_of[at][found.edge_index[at]] for at in (0, 1)])
            right += [found.edges.tolist() == inner, torch.equal(ends, pairs[:, inner])]
    return right


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_hetero_plan_matches_its_definition(hops: int, threads: Ranks) -> None:
    assert all(all(right) for right in threads(3)(known, hops))


def compiled() -> list[bool]:
    edges, rows, _ = graph(0)
    plan = HeteroPlan(edges, assignment(0, gm.world_size()))
    x = [rows[kind][plan.rows[kind].own].requires_grad_() for kind in ("atom", "bond")]

    def loss(plan: HeteroPlan, atom: Tensor, bond: Tensor) -> Tensor:
        held = plan.exchange({"atom": atom, "bond": bond}, async_op=True).wait()
        found = {each: held[each[0]][plan.edges[each].edge_index[0]] for each in RELATIONS}
        return torch.cat([(part**3).reshape(-1) for part in plan.scatter_add(found).values()]).sum()

    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="eager")(plan, *x), x)
    return [torch.allclose(a, b) for a, b in zip(got, torch.autograd.grad(loss(plan, *x), x), strict=True)]


@pytest.mark.processes
def test_async_hetero_exchange_compiles_without_graph_break(worlds: Worlds) -> None:
    assert worlds(2, "gloo", 240).run(compiled) == [[True, True]] * 2


def bits() -> list[bool]:
    edges, _, _ = graph(0)
    plan = HeteroPlan(edges, assignment(0, gm.world_size()))
    right = []
    for relation, found in plan.edges.items():
        source, target = (plan.rows[relation[at]] for at in (0, 2))
        ends = torch.cat((source.own, source.remote))[found.edge_index[0]], target.own[found.edge_index[1]]
        right += [
            torch.equal(torch.stack(ends), edges[relation][:, found.edges]),
            bool((target.owner[edges[relation][1]] == gm.rank()).sum() == len(found.edges)),
            len(found.interior) + len(found.boundary) == len(found.edges),
            bool((found.edge_index[0][found.interior] < len(source.own)).all()),
        ]
    return right


def test_a_rank_has_the_edges_that_end_at_its_nodes(threads: Ranks) -> None:
    assert all(all(right) for right in threads(3)(bits))


def refused(name: str) -> str:
    edges, rows, _ = graph(0)
    owner = assignment(0, gm.world_size())
    plan = HeteroPlan(edges, owner)
    near, odd = ("atom", "near", "atom"), cast("str", ("x", 3)[gm.rank()])
    alike, near_bonds = {**owner, "bond": owner["atom"]}, ("bond", "near", "bond")
    makes: dict[str, Callable[[], Any]] = {
        "a type that is none": lambda: plan.take({"cell": rows["atom"]}),
        "a relation that is none": lambda: plan.scatter_add({("atom", "y", "atom"): rows["atom"]}),
        "messages too few": lambda: plan.scatter_add({near: rows["atom"][:1]}),
        "no hops": lambda: HeteroPlan(edges, owner, hops=0),
        "other hops on a rank": lambda: HeteroPlan(edges, owner, hops=1 + gm.rank()),
        "no relations": lambda: plan.scatter_add([rows["atom"]]),  # type: ignore[arg-type]
        "messages in a list": lambda: plan.scatter_add({near: [1.0]}),  # type: ignore[dict-item]
        "no owner of a type": lambda: HeteroPlan(edges, {"atom": owner["atom"]}),
        "no types": lambda: HeteroPlan(edges[near], owner["atom"]),  # type: ignore[arg-type]
        "edges that leave a type": lambda: HeteroPlan({near: edges[near] + 5}, owner),
        "other relations on a rank": lambda: HeteroPlan(edges if gm.rank() else {near: edges[near]}, owner),
        "other edges on a rank": lambda: HeteroPlan({near: edges[near].flip(gm.rank())}, owner),
        "a bad owner on a rank": lambda: HeteroPlan(edges, {**owner, "bond": owner["bond"] + gm.rank()}),
        "a type that is none on a rank": lambda: plan.exchange(
            {("atom", "cell")[gm.rank()]: plan.take(rows)["atom"]}
        ),
        "another type on a rank": lambda: HeteroPlan(
            {near: edges[near], near_bonds: edges[near]}, alike
        ).exchange({("atom", "bond")[gm.rank()]: torch.ones(len(plan.rows["atom"].own))}),
        "no types on a rank": lambda: plan.gather((plan.take(rows), rows["atom"])[gm.rank()]),  # type: ignore[arg-type]
        "structures of some types on a rank": lambda: plan.pool(
            plan.take(rows), {kind: 0 * plan.rows[kind].own for kind in list(NODES)[gm.rank() :]}
        ),
        "a number for a type on a rank": lambda: HeteroPlan(edges, {**owner, odd: owner["atom"]}),
        "a number for a relation on a rank": lambda: HeteroPlan(
            {**edges, ("atom", odd, "atom"): edges[near]}, owner
        ),
        "rows too few on a rank": lambda: plan.exchange({"atom": rows["atom"][: 6 * gm.rank()]}),
    }
    try:
        makes[name]()
    except gm.GradmeshError as error:
        plan.gather(plan.take(rows))  # the next call is right
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a type that is none", "one of 'atom', 'bond', 'ghost'"),
        ("a relation that is none", "unknown relation"),
        ("messages too few", "the number of rows is not the number of edges"),
        ("no hops", "hops=0"),
        ("other hops on a rank", "different values on rank 1"),
        ("no relations", "messages must be a dict"),
        ("messages in a list", "got       list"),
        ("no owner of a type", "is not a relation between node types of owner"),
        ("no types", "edges and owner must be dicts"),
        ("edges that leave a type", "0 <= source < 9"),
        ("other relations on a rank", "different values on rank 1"),
        ("other edges on a rank", "different values on rank 1"),
        ("a bad owner on a rank", "0 <= rank < 2"),
        ("a type that is none on a rank", "unknown node type"),
        ("another type on a rank", "made of rows of type 'bond'"),
        ("no types on a rank", "x must be a dict"),
        ("structures of some types on a rank", "an entry for 'atom'"),
        ("a number for a type on a rank", "a node type in owner is not a str"),
        ("a number for a relation on a rank", "is not a relation between node types"),
        ("rows too few on a rank", "5 rows"),
    ],
)
def test_invalid_graph_raises_on_every_rank(name: str, text: str, threads: Ranks) -> None:
    said = threads(2)(refused, name)
    assert any(text in one for one in said)
    assert not any("nothing was refused" in one for one in said)
